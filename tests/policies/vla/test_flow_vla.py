"""The policy around a flow VLA: its whole padded chain has the density, little is kept, and imitation finds actions."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.policies.test_tiny import SPEC, observations
from tests.policies.vla.toy_network import WIDTH, ToyNetwork, ToyShape
from tests.toys import seeded
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.flow import (
    AllSteps,
    FlowSampler,
    FlowSde,
)
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.latent_noise import GaussianLatent, LatentConfig, SquashedLatent, SquashedLatentConfig
from vla_rl.policies.normalization import Affine
from vla_rl.policies.residual import DeterministicResidual, ResidualConfig
from vla_rl.policies.vla import flow_vla
from vla_rl.policies.vla.features import KeepPictures
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import TrainAll, VLAOptions
from vla_rl.policies.vla.tokenizer import Vocabulary, WordPrompts

CAMERAS = ("front", None, "wrist")
STATE, ACTION = Affine((0.1, 0.0, -0.1), (0.5, 1.0, 2.0)), Affine((0.0, 2.0), (0.05, 1.0))
SDE = FlowSampler(FlowSde(0.5), AllSteps(), 4)


def made(options: VLAOptions | None = None, **changes: object) -> FlowVLA:
    torch.manual_seed(0)
    options = replace(options or VLAOptions(sampler=SDE), horizon=2)
    prompts = WordPrompts(Vocabulary.from_texts(SPEC.tasks))
    policy = FlowVLA(SPEC, ToyNetwork(ToyShape()), prompts, STATE, ACTION, CAMERAS, replace(options, **changes))
    for parameter in policy.noise_head.parameters():  # it begins at zero
        torch.nn.init.normal_(parameter, std=0.3)
    return policy.eval()


def test_the_chain_is_padded_and_its_first_actions_are_executed():
    policy = made()
    out, _ = policy.act(policy.encode(observations()), {}, "sample", seeded())
    assert out.aux["points"].shape == (16, 5, 4 * 3)
    torch.testing.assert_close(out.sample, out.aux["points"][:, -1].unflatten(-1, (4, 3))[:, :2, :2])
    low, high = torch.tensor([-0.1, 0.0]), torch.tensor([0.1, 5.0])
    expected = torch.minimum(
        torch.maximum(out.sample * torch.tensor([0.05, 1.0]) + torch.tensor([0.0, 2.0]), low), high
    )
    torch.testing.assert_close(out.action, expected)


def test_the_density_counts_the_padding_as_well():
    policy = made()
    features = policy.encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded())
    moved = dict(out.aux, points=out.aux["points"].clone())
    moved["points"][:, -1, -1] += 0.5  # an entry that is not executed
    assert (policy.log_prob(features, out.sample, moved).logprob - out.logprob).abs().min() > 0.01


def test_a_kept_prefix_spares_the_model_and_changes_nothing():
    kept, seen = made(kept="prefix"), made(kept="pictures")
    a, b = kept.encode(observations()), seen.encode(observations())
    assert {"prefix/keys", "prefix/mask"} < a.keys() and not any("picture/" in name for name in a)
    assert {"picture/front", "picture/wrist", "task"} < b.keys() and not any("prefix/" in name for name in b)
    one, _ = kept.act(a, {}, "sample", seeded())
    two, _ = seen.act(b, {}, "sample", seeded())
    torch.testing.assert_close(one.sample, two.sample)
    assert kept.network.encoded == seen.network.encoded == 1, "what was encoded is acted on"
    assert (kept.log_prob(a, one.sample, one.aux).logprob - one.logprob).abs().max() < 1e-4
    assert (seen.log_prob(b, two.sample, two.aux).logprob - two.logprob).abs().max() < 1e-4
    assert kept.network.encoded == 1 and seen.network.encoded == 2
    for name in ("pooled", "state"):
        assert a[name].shape == b[name].shape == (16, kept.feature_sizes[name])


def encodings(policy: FlowVLA, features: Any) -> int:
    """How often the network encodes for a decision on ``features``, which is that of a policy that never did."""
    before, fresh = policy.network.encoded, copy.deepcopy(policy)
    expected, _ = fresh.act(features, {}, "sample", seeded())
    assert fresh.network.encoded == before + 1, "a copy remembers nothing"
    out, _ = policy.act(features, {}, "sample", seeded())
    torch.testing.assert_close(out.sample, expected.sample, rtol=0, atol=0)
    return policy.network.encoded - before


def test_pictures_are_encoded_once_until_anything_changes():
    policy = made(kept="pictures", trains=TrainAll())
    assert encodings(policy, policy.encode(observations())) == 0
    features = policy.encode(observations())
    assert encodings(policy, features) == 0 and encodings(policy, features) == 1, "taken away by the decision"
    black = {**policy.encode(observations()), "picture/front": torch.zeros_like(features["picture/front"])}
    assert encodings(policy, black) == 1
    first = policy.encode(observations())
    policy.encode(observations(3))
    assert encodings(policy, first) == 1
    features = policy.encode(observations())
    with torch.no_grad():
        policy.network.mix.weight.mul_(1.5)
    assert encodings(policy, features) == 1, "a learner has changed the model"
    features = policy.encode(observations())
    policy.network.mix.weight.data = policy.network.mix.weight.data * 1.5
    assert encodings(policy, features) == 1, "other weights are there"


def test_a_learner_encodes_with_gradient_and_holds_no_prefix():
    policy = made(kept="pictures", trains=TrainAll())
    features = policy.encode(observations())
    kept = policy.kept
    assert isinstance(kept, KeepPictures) and kept._last is not None
    policy.field(features)(torch.zeros(16, 1, 12), torch.zeros(16, 1)).velocity.sum().backward()
    assert policy.network.mix.weight.grad is not None and kept._last is None


def test_auto_keeps_what_is_small_and_what_training_leaves(monkeypatch):
    assert type(made().kept).__name__ == "KeepPrefix"
    monkeypatch.setattr(ToyNetwork, "prefix_bytes", lambda self, cameras, tokens: 8_000_001)
    assert type(made().kept).__name__ == "KeepPictures"
    monkeypatch.undo()
    assert type(made(trains=TrainAll()).kept).__name__ == "KeepPictures"
    with pytest.raises(UserError, match="TrainAll changes the vision-language model"):
        made(trains=TrainAll(), kept="prefix")


def test_what_is_trained():
    expert, everything = made(), made(trains=TrainAll())
    assert not any("eye" in name or "words" in name for name in expert.trainable())
    assert {f"network.{name}" for name, _ in everything.network.named_parameters()} < everything.trainable().keys()
    frozen = [name for name, item in expert.network.named_parameters() if not item.requires_grad]
    assert frozen == ["eye.weight", "eye.bias", "words.weight", "mix.weight", "mix.bias"]
    chunks, generator = torch.zeros(16, 4, 2), seeded()
    for policy, reached in ((expert, False), (everything, True)):
        policy.imitation_losses(policy.imitation_features(observations()), chunks, 2, generator).mean().backward()
        assert (policy.network.mix.weight.grad is not None) == reached


def test_a_frozen_model_in_bfloat16_leaves_the_expert_in_float32():
    policy = made(dtype="bfloat16")
    assert policy.network.eye.weight.dtype is torch.bfloat16 and policy.network.enter.weight.dtype is torch.float32
    features = policy.encode(observations())
    assert features["prefix/keys"].dtype is torch.bfloat16 and features["pooled"].dtype is torch.float32
    out, _ = policy.act(features, {}, "sample", seeded())
    gap = (policy.log_prob(features, out.sample, out.aux).logprob - out.logprob).abs().max()
    assert gap <= 1e-5 * (4 * 12) ** 0.5
    assert made(trains=TrainAll(), dtype="bfloat16").network.eye.weight.dtype is torch.float32


def test_the_imitation_loss_is_that_of_flow_matching_by_hand():
    policy, obs = made(), observations(3)
    chunks = torch.randn(3, 4, 2, generator=seeded(1))
    loss = policy.imitation_losses(policy.imitation_features(obs), chunks, 1, seeded(2)).mean()
    draws = seeded(2)
    noise = torch.randn(3, 1, 12, generator=draws)
    time = 0.001 + 0.999 * torch.rand(3, 1, generator=draws) ** (2 / 3)
    target = torch.nn.functional.pad(chunks, (0, 1)).flatten(1)
    point = time * noise[:, 0] + (1 - time) * target
    features = policy.encode(obs)
    velocity = policy.field(features)(point[:, None], time).velocity[:, 0]
    torch.testing.assert_close(loss, (velocity - (noise[:, 0] - target)).square().mean())


def test_imitation_encodes_once_or_by_the_minibatch(monkeypatch):
    policy, obs, chunks = made(), observations(), torch.zeros(16, 4, 2)
    monkeypatch.setattr(flow_vla, "_PART", 6)
    once = policy.imitation_features(obs)
    assert policy.network.encoded == 3 and len(once["prefix/keys"]) == 16 and "picture/front" not in once
    for name, item in policy.encode(obs).items():
        torch.testing.assert_close(once[name], item)
    monkeypatch.setattr(flow_vla, "_DATASET_LIMIT", 1000)
    later = policy.imitation_features(obs)
    assert "picture/front" in later and "prefix/keys" not in later and policy.network.encoded == 4
    one, other = (policy.imitation_losses(item, chunks, 2, seeded()) for item in (once, later))
    torch.testing.assert_close(one, other)
    assert "picture/front" in made(trains=TrainAll()).imitation_features(obs)


def test_times_of_imitation_are_beta_distributed():
    seen, policy = [], made()
    policy.network.velocity = lambda given, x, t: (
        seen.append(t),
        (torch.zeros_like(x), torch.zeros(*x.shape[:2], WIDTH)),
    )[1]
    policy.imitation_losses(policy.imitation_features(observations()), torch.zeros(16, 4, 2), 500, seeded())
    times = (torch.cat(seen) - 0.001) / 0.999
    law = torch.distributions.Beta(1.5, 1.0)
    assert times.mean().item() == pytest.approx(law.mean.item(), abs=0.01)
    assert times.var().item() == pytest.approx(law.variance.item(), abs=0.004)


def test_what_does_not_fit_is_refused():
    wider = replace(SPEC, state=replace(SPEC.state, shape=(4,)))
    prompts = WordPrompts(Vocabulary.from_texts(SPEC.tasks))
    with pytest.raises(ContractError, match="has states of 4 numbers but the checkpoint's statistics are of 3"):
        FlowVLA(wider, ToyNetwork(ToyShape()), prompts, STATE, ACTION, CAMERAS, VLAOptions(horizon=2))
    with pytest.raises(ContractError, match="set horizon from 1 to 4"):
        FlowVLA(SPEC, ToyNetwork(ToyShape()), prompts, STATE, ACTION, CAMERAS, VLAOptions(horizon=5))


@pytest.mark.parametrize(("rows", "chosen"), [(1, 1), (3, 3), (0, 4), (9, 4)])
def test_latent_noise_steers_it(rows, chosen):
    """DSRL over a flow VLA chooses the first rows of the noise; the last of them is repeated."""
    base = made()
    policy = GaussianLatent(base, LatentConfig(HeadConfig(8, 1), rows=rows))
    assert policy.latent == chosen * 3
    features = policy.encode(observations())
    out, _ = policy.act(features, {}, "sample", seeded())
    assert out.sample.shape == (16, chosen, 3) and out.action.shape == (16, 2, 2)
    whole = out.sample[:, torch.arange(4).clamp(max=chosen - 1)].flatten(1)
    end = base.sampler.deterministic(base.field(features), whole)
    torch.testing.assert_close(out.action, base.executed(end, {})["action"], atol=1e-5, rtol=1e-5)
    gap = (policy.log_prob(features, out.sample, {}).logprob - out.logprob).abs().max()
    assert gap < 1e-5


def test_every_task_has_its_own_prompt():
    policy, obs = made(), observations()
    one, other = (policy.encode(replace(obs, task=np.full(16, task, np.int64))) for task in (0, 1))
    assert (one["pooled"] - other["pooled"]).abs().amax(1).min() > 1e-3


def lift(count: int = 2) -> VecEnv:
    return make("lift", num_envs=count, cameras=("front",), image_size=16)


def steered(kind: str, spec: Any) -> Any:
    """A head over a VLA that keeps pictures."""
    prompts = WordPrompts(Vocabulary.from_texts(spec.tasks))
    state, action = Affine.from_bounds(spec.state), Affine.from_bounds(spec.action)
    network = ToyShape(action_size=6, state_size=32, words=40).build()
    base = FlowVLA(spec, network, prompts, state, action, ("front",), VLAOptions(horizon=2, kept="pictures")).eval()
    if kind == "latent noise":
        return SquashedLatent(base, SquashedLatentConfig(HeadConfig(8, 1)))
    return DeterministicResidual(base, config=ResidualConfig(head=HeadConfig(8, 1)))


@pytest.mark.parametrize("kind", ["latent noise", "residual"])
def test_replay_buffers_keep_no_pictures_of_a_frozen_vla(kind):
    """Heads learn from what the VLA says of an observation; the pictures would fill the replay buffer."""
    with closing(lift()) as env:
        policy = steered(kind, env.spec)
        rollout = RolloutSource(env, policy, 30, SeedStream(0, 1000), seeded()).next()
    extra = {"base_action", "base_plan"} if kind == "residual" else set()
    assert set(rollout.features) == {"pooled", "state", "time"} | extra == set(rollout.final_features)
    assert len(rollout.features["pooled"]) == 31
