"""Self-imitation: only whole successes are imitated, which converges to the policy given success."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_hg_dagger import Chunked, D, H, Table, experience, seeded
from tests.toys import rollout
from vla_rl.algorithms.self_imitation import SelfImitation, SelfImitationConfig, of_successes
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import ActionOut


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


def test_it_improves_after_so_many_rollouts_from_the_first_weights_on_all_successes() -> None:
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


def test_a_decision_of_a_version_that_is_not_there_yet_is_refused() -> None:
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
