"""Self-imitation: only whole successes are imitated, which converges to the policy given success."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_hg_dagger import Chunked, D, H, Table, experience
from tests.policies.test_tiny import HORIZON, SPEC, made
from tests.toys import rollout, seeded
from vla_rl.algorithms.self_imitation import (
    FutureStates,
    FutureStatesConfig,
    SelfImitation,
    SelfImitationConfig,
    following,
    of_successes,
)
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import ActionOut
from vla_rl.policies.tiny import TinyVLA


def learner(policy: Any, **config: Any) -> SelfImitation:
    return SelfImitation(policy, policy.trainable(), None, SelfImitationConfig(**config), seeded(3))


def window(executed: Tensor, ends: str, won: str, valid: Tensor | None = None) -> Rollout:
    """One environment over ``T`` decisions, ``executed`` [T,H,D]; "1" where an episode ends, and where it has won."""
    steps = len(executed)
    bits = {name: torch.tensor([[one == "1"] for one in text]) for name, text in (("ends", ends), ("won", won))}
    valid = torch.ones(steps, 1, H, dtype=torch.bool) if valid is None else valid[:, None]
    out = ActionOut(executed[:, None], executed[:, None], torch.zeros(steps, 1), {}, 0)
    made = rollout({"state": torch.arange(steps + 1.0)[:, None, None]}, out, torch.zeros(1, 1, H))
    parts = {"sample": out.sample, "executed": out.action, "logprob": out.logprob, "reward": torch.zeros(steps, 1, H)}
    zeros = torch.zeros(steps, 1, dtype=torch.long)
    flags = {"terminated": bits["ends"], "truncated": bits["ends"] & False, "success": bits["won"]}
    rest = {"valid": valid, "intervened": valid & False, "version": zeros, "seeds": zeros}
    return Rollout(**{**vars(made), **parts, **flags, **rest, "aux": {}})


def test_whole_successes_are_kept_and_nothing_else() -> None:
    """Episodes of 2, 3 and 2 decisions, won, lost, won; a breakdown; a win; and one that has not ended."""
    executed = torch.arange(11.0)[:, None, None].expand(11, H, D).clone()
    valid = torch.ones(11, H, dtype=torch.bool)
    valid[8] = False  # the breakdown, of an episode of two decisions
    valid[6, 1:] = False  # won with the first action of its chunk
    found = window(executed, "01001010110", "01000010110", valid)
    assert of_successes(found).flatten().tolist() == [c == "1" for c in "11000110010"]
    agent = learner(Table())
    assert agent.update(found)["rollout/decisions"] == 5.0
    assert agent.kept is not None
    assert agent.kept.features["state"].flatten().tolist() == [0.0, 1.0, 5.0, 6.0, 9.0]
    assert agent.kept.counts.tolist() == [[True] * 3] * 3 + [[True, False, False], [True] * 3]
    assert agent.kept.actions[:, 0, 0].tolist() == [-0.5, 0.0, 2.0, 2.5, 4.0]  # normalised: (a - 1) / 2


def test_nothing_changes_until_something_succeeds() -> None:
    policy = Table()
    metrics = learner(policy, grow=1).update(window(torch.ones(3, H, D), "001", "000"))
    assert not policy.rows.any() and metrics == {"rollout/decisions": 0.0, "replay/successes": 0.0}


def test_it_improves_from_the_first_weights_on_all_successes() -> None:
    """The loss of a table is its squared distance: its rows approach the mean of all successes, each time from 0."""
    policy, seen = Table(), []
    agent = learner(policy, grow=2, epochs=200, batch=4, lr=0.05, weight_decay=0.0, grad_norm=1e9)
    for value in (3.0, 5.0, 9.0, 11.0):  # normalised: 1, 2, 4, 5
        metrics = agent.update(window(torch.full((4, H, D), value), "0101", "0001"))
        seen.append((policy.rows.detach().clone(), "policy/success_loss" in metrics))
    assert [learnt for _, learnt in seen] == [False, True, False, True]
    assert not seen[0][0].any() and torch.equal(seen[1][0], seen[2][0])
    torch.testing.assert_close(seen[1][0], torch.full((H, D), 1.5), atol=0.1, rtol=0.0)
    torch.testing.assert_close(seen[3][0], torch.full((H, D), 3.0), atol=0.1, rtol=0.0)
    assert agent.steps == 200 * 4 // 4 + 200 * 8 // 4
    agent.config = SelfImitationConfig(grow=1, epochs=1, batch=1000)  # one step
    agent.lr = 0.05
    agent.update(window(torch.ones(1, H, D), "1", "0"))
    assert policy.rows.abs().max() < 0.1, "it began at the first weights, and not at 3"


def test_the_learning_rate_falls_to_nothing_along_a_cosine() -> None:
    rates: list[float] = []
    agent = learner(Table(), grow=1, epochs=4, batch=2, lr=0.1)
    inner = agent.step
    agent.step = lambda kept: (rates.append(agent.lr), inner(kept))[1]  # type: ignore[method-assign]
    agent.update(window(torch.ones(2, H, D), "01", "01"))
    assert rates == pytest.approx([0.1, 0.1 * (2 + 2**0.5) / 4, 0.05, 0.1 * (2 - 2**0.5) / 4])


@pytest.mark.full
def test_it_converges_to_the_policy_given_success() -> None:
    """A flow's own samples, of which those succeed whose first place is above its median."""
    torch.manual_seed(0)
    policy, count = Chunked(), 4096
    state = torch.zeros(count, 1)
    own = policy.chunk(state, 7)
    median = own[:, 0].median()
    agent = learner(policy, grow=1, epochs=30, batch=256, lr=3e-3)
    found = experience(state, own, torch.zeros(count, H) > 0)
    success = found.executed[..., 0, 0] > median
    agent.update(Rollout(**{**vars(found), "success": success}))
    assert agent.kept is not None and len(agent.kept) == int(success.sum()) == count // 2
    after, wanted = policy.chunk(torch.zeros(4000, 1), 9), own[success[0]]
    assert (after[:, 0] > median).float().mean() > 0.9
    torch.testing.assert_close(after.mean(0), wanted.mean(0), atol=0.1, rtol=0.0)


