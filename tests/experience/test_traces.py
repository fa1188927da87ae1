"""Whole episodes: nothing is lost between an environment and the windows that a world model learns from."""

from __future__ import annotations

import numpy as np
import pytest

from tests.world_models.pushing import played
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.episodes import Episodes
from vla_rl.experience.traces import Traces, cut, seen_at, trace, windows


class Walker:
    """Chunks of three actions, drawn from the generator."""

    version = 0

    def __init__(self, env) -> None:
        self.spec = env.spec

    def precompute(self, obs):
        return {"state": obs.state}

    def initial_state(self, rows):
        return {}

    def reset_state(self, state, rows):
        return state

    def act(self, stored, state, mode, generator):
        from vla_rl.contract.policy import ActionOut

        size = (len(stored["state"]), 3, self.spec.action_dim)
        action = generator.uniform(self.spec.action.low, self.spec.action.high, size).astype(np.float32)
        return ActionOut(action, action, np.zeros(len(action), np.float32), {}, 0), state


def test_an_episode_has_every_moment_and_the_actions_between():
    """Played again, action by action, the environment shows the same."""
    from sims.catalog import make

    env = make("point_mass", num_envs=3)
    traces = trace(env, Walker(env), [5, 6, 7, 8], np.random.default_rng(0))
    assert traces.count == 4 and traces.steps == len(traces.state) - 4
    for (begin, end), seed in zip(traces.spans(), [5, 6, 7, 8], strict=True):
        assert (traces.seed[begin:end] == seed).all()
        obs, steps = env.reset(np.array([1]), np.array([seed])), []
        for moment in range(begin, end):
            np.testing.assert_array_equal(traces.state[moment], obs.state[1])
            if moment == end - 1:
                step = steps[-1]
                assert step.done[1] and traces.success[moment] == step.success[1]
                assert traces.failed[moment] == (step.terminated[1] and not step.success[1])
                assert not traces.action[moment].any()
            else:
                assert not traces.success[moment] and not traces.failed[moment]
                steps.append(env.step(np.repeat(traces.action[moment][None, None], 3, 0)))
                obs = steps[-1].obs


def test_windows_stay_inside_their_episode():
    traces = played(3, seed=0, length=7)
    table = windows(traces, frames=2, memory=2)
    assert len(table["count"]) == traces.steps
    for seen, ahead, count in zip(table["seen"], table["ahead"], table["count"], strict=True):
        ((begin, end),) = [span for span in traces.spans() if span[0] <= seen[-1] < span[1]]
        now = seen[-1]
        assert seen.tolist() == [begin, max(begin, now - 2), now]
        assert ahead.tolist() == [min(now + i, end - 1) for i in (1, 2, 3, 4)]
        assert count == min(4, end - 1 - now)


def test_a_window_holds_what_was_seen_done_and_came_of_it():
    traces = played(4, seed=2, length=7)
    table = windows(traces, frames=2, memory=2)
    chosen = np.arange(len(table["count"]))[::-1]
    batch = cut(traces, table, chosen)
    assert batch["pictures"].shape[1:] == (7, 3, 16, 16) and batch["state"].shape[1:] == (5, 3)
    assert 0 < traces.outcomes.sum() < 4
    for row, index in enumerate(chosen):
        now, ahead = table["seen"][index, -1], table["ahead"][index]
        np.testing.assert_array_equal(batch["pictures"][row, 2], np.moveaxis(traces.images["front"][now], -1, 0))
        np.testing.assert_array_equal(batch["pictures"][row, 3], np.moveaxis(traces.images["front"][ahead[0]], -1, 0))
        np.testing.assert_array_equal(batch["state"][row], traces.state[[now, *ahead]])
        np.testing.assert_array_equal(batch["actions"][row], traces.action[[now, *ahead[:-1]]])
        np.testing.assert_array_equal(batch["outcome"][row, :, 0], traces.success[ahead])
        np.testing.assert_array_equal(batch["outcome"][row, :, 1], traces.failed[ahead])
        (end,) = [end for begin, end in traces.spans() if begin <= now < end]
        assert (batch["outcome"][row, :, 2] == traces.success[end - 1]).all()
        assert batch["task"][row] == traces.task[now]


def test_a_start_is_what_a_window_has_seen():
    traces = played(3, seed=0, length=7)
    table = windows(traces, frames=2, memory=2)
    batch, start = cut(traces, table, np.arange(8)), seen_at(traces, table["seen"][:8, -1], 2, 2)
    np.testing.assert_array_equal(start["pictures"], batch["pictures"][:, :3])
    np.testing.assert_array_equal(start["state"], batch["state"][:, 0])
    np.testing.assert_array_equal(start["task"], batch["task"])


def test_episodes_are_chosen_and_joined_without_loss():
    traces = played(4, seed=1)
    again = Traces.joined([traces.chosen([0, 1]), traces.chosen([2, 3])])
    for name in ("state", "action", "episode", "success"):
        np.testing.assert_array_equal(getattr(again, name), getattr(traces, name))
    turned = traces.chosen([2, 0])
    assert turned.count == 2 and turned.outcomes.tolist() == traces.outcomes[[2, 0]].tolist()
    assert turned.episode.tolist() == sorted(turned.episode.tolist())


def test_traces_of_other_cameras_cannot_be_joined():
    one, other = played(1, seed=1), played(1, seed=2)
    other = Traces({"side": other.images["front"]}, **{n: getattr(other, n) for n in vars(other) if n != "images"})
    with pytest.raises(ContractError, match="cameras"):
        Traces.joined([one, other])


def logged(success: bool, **extras: np.ndarray) -> Episodes:
    """Two episodes of three control steps, as a LeRobot folder has them: no picture after the last action."""
    count, last = 6, np.array([False, False, True] * 2)
    wins = {"next.success": last & np.array([success] * 3 + [True] * 3)}
    return Episodes(
        {"front": np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(3, -1)},
        state=np.arange(count, dtype=np.float32)[:, None],
        task=np.zeros(count, np.int64),
        time=np.arange(count) % 3,
        action=np.ones((count, 2), np.float32),
        episode=np.repeat([0, 1], 3),
        seed=np.full(count, -1),
        tasks=("push",),
        fps=10.0,
        extras=wins | extras,
    )


def test_logged_episodes_show_their_outcome_in_their_last_picture():
    traces = Traces.of_episodes(logged(False, **{"next.terminated": np.array([False, False, True] * 2)}))
    assert traces.outcomes.tolist() == [False, True] and traces.failed.tolist() == [False, False, True] + [False] * 3
    assert traces.success.tolist() == [False] * 5 + [True] and traces.steps == 4
    assert traces.action[:, 0].tolist() == [1, 1, 0, 1, 1, 0]


def test_logged_episodes_without_outcomes_are_refused():
    episodes = logged(True)
    bare = Episodes(**{name: item for name, item in vars(episodes).items() if name != "extras"})
    with pytest.raises(UserError, match="no 'next"):
        Traces.of_episodes(bare)
