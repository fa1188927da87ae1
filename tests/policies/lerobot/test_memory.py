"""Memories of LeRobot's policies: environments that are differently far are computed together as if each were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.policies.lerobot.small import KINDS, STATE, loaded
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.policies.lerobot.memory import RowNoise
from vla_rl.policies.lerobot.worker import PolicyServer

ENVS, STEPS = 5, 14
KEPT = [name for name in KINDS if name != "Hidden"]


def server(kind: str) -> PolicyServer:
    made = PolicyServer(lambda folder: loaded(folder))
    made.load(kind)
    made.begin({STATE: [2]}, ["go"])
    return made


def states() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(STEPS, ENVS, 2)).astype(np.float32)


def act(made: PolicyServer, step: np.ndarray, at: int, session: Any = range(ENVS), horizon: int = 1) -> np.ndarray:
    """The actions [E,H,2] at ``states()[at]``."""
    session = np.array(session)
    seed, task = 1000 * at + np.arange(ENVS), np.zeros(ENVS, np.int64)
    return made.act(session, step, seed, task, horizon, **{STATE: states()[at]})[1]["action"]


def played_alone(kind: str, env: int, begins: set[int]) -> np.ndarray:
    """What LeRobot's own loop does in environment ``env``, whose episodes begin at ``begins``."""
    one, found = loaded(kind), []
    for at in range(STEPS):
        if at in begins:
            one.policy.reset()
        with RowNoise([1000 * at + env]), torch.no_grad():
            ready = one.before({STATE: torch.from_numpy(states()[at, env : env + 1])})
            found.append(one.after(one.policy.select_action(ready))[0].numpy())
    return np.stack(found)


@pytest.mark.parametrize("kind", KEPT)
def test_each_environment_is_as_if_it_were_alone(kind):
    made, step = server(kind), np.zeros(ENVS, np.int64)
    begins = {env: {0, *range(env + 1, STEPS, 2 * env + 3)} for env in range(ENVS)}
    found = []
    for at in range(STEPS):
        step[[at in begins[env] for env in range(ENVS)]] = 0
        found.append(act(made, step, at)[:, 0])
        step += 1
    alone = np.stack([played_alone(kind, env, begins[env]) for env in range(ENVS)], 1)
    np.testing.assert_allclose(np.stack(found), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "decided"), [("Queued", 4), ("Chunked", 4), ("Ensembled", 1), ("Planned", 1)])
def test_how_many_actions_are_chosen_at_once_is_measured(kind, decided):
    made = PolicyServer(lambda folder: loaded(folder))
    made.load(kind)
    assert made.begin({STATE: [2]}, ["go"])[0] == {"decided": decided}


def test_a_whole_chunk_is_what_single_actions_are():
    made, step = server("Chunked"), np.zeros(ENVS, np.int64)
    chunk = act(made, step, 0, horizon=4)
    single = [act(made, step + i, 0, range(ENVS, 2 * ENVS)) for i in range(4)]
    np.testing.assert_array_equal(chunk, np.concatenate(single, 1))


@pytest.mark.parametrize("kind", KEPT)
def test_a_decision_can_be_made_again_but_none_before_it(kind):
    made, step = server(kind), np.zeros(ENVS, np.int64)
    for at in range(3):
        first = act(made, step + at, at)
    np.testing.assert_array_equal(act(made, step + 2, 2), first)
    with pytest.raises(ContractError, match="nothing is known of the 1 decisions of session 0"):
        act(made, step + 1, 1)


@pytest.mark.parametrize("kind", KEPT)
def test_another_process_goes_on_bit_for_bit(kind):
    made, step, session = server(kind), np.array([0, 0, 1, 2, 3]), np.arange(ENVS)
    for at in range(3):
        act(made, np.maximum(0, at - 3 + step), at)
    kept = made.save(session, step)[0]["kept"]
    assert [len(data) > 0 for data in kept] == [False, False, True, True, True]
    other = server(kind)
    other.restore(session + 7, step, kept)
    np.testing.assert_array_equal(act(made, step, 5), act(other, step, 5, session + 7))


def test_what_a_network_keeps_itself_is_refused():
    made = PolicyServer(lambda folder: loaded(folder))
    made.load("Hidden")
    with pytest.raises(UserError, match=r"a Hidden keeps layer.last between two actions inside its networks"):
        made.begin({STATE: [2]}, ["go"])


def test_noise_depends_on_the_own_seed_alone():
    with RowNoise([1, 2, 3]):
        batch = torch.randn(3, 4), torch.rand(3, 2), torch.randn_like(torch.empty(3, 2))
    with RowNoise([3]):
        alone = torch.randn(1, 4), torch.rand(1, 2), torch.randn_like(torch.empty(1, 2))
    assert all(torch.equal(many[2], one[0]) for many, one in zip(batch, alone, strict=True))
    with RowNoise([3, 9]):
        other = torch.randn(5)  # not for the batch
    with RowNoise([3]):
        assert torch.equal(torch.randn(5), other)


def test_sessions_that_were_not_played_for_long_are_dropped(monkeypatch):
    monkeypatch.setattr("vla_rl.policies.lerobot.worker._MOST_SESSIONS", 8)
    made, step = server("Chunked"), np.zeros(ENVS, np.int64)
    for first in range(0, 10 * ENVS, ENVS):
        act(made, step, 0, range(first, first + ENVS))
    assert len(made._held) == 4 * ENVS
    act(made, step + 1, 1, range(9 * ENVS, 10 * ENVS))
    with pytest.raises(ContractError, match="session 0"):
        act(made, step + 1, 1)
