"""Models of every family that are told in their prompts how good a decision was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.policies import test_tiny
from tests.policies.openvla.tiny import SPEC as SMALL
from tests.policies.openvla.tiny import observed
from tests.policies.vla.tiny_vlas import tiny_vla
from tests.toys import seeded
from vla_rl.contract.errors import UserError
from vla_rl.policies.advantage_conditioned import (
    INDICATOR,
    NEGATIVE,
    POSITIVE,
    AdvantagePrompted,
    advantage_conditioned,
)
from vla_rl.policies.normalization import Affine
from vla_rl.policies.openvla.decoding import OpenVLAOptions, Parallel
from vla_rl.policies.openvla.policy import OpenVLA, OpenVLADiffusion, OpenVLARegression
from vla_rl.policies.pi0.policy import Pi0
from vla_rl.policies.pi05.policy import Pi05
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.smolvla.policy import SmolVLA


def openvla(kind: Any) -> Any:
    torch.manual_seed(0)
    spec = replace(SMALL, tasks=("take one", "take two", "take three"))
    made = kind.new(spec, Affine((0.0, 0.0), (1.0, 1.0)), options=OpenVLAOptions(decoding=Parallel(3)))
    for parameter in made.network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


FLOWS: dict[str, Callable[[], Any]] = {kind.__name__: lambda kind=kind: tiny_vla(kind) for kind in (SmolVLA, Pi0, Pi05)}
OTHERS = {kind.__name__: lambda kind=kind: openvla(kind) for kind in (OpenVLA, OpenVLARegression, OpenVLADiffusion)}
SOME = ("SmolVLA", "OpenVLARegression")
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in SOME)) for name in (*FLOWS, *OTHERS)]
)


def acted(policy: Any, name: str) -> torch.Tensor:
    obs = test_tiny.observations() if name in FLOWS else observed()
    return policy.act(policy.encode(obs), {}, "eval", seeded(2))[0].action.float()


@EVERY
def test_it_acts_on_good_prompts_and_is_saved_with_them(name, tmp_path):
    make = {**FLOWS, **OTHERS}[name]
    base = acted(make(), name)
    policy = advantage_conditioned(make(), 0.0)
    torch.testing.assert_close(acted(policy, name), base, atol=1e-4, rtol=0)
    policy.guide(1.0)
    good = acted(policy, name)
    assert not torch.allclose(good, base, atol=1e-3), "the prompt says nothing"
    policy.save_pretrained(tmp_path / "saved")
    found = load_policy(tmp_path / "saved")
    assert isinstance(found, AdvantagePrompted) and advantage_conditioned(found, 1.0) is found
    torch.testing.assert_close(acted(found, name), good, atol=1e-6, rtol=0)


@EVERY
def test_its_loss_is_the_bases_under_the_prompt_that_is_told(name):
    make = {**FLOWS, **OTHERS}[name]
    plain, policy = make(), advantage_conditioned(make(), 1.0)
    obs = test_tiny.observations() if name in FLOWS else observed()
    features, size = policy.imitation_features(obs), (len(obs.state), policy.chunk_length, policy.spec.action_dim)
    chunks = 2 * torch.rand(size, generator=seeded(1)) - 1

    def losses(of: Any, **told: torch.Tensor) -> torch.Tensor:
        return of.imitation_losses({**features, **told}, chunks, 1, seeded(3))

    count = len(obs.state)
    bad, good, unknown = (losses(policy, **{INDICATOR: torch.full((count,), told)}) for told in range(3))
    torch.testing.assert_close(unknown, losses(plain), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(losses(policy), good)
    assert not torch.allclose(good, unknown, atol=1e-4) and not torch.allclose(good, bad, atol=1e-4)
    good.mean().backward()
    assert any(item.grad is not None and item.grad.any() for item in policy.trainable().values())


def test_the_words_are_in_their_rows():
    """Nothing said, then good, then bad: one and two tokens more."""
    policy = advantage_conditioned(tiny_vla(SmolVLA), 1.0)
    task = torch.arange(len(policy.spec.tasks))
    bad, good, unknown = (policy.base.token_mask[policy._row(task, told)].sum(1) for told in range(3))
    assert torch.equal(good, unknown + 1) and torch.equal(bad, unknown + 2)
    assert torch.equal(policy._row(policy._row(task, NEGATIVE), POSITIVE), policy._row(task, POSITIVE))


def test_guidance_is_for_flows():
    policy = advantage_conditioned(tiny_vla(SmolVLA), 1.0)
    ends = {}
    for beta in (0.0, 1.0, 1.0 + 1e-9, 2.0):
        policy.guide(beta)
        ends[beta] = acted(policy, "SmolVLA")
    torch.testing.assert_close(ends[1.0], ends[1.0 + 1e-9], atol=1e-4, rtol=0)
    assert not torch.allclose(ends[2.0], ends[1.0], atol=1e-3)
    with pytest.raises(UserError, match=r"no velocity that guidance 1\.5"):
        advantage_conditioned(openvla(OpenVLARegression), 1.5)
