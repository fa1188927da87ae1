"""Self-imitation foresees the states to come: what is foreseen, and that a backbone learns to see by it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_self_imitation import window
from tests.policies.test_tiny import HORIZON, SPEC, made, seeded
from tests.toys import FlowToy
from vla_rl.algorithms.self_imitation import (
    FutureStates,
    FutureStatesConfig,
    SelfImitation,
    SelfImitationConfig,
    following,
)
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import UserError
from vla_rl.policies.tiny import TinyVLA

S, A = SPEC.state.shape[0], SPEC.action_dim


def test_the_next_states_of_the_same_episode_and_nothing_beyond_its_end() -> None:
    """Two environments of five decisions; episodes end after decisions 1 and 4, and after decision 2."""
    state = torch.arange(10.0).reshape(5, 2, 1)  # environment 0: 0 2 4 6 8, environment 1: 1 3 5 7 9
    ends = torch.tensor([[0, 0], [1, 0], [0, 1], [0, 0], [1, 0]]) > 0
    found = following(state, ends, 2)
    assert found[:, 0].nan_to_num(-1).tolist() == [[2, -1], [-1, -1], [6, 8], [8, -1], [-1, -1]]
    assert found[:, 1].nan_to_num(-1).tolist() == [[3, 5], [5, -1], [-1, -1], [9, -1], [-1, -1]]


def test_what_lies_beyond_an_end_has_no_weight() -> None:
    head = FutureStates({"state": 1}, FutureStatesConfig(decisions=2))
    seen = {"state": torch.tensor([[0.5], [0.7]])}
    predicted = head.net(seen["state"])
    loss = head.loss({**seen, "future_states": torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan]])})
    torch.testing.assert_close(loss, (predicted[0, 0] - 1.0).square())
    loss.backward()
    assert all(item.grad is not None and item.grad.isfinite().all() for item in head.parameters())
    assert float(head.loss({**seen, "future_states": torch.full((2, 2), torch.nan)}).detach()) == 0.0


def squares(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures uint8 [count,16,16,3] of a bright square, and where it is [count,2], from -1 to 1."""
    place = torch.randint(0, 13, (count, 2), generator=seeded(seed))
    pictures = torch.zeros(count, 16, 16, 3, dtype=torch.uint8)
    for picture, (y, x) in zip(pictures, place.tolist(), strict=True):
        picture[y : y + 4, x : x + 4] = 255
    return pictures, place / 6.0 - 1.0


def played(policy: TinyVLA, count: int = 128, seed: int = 0) -> Rollout:
    """``count`` environments, a success of two decisions in each: in the end the robot is where the square was."""
    pictures, place = squares(count, seed)
    state = torch.zeros(3, count, S)
    state[1:, :, :2] = place
    found = window(torch.zeros(2, HORIZON, A), "01", "01", torch.ones(2, HORIZON, dtype=torch.bool))
    wide: dict[str, Any] = {
        name: item.expand(2, count, *item.shape[2:])
        for name, item in vars(found).items()
        if isinstance(item, Tensor) and item.shape[:1] == (2,)
    }
    seen = {f"picture/{name}": pictures.expand(3, *pictures.shape) for name in SPEC.images}
    names = {"image_features": torch.zeros(3, count, policy.feature_sizes["image_features"])}
    features = {**names, **seen, "state": state, "task": torch.zeros(3, count, dtype=torch.long)}
    return Rollout(**{**vars(found), **wide, "features": features})


def learner(policy: TinyVLA, weight: float = 1.0, **config: Any) -> SelfImitation:
    torch.manual_seed(0)
    head = FutureStates(policy.feature_sizes, FutureStatesConfig(decisions=1, weight=weight))
    config = {"grow": 1, "batch": 32, "draws": 1, "lr": 5e-3, **config}
    return SelfImitation(policy, policy.trainable(), None, SelfImitationConfig(**config), seeded(3), future=head)


def missed(agent: SelfImitation, seed: int) -> float:
    """The squared error of the foreseen places, in pictures of ``seed``."""
    assert isinstance(agent.policy, TinyVLA) and agent.future is not None
    found = played(agent.policy, seed=seed)
    features = {name: item[0] for name, item in found.features.items()}
    with torch.no_grad():
        seen = agent.policy.encode_again(features)
        return float(agent.future.loss({**seen, "future_states": found.features["state"][1]}))


@pytest.mark.full
def test_a_backbone_learns_to_see_where_its_own_successes_went() -> None:
    """In pictures that it never saw; a head over the untrained backbone does not find the square by itself."""
    policy = made().with_trained_backbone()
    agent = learner(policy, epochs=20)
    before, weights = missed(agent, 9), copy.deepcopy(policy.backbone.state_dict())
    metrics = agent.update(played(policy))
    assert metrics["policy/future_state_loss"] > 0
    learnt = missed(agent, 9)
    blind = made()
    head = learner(blind, epochs=20)
    head.policy.encode_again = copy.deepcopy(blind).requires_grad_(False).encode_again  # type: ignore[method-assign]
    head.update(played(blind))
    assert learnt < 0.2 * missed(head, 9) and learnt < 0.05 * before
    assert any(not torch.equal(weights[name], item) for name, item in policy.backbone.state_dict().items())


def test_without_weight_only_imitation_teaches_the_backbone() -> None:
    policy = made().with_trained_backbone()
    agent = learner(policy, weight=0.0, epochs=1)
    first = {name: item.clone() for name, item in agent.future.state_dict().items()} if agent.future else {}
    before = policy.backbone.key.weight.clone()
    agent.optimizer.param_groups[0]["weight_decay"] = 0.0
    agent.update(played(policy))
    assert agent.future is not None and not torch.equal(before, policy.backbone.key.weight)
    assert all(torch.equal(first[name], item) for name, item in agent.future.state_dict().items())


def test_improvements_begin_at_the_heads_first_weights_and_resume_bit_for_bit() -> None:
    policy = made().with_trained_backbone()
    agent = learner(policy, epochs=2)
    rollout = played(policy, 32)
    agent.update(rollout)
    other = made().with_trained_backbone()
    resumed = learner(other, epochs=2)
    resumed.load_state_dict(copy.deepcopy(agent.state_dict()))
    for each in (agent, resumed):
        each.update(rollout)
    assert agent.future is not None and resumed.future is not None
    for one, two in zip(
        [*policy.parameters(), *agent.future.parameters()],
        [*other.parameters(), *resumed.future.parameters()],
        strict=True,
    ):
        assert torch.equal(one, two)
    agent.config = SelfImitationConfig(grow=1, epochs=1, batch=1000, lr=1e-9)  # one step of nearly nothing
    agent.update(rollout)
    fresh = learner(made().with_trained_backbone()).future
    assert fresh is not None
    for one, two in zip(agent.future.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0.0)


def test_a_policy_without_a_backbone_that_learns_is_refused() -> None:
    class Sightless(FlowToy):
        action_scale = made().action_scale

        def imitation_losses(self, features: Any, chunks: Tensor, draws: int, generator: Any) -> Tensor:
            raise AssertionError

    policy, head = Sightless(), FutureStates({"state": 1}, FutureStatesConfig())
    with pytest.raises(UserError, match="none that learns"):
        SelfImitation(policy, policy.trainable(), None, SelfImitationConfig(), seeded(), future=head)
