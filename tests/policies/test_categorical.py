"""The categorical policy: its density is that of torch, impossible indices never happen; policies that read pixels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from vla_rl.contract.check import check_policy
from vla_rl.contract.env import ArraySpec, Observation
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import LikelihoodPolicy, Observer
from vla_rl.policies.critics import RunningCritic
from vla_rl.policies.feed_forward import ActorConfig, CategoricalConfig, CategoricalPolicy, GaussianPolicy
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.image_encoder import ImageEncoder
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.statistics import RunningStatistics

BATCH, COUNTS, SIDE = 16, (3, 2), 16
CARTPOLE = make("gym", num_envs=3, id="CartPole-v1", time_limit=20)
POINT_MASS = make("point_mass", num_envs=1).spec
SEEN = replace(POINT_MASS, images={"eye": ArraySpec((SIDE, SIDE, 3), "uint8", 0, 255)})
SPEC = replace(SEEN, action=ArraySpec((2,), "int64", (1, 0), (3, 1)))  # two entries, of three and of two indices


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(horizon: int = 2, cameras: tuple[str, ...] = ()) -> CategoricalPolicy:
    torch.manual_seed(0)
    policy = CategoricalPolicy(SPEC, config=CategoricalConfig(horizon, width=16, cameras=cameras))
    torch.nn.init.normal_(policy.network[-1].weight, std=0.5)
    return policy


def observed(brightness: int = 100) -> Observation:
    state = np.random.default_rng(0).uniform(-1, 1, (BATCH, 2)).astype(np.float32)
    image = np.full((BATCH, SIDE, SIDE, 3), brightness, np.uint8)
    return Observation({"eye": image}, state, np.zeros(BATCH, np.int64), np.arange(BATCH))


def test_samples_are_as_likely_as_declared_and_never_impossible():
    policy = made(horizon=1)
    kept = {"state": torch.full((40_000, 2), 0.5)}
    out, _ = policy.act(kept, {}, "sample", seeded(2))
    for entry, count in enumerate(COUNTS):
        shares = torch.bincount(out.sample[:, 0, entry], minlength=count) / len(out.sample)
        assert len(shares) == count
        torch.testing.assert_close(shares, policy.log_probs(kept)[0, entry, :count].exp(), rtol=0, atol=0.01)
    assert torch.equal(out.action, out.sample + torch.tensor([1, 0])), "actions count from the lowest index"


def test_what_is_deployed_is_the_most_likely():
    policy = made()
    kept = policy.encode(observed())
    out, _ = policy.act(kept, {}, "eval", None)
    assert torch.equal(out.sample.flatten(1), policy.log_probs(kept).argmax(-1)) and not out.logprob.any()


def test_everything_is_equally_likely_at_first():
    policy = CategoricalPolicy(SPEC)
    density = policy.log_prob(policy.encode(observed()), torch.zeros(BATCH, 1, 2, dtype=torch.int64), {})
    torch.testing.assert_close(density.logprob, torch.full((BATCH,), -math.log(6), dtype=torch.float64))
    torch.testing.assert_close(density.entropy.exp(), torch.full((BATCH,), 6.0, dtype=torch.float64))


def test_it_keeps_the_contract_in_an_environment():
    policy = CategoricalPolicy(CARTPOLE.spec, RunningStatistics(4))
    assert isinstance(policy, LikelihoodPolicy) and isinstance(policy, Observer)
    assert [item.name for item in check_policy(policy, CARTPOLE, seeded())] == ["encode", "act", "log-prob gap"]


def test_a_checkpoint_restores_the_same_policy(tmp_path):
    policy = made(cameras=("eye",))
    policy.save_pretrained(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved", SPEC)
    kept = policy.encode(observed())
    assert torch.equal(loaded.log_probs(loaded.encode(observed())), policy.log_probs(kept))
    with pytest.raises(ContractError, match="trained for action"):
        load_policy(tmp_path / "saved", SEEN)


def test_policies_for_physical_quantities_refuse_discrete_actions():
    for policy in (GaussianPolicy, lambda spec: FunctionPolicy(spec, lambda obs: obs.state)):
        with pytest.raises(ContractError, match=r"'CartPole-v1' are discrete.*CategoricalPolicy"):
            policy(replace(CARTPOLE.spec, state=ArraySpec((4,), "float32", -1, 1)))
    with pytest.raises(ContractError, match="physical quantities, so a categorical policy cannot"):
        CategoricalPolicy(POINT_MASS)


@pytest.mark.parametrize(("spec", "kind"), [(SPEC, CategoricalPolicy), (SEEN, GaussianPolicy)])
def test_the_actions_decide_which_policy_is_built_and_its_actions_depend_on_the_pixels(spec, kind):
    policy = ActorConfig(cameras=("eye",), width=8).build(spec, RunningStatistics(2))
    assert type(policy) is kind
    torch.nn.init.normal_(policy.network[-1].weight)
    dark, bright = ({**policy.encode(observed(value))} for value in (0, 255))
    chosen = [policy.log_prob(kept, torch.zeros(BATCH, 1, 2, dtype=torch.int64), {}).logprob for kept in (dark, bright)]
    assert (chosen[0] - chosen[1]).abs().min() > 1e-3


def test_a_critic_sees_pixels_of_a_whole_rollout():
    critic = RunningCritic({"state": 2}, 8, 1, ImageEncoder.of(SEEN, ("eye",)))
    torch.nn.init.normal_(critic.head.weight)
    policy = ActorConfig(cameras=("eye",)).build(SEEN, RunningStatistics(2))
    dark, bright = (policy.encode(observed(value)) for value in (0, 255))
    both = {name: torch.stack([dark[name], bright[name]]) for name in dark}  # [T,E,...]
    values = critic(both)
    assert values.shape == (2, BATCH) and (values[0] - values[1]).abs().min() > 1e-3
    torch.testing.assert_close(values[1], critic(bright))


@pytest.mark.parametrize(
    ("cameras", "size", "sentence"),
    [(("eyes",), SIDE, "no camera 'eyes'.*did you mean 'eye'"), (("eye",), 8, "too few for three convolutions")],
)
def test_cameras_that_cannot_be_read_are_refused(cameras, size, sentence):
    spec = replace(SEEN, images={"eye": ArraySpec((size, size, 3), "uint8", 0, 255)})
    with pytest.raises(UserError, match=sentence):
        ImageEncoder.of(spec, cameras)