def test_a_resumed_learner_is_the_same_bit_for_bit() -> None:
    """Also where it was stopped between two improvements, the first weights included."""

    def fresh() -> SelfImitation:
        torch.manual_seed(0)
        return learner(Chunked(), grow=2, epochs=3, batch=8)

    agent, found = fresh(), window(torch.rand(6, H, D, generator=seeded()), "010101", "010001")
    for _ in range(3):
        agent.update(found)
    resumed = learner(Chunked(), grow=2, epochs=3, batch=8)
    resumed.load_state_dict(copy.deepcopy(agent.state_dict()))
    for each in (agent, resumed):
        each.update(found)
    for name, parameter in agent.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name])
    assert agent.steps == resumed.steps > 0 and agent.rollouts == 4


def test_a_decision_of_a_later_version_is_refused() -> None:
    found = window(torch.ones(1, H, D), "1", "1")
    ahead = Rollout(**{**vars(found), "version": torch.ones(1, 1, dtype=torch.long)})
    with pytest.raises(ContractError, match="version 1"):
        learner(Table()).update(ahead)


def test_an_improvement_begins_with_a_fresh_optimizer() -> None:
    """Adam's moments of the improvement before would push the first weights to where those went."""
    agent = learner(Table(), grow=1, epochs=3, batch=4)
    for _ in range(3):
        agent.update(window(torch.ones(4, H, D), "0101", "0101"))
    taken = {int(state["step"]) for state in agent.optimizer.state.values()}
    assert agent.kept is not None and taken == {math.ceil(3 * len(agent.kept) / 4)}, "only those of the last one"


S, A = SPEC.state.shape[0], SPEC.action_dim


def test_the_next_states_are_those_of_the_same_episode() -> None:
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


def learner_future_states(policy: TinyVLA, weight: float = 1.0, **config: Any) -> SelfImitation:
    torch.manual_seed(0)
    head = FutureStates(policy.feature_sizes, FutureStatesConfig(decisions=1, weight=weight))
    config = {"grow": 1, "batch": 32, "draws": 1, "lr": 5e-3, **config}
    return SelfImitation(policy, policy.trainable(), None, SelfImitationConfig(**config), seeded(3), future=head)


def test_the_head_teaches_the_backbone_by_its_weight() -> None:
    """Without weight imitation alone does."""
    policy = made().with_trained_backbone()
    agent = learner_future_states(policy, weight=0.0, epochs=1)
    first = {name: item.clone() for name, item in agent.future.state_dict().items()} if agent.future else {}
    before = policy.backbone.key.weight.clone()
    agent.optimizer.param_groups[0]["weight_decay"] = 0.0
    agent.update(played(policy))
    assert agent.future is not None and not torch.equal(before, policy.backbone.key.weight)
    assert all(torch.equal(first[name], item) for name, item in agent.future.state_dict().items())
    other = made().with_trained_backbone()
    learner_future_states(other, epochs=1).update(played(other))
    assert not torch.equal(policy.backbone.key.weight, other.backbone.key.weight)


def test_improvements_begin_at_the_heads_first_weights() -> None:
    policy = made().with_trained_backbone()
    agent = learner_future_states(policy, epochs=2)
    rollout = played(policy, 32)
    agent.update(rollout)
    other = made().with_trained_backbone()
    resumed = learner_future_states(other, epochs=2)
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
    fresh = learner_future_states(made().with_trained_backbone()).future
    assert fresh is not None
    for one, two in zip(agent.future.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=0.0)
