"""The Gaussian policy: its density is that of torch, its samples are raw, its checkpoints are faithful."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from sims.catalog import make
from tests.off_policy_toys import env_spec, squashed
from tests.toys import seeded
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.check import check_policy
from vla_rl.contract.env import ArraySpec, Observation
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import LikelihoodPolicy, Observer, ReparametrisedPolicy
from vla_rl.policies.critics import RunningCritic
from vla_rl.policies.feed_forward import (
    ActorConfig,
    CategoricalConfig,
    CategoricalPolicy,
    GaussianConfig,
    GaussianPolicy,
    SquashedPolicy,
)
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.image_encoder import ImageEncoder
from vla_rl.policies.normalization import Affine, RunningStatistics
from vla_rl.policies.pretrained import load_policy

BATCH = 16
ENV = make("point_mass", num_envs=BATCH)


def made(horizon: int = 3, std: float = 1.5) -> GaussianPolicy:
    torch.manual_seed(0)
    policy = GaussianPolicy(ENV.spec, config=GaussianConfig(horizon, width=16, std=std))
    torch.nn.init.normal_(policy.network[-1].weight, std=0.5)
    torch.nn.init.normal_(policy.log_std, std=0.3)
    return policy


def features(policy):
    return policy.encode(ENV.reset(np.arange(BATCH), np.arange(BATCH)))


@pytest.mark.parametrize(("activation", "expected"), [("tanh", torch.nn.Tanh), ("elu", torch.nn.ELU)])
def test_hidden_layers_have_the_activation_that_is_asked_for(activation, expected):
    policy = ActorConfig(width=8, depth=3, activation=activation).build(ENV.spec, Affine((0.0, 0.0), (1.0, 1.0)))
    critic = RunningCritic({"state": 2}, 8, 3, activation=activation)
    for layers in (list(policy.network)[:-1], list(critic.body)):
        assert [type(layer) for layer in layers] == [torch.nn.Linear, expected] * 3


def test_samples_have_the_declared_mean_and_std_unclipped():
    policy = made(horizon=1)
    kept = {"state": torch.zeros(1, 2).expand(40_000, 2)}
    out, _ = policy.act(kept, {}, "sample", seeded(2))
    mean, std = policy.mean(kept)[0], policy.log_std.exp()
    torch.testing.assert_close(out.sample[:, 0].mean(0), mean, rtol=0, atol=0.05)
    torch.testing.assert_close(out.sample[:, 0].std(0), std, rtol=0.02, atol=0)
    assert out.sample.abs().max() > 2 and out.action.abs().max() <= 0.2 + 1e-7
    torch.testing.assert_close(out.action, (out.sample * 0.2).clamp(-0.2, 0.2))


def test_what_is_deployed_is_the_mean():
    policy = made()
    kept = features(policy)
    out, _ = policy.act(kept, {}, "eval", None)
    torch.testing.assert_close(out.sample.flatten(1), policy.mean(kept))
    assert not out.logprob.any()


def test_it_keeps_the_contract():
    assert isinstance(made(), LikelihoodPolicy)
    assert len(check_policy(made(), ENV, seeded())) == 3


CHOICES, COUNTS, SIDE = 16, (3, 2), 16
CARTPOLE = make("gym", num_envs=3, id="CartPole-v1", time_limit=20)
POINT_MASS = make("point_mass", num_envs=1).spec
SEEN = replace(POINT_MASS, images={"eye": ArraySpec((SIDE, SIDE, 3), "uint8", 0, 255)})
SPEC = replace(SEEN, action=ArraySpec((2,), "int64", (1, 0), (3, 1)))  # two entries, of three and of two indices


def made_categorical(horizon: int = 2, cameras: tuple[str, ...] = ()) -> CategoricalPolicy:
    torch.manual_seed(0)
    policy = CategoricalPolicy(SPEC, config=CategoricalConfig(horizon, width=16, cameras=cameras))
    torch.nn.init.normal_(policy.network[-1].weight, std=0.5)
    return policy


def observed(brightness: int = 100) -> Observation:
    state = np.random.default_rng(0).uniform(-1, 1, (CHOICES, 2)).astype(np.float32)
    image = np.full((CHOICES, SIDE, SIDE, 3), brightness, np.uint8)
    return Observation({"eye": image}, state, np.zeros(CHOICES, np.int64), np.arange(CHOICES))


def test_samples_are_as_likely_as_declared_and_never_impossible():
    policy = made_categorical(horizon=1)
    kept = {"state": torch.full((40_000, 2), 0.5)}
    out, _ = policy.act(kept, {}, "sample", seeded(2))
    for entry, count in enumerate(COUNTS):
        shares = torch.bincount(out.sample[:, 0, entry], minlength=count) / len(out.sample)
        assert len(shares) == count
        torch.testing.assert_close(shares, policy.log_probs(kept)[0, entry, :count].exp(), rtol=0, atol=0.01)
    assert torch.equal(out.action, out.sample + torch.tensor([1, 0])), "actions count from the lowest index"


def test_what_is_deployed_is_the_most_likely():
    policy = made_categorical()
    kept = policy.encode(observed())
    out, _ = policy.act(kept, {}, "eval", None)
    assert torch.equal(out.sample.flatten(1), policy.log_probs(kept).argmax(-1)) and not out.logprob.any()


def test_everything_is_equally_likely_at_first():
    policy = CategoricalPolicy(SPEC)
    density = policy.log_prob(policy.encode(observed()), torch.zeros(CHOICES, 1, 2, dtype=torch.int64), {})
    torch.testing.assert_close(density.logprob, torch.full((CHOICES,), -math.log(6), dtype=torch.float64))
    torch.testing.assert_close(density.entropy.exp(), torch.full((CHOICES,), 6.0, dtype=torch.float64))


def test_it_keeps_the_contract_in_an_environment():
    policy = CategoricalPolicy(CARTPOLE.spec, RunningStatistics(4))
    assert isinstance(policy, LikelihoodPolicy) and isinstance(policy, Observer)
    assert [item.name for item in check_policy(policy, CARTPOLE, seeded())] == ["encode", "act", "log-prob gap"]


def test_policies_of_quantities_refuse_discrete_actions():
    for policy in (GaussianPolicy, lambda spec: FunctionPolicy(spec, lambda obs: obs.state)):
        with pytest.raises(ContractError, match=r"'CartPole-v1' are discrete.*CategoricalPolicy"):
            policy(replace(CARTPOLE.spec, state=ArraySpec((4,), "float32", -1, 1)))
    with pytest.raises(ContractError, match="physical quantities, so a categorical policy cannot"):
        CategoricalPolicy(POINT_MASS)


@pytest.mark.parametrize(("spec", "kind"), [(SPEC, CategoricalPolicy), (SEEN, GaussianPolicy)])
def test_the_actions_decide_which_policy_is_built(spec, kind):
    policy = ActorConfig(cameras=("eye",), width=8).build(spec, RunningStatistics(2))
    assert type(policy) is kind
    torch.nn.init.normal_(policy.network[-1].weight)
    dark, bright = ({**policy.encode(observed(value))} for value in (0, 255))
    chosen = [
        policy.log_prob(kept, torch.zeros(CHOICES, 1, 2, dtype=torch.int64), {}).logprob for kept in (dark, bright)
    ]
    assert (chosen[0] - chosen[1]).abs().min() > 1e-3


def test_a_critic_sees_pixels_of_a_whole_rollout():
    critic = RunningCritic({"state": 2}, 8, 1, ImageEncoder.of(SEEN, ("eye",)))
    torch.nn.init.normal_(critic.head.weight)
    policy = ActorConfig(cameras=("eye",)).build(SEEN, RunningStatistics(2))
    dark, bright = (policy.encode(observed(value)) for value in (0, 255))
    both = {name: torch.stack([dark[name], bright[name]]) for name in dark}  # [T,E,...]
    values = critic(both)
    assert values.shape == (2, CHOICES) and (values[0] - values[1]).abs().min() > 1e-3
    torch.testing.assert_close(values[1], critic(bright))


@pytest.mark.parametrize(
    ("cameras", "size", "sentence"),
    [(("eyes",), SIDE, "no camera 'eyes'.*did you mean 'eye'"), (("eye",), 8, "too few for three convolutions")],
)
def test_cameras_that_cannot_be_read_are_refused(cameras, size, sentence):
    spec = replace(SEEN, images={"eye": ArraySpec((size, size, 3), "uint8", 0, 255)})
    with pytest.raises(UserError, match=sentence):
        ImageEncoder.of(spec, cameras)


@pytest.fixture
def policy() -> SquashedPolicy:
    """Chunks of three actions within [-1, 3], with weights that are not those of the start."""
    made = squashed(env_spec(low=-1.0, high=3.0), horizon=3, std=0.7)
    with torch.no_grad():
        for parameter in made.trainable().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=seeded(1)))
    return made


def features_squashed(count: int = 5) -> dict[str, torch.Tensor]:
    return {"state": torch.rand(count, 1, generator=seeded(2)), "time": torch.zeros(count, 1)}


def test_the_density_is_torchs_summed_over_the_chunk(policy):
    policy, given = policy.double(), {name: item.double() for name, item in features_squashed().items()}
    made = policy.rsample(given, seeded(3))
    assert made.action.shape == (5, 6) and made.logprob.shape == (5,) and (made.action.abs() < 1).all()
    mean, log_std = policy.head.distribution(given)
    law = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    torch.testing.assert_close(made.logprob, law.log_prob(made.action), rtol=0, atol=1e-9)
    torch.testing.assert_close(policy.log_prob_of(given, made.action).sum(-1), made.logprob, rtol=0, atol=1e-6)


def test_the_std_stays_within_its_bounds():
    policy = squashed(env_spec(low=-1.0, high=3.0), std=0.5, std_bounds=(0.4, 0.6))
    with torch.no_grad():
        policy.head.last.bias.copy_(torch.tensor([0.0, 0.0, -50.0, 50.0]))
    std = policy.head.distribution(features_squashed())[1].exp()
    torch.testing.assert_close(std, torch.tensor([0.4, 0.6]).expand(5, 2))


def test_samples_are_normalised_chunks_and_actions_physical(policy):
    out, _ = policy.act(features_squashed(), {}, "sample", seeded(5))
    assert out.sample.shape == out.action.shape == (5, 3, 2)
    torch.testing.assert_close(out.action, 2.0 * out.sample + 1.0)  # [-1, 1] onto [-1, 3]
    assert out.logprob.abs().sum() > 0
    flat = policy.critic_action(features_squashed(), torch.full_like(out.sample, 9.0), out.action)
    torch.testing.assert_close(flat, out.sample.reshape(5, 6), rtol=0, atol=1e-6)
    torch.testing.assert_close(policy.log_prob_of(features_squashed(), flat).sum(-1), out.logprob, rtol=0, atol=1e-3)


def test_what_is_deployed_is_the_squashed_mean_without_noise(policy):
    out, _ = policy.act(features_squashed(), {}, "eval", seeded(6))
    other, _ = policy.act(features_squashed(), {}, "eval", seeded(7))
    mean = torch.tanh(policy.head.distribution(features_squashed())[0])
    assert torch.equal(out.sample.flatten(1), mean) and torch.equal(out.action, other.action)
    assert not out.logprob.any()


def test_it_is_what_sac_needs_and_only_its_head_learns(policy):
    assert isinstance(policy, ReparametrisedPolicy) and policy.horizon == 3
    assert policy.feature_sizes == {"state": 1}
    policy.rsample(features_squashed(), seeded()).action.sum().backward()
    assert set(map(id, policy.trainable().values())) == set(map(id, policy.parameters()))
    assert not any(p.grad is not None for p in policy.encoder.parameters())


def test_a_checkpoint_holds_encoder_statistics_and_weights(policy, tmp_path):
    policy.calibrate({"state": 3.0 + torch.randn(50, 1, generator=seeded(8))}, OneProcess())
    with torch.no_grad():
        for parameter in policy.encoder.parameters():
            parameter.add_(1.0)
    policy.save_pretrained(tmp_path / "kept")
    restored = load_policy(tmp_path / "kept", policy.spec)
    assert type(restored) is SquashedPolicy and restored.config == policy.config
    ours, theirs = (one.act(features_squashed(), {}, "sample", seeded(9))[0] for one in (policy, restored))
    assert torch.equal(ours.action, theirs.action) and torch.equal(ours.logprob, theirs.logprob)
    for mine, other in zip(policy.encoder.parameters(), restored.encoder.parameters(), strict=True):
        assert torch.equal(mine, other)
