"""Truncated rollouts stay in their groups: a toy in which leaving them out teaches to seek uncertainty."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.toys import Stateless
from tests.world_models.small_models import initial_states, spec
from vla_rl.algorithms.group_relative import GRPO, GRPOConfig, Mean, Standardised
from vla_rl.contract.batch import TRUNCATION_RETURN, Rollout
from vla_rl.contract.policy import ActionOut, Likelihood
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import SeedStream
from world_models.canvas import Canvas
from world_models.config import ImaginationConfig, Limits, WorldModelConfig
from world_models.env import ImaginedEnv
from world_models.model import CallSteps
from world_models.types import Future

ARMS, LUCK = 2, 2
# (arm, luck), all equally likely: the first arm wins or loses, the second wins or is cut off.
WON, LOST, WON_TOO, TRUNCATED = range(4)
EVERYTHING, WITHOUT_UNCERTAIN = (WON, LOST, WON_TOO, TRUNCATED), (WON, LOST, WON_TOO)
SIZE = 2


class TwoArms:
    """A world model for imagined rollouts: the first entry of an action is the arm, the second the luck."""

    def __init__(self) -> None:
        self.spec, self.config = spec(), WorldModelConfig(frames=1)
        self.canvas, self.picture = Canvas.of(self.spec, None, 4), (3, 16, 16)
        self.video, self.device = SimpleNamespace(latent=(1, 1, 1)), torch.device("cpu")
        self.call = CallSteps(frames=1, pictures=1)

    def eval(self) -> TwoArms:
        return self

    def predict(self, context: object, actions: Tensor, known: Tensor, noise: Tensor, steps: int = 0) -> Future:
        second, unlucky = actions[:, 0, 0] > 0, actions[:, 0, 1] < 0
        outcome = torch.stack([~unlucky, unlucky & ~second, torch.zeros_like(second)], -1).float()
        count = len(actions)
        pictures = torch.zeros(count, 1, *self.picture, dtype=torch.uint8)
        return Future(pictures, torch.zeros(count, 1, 3), outcome, (unlucky & second).float())


class Enumerated(Stateless, nn.Module):
    """Chooses between the arms by two logits; its environments enumerate all combinations of a group."""

    def __init__(self, outcomes: tuple[int, ...]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(ARMS, dtype=torch.float64))
        tries = torch.tensor(list(product(outcomes, repeat=SIZE))).flatten()
        self.tries = torch.stack([tries // LUCK, tries % LUCK], -1)[:, None]

    def act(self, features, state, mode, generator):
        action = torch.tensor([-0.5, 1.0]) + self.tries * torch.tensor([1.0, -2.0])
        logprob = self.log_prob(features, self.tries, {}).logprob.detach()
        return ActionOut(action, self.tries, logprob, {}, self.version), state

    def log_prob(self, features, sample, aux) -> Likelihood:
        chosen = self.logits.log_softmax(-1)[sample[:, 0, 0]]
        return Likelihood(chosen, torch.zeros_like(chosen), {})

    def kl(self, old, new) -> Tensor:
        return torch.zeros(())


def played(truncation_value, outcomes=EVERYTHING, **changes) -> tuple[Enumerated, Rollout]:
    """Every possible group of two, once, in an imagined rollout."""
    policy, model = Enumerated(outcomes), TwoArms()
    num_envs = len(policy.tries)
    config = ImaginationConfig(horizon=4, batch_size=4, resamples=0)
    env = ImaginedEnv(model, initial_states(model), num_envs, Limits((0.5,)), config)  # type: ignore[arg-type]
    groups = num_envs // SIZE
    plan = {"groups": groups, "limit": groups, "ahead": 0} | changes
    maker = GroupConfig(**plan, size=SIZE, num_envs=num_envs, truncation_value=truncation_value).build(
        env, policy, SeedStream(0, 10**6), torch.Generator()
    )
    return policy, maker.next()


def push(policy: Enumerated, rollout: Rollout, **changes) -> float:
    """The expected gradient of the objective with respect to the second arm's logit."""
    grpo = GRPO(policy, dict(policy.named_parameters()), None, GRPOConfig(**changes), torch.Generator())
    batch, _ = grpo._make_batch(rollout)
    grpo.policy_loss(batch, policy.log_prob(batch.features, batch.sample, batch.aux))[0].backward()
    return -float(policy.logits.grad[1])


@pytest.mark.parametrize(
    ("truncation_value", "outcomes", "expected"),
    [
        (0.0, EVERYTHING, 0.0),
        (0.5, EVERYTHING, 1 / 16),
        (-1.0, EVERYTHING, -1 / 8),
        (0.0, WITHOUT_UNCERTAIN, 1 / 9),  # the wrong treatment: truncated members are dropped and drawn again
    ],
    ids=["nothing-more", "half-a-success", "a-punishment", "dropped"],
)
def test_the_expected_gradient_towards_the_arm_that_is_cut_off(truncation_value, outcomes, expected):
    """Both arms win half of the time: only with ``V = 0`` is neither preferred."""
    assert push(*played(truncation_value, outcomes)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("baseline", "expected"), [(Mean(), 1 / 32), (Standardised(), 0.5**0.5 / 16)])
def test_the_same_with_other_baselines(baseline, expected):
    """The group's mean halves it; of two members, the std only leaves which is ahead."""
    assert push(*played(0.5), baseline=baseline) == pytest.approx(expected, rel=1e-5)
    assert push(*played(0.0), baseline=baseline) == pytest.approx(0.0, abs=1e-12)


def test_cut_off_members_stay_in_their_groups_and_are_counted():
    policy, rollout = played(0.5)
    which = torch.tensor(list(product(EVERYTHING, repeat=SIZE))).flatten()
    assert torch.equal(rollout.truncated[0], which == TRUNCATED) and torch.equal(rollout.success[0], which % LUCK == 0)
    assert torch.equal(rollout.final_index[:, 1], (which == TRUNCATED).nonzero()[:, 0])
    assert rollout.final_features[TRUNCATION_RETURN].tolist() == [0.5] * 8
    assert rollout.final_features["state"].shape == (8, 3)
    assert rollout.seeds[0].reshape(-1, SIZE).unique(dim=1).shape == (16, 1)
    counts = {"truncations": 8, "successes": 16, "episodes": 32}
    assert all(rollout.info[f"rollout/{name}"] == count for name, count in counts.items())
    grpo = GRPO(policy, dict(policy.named_parameters()), None, GRPOConfig(), torch.Generator())
    metrics = grpo._make_batch(rollout)[1]
    assert metrics["rollout/truncated"] == 1 / 4 and metrics["rollout/return"] == 1 / 2


@pytest.mark.parametrize(("truncation_value", "uniform"), [(0.0, 8), (0.5, 6), (1.0, 10)])
def test_truncation_values_decide_whether_a_group_is_mixed(truncation_value, uniform):
    """A truncated member's value is that of a failure, of a success, or between them."""
    _, rollout = played(truncation_value)
    assert rollout.info["rollout/groups_uniform"] == uniform
