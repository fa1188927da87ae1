"""The object is where the picture shows it, and recorded episodes are replayed for its positions."""

from __future__ import annotations

import numpy as np
import pytest

from sims.catalog import make
from sims.mujoco.render import project
from sims.mujoco.tabletop import COLOURS
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.object_positions import TARGET, replayed_positions


def by_hand(seed: int) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """The expert's chunks executed one action at a time: every picture and its position."""
    env = make("lift", num_envs=1)
    obs, done = env.reset(np.zeros(1, int), np.array([seed])), False
    pictures, positions = [obs.images["front"][0]], [obs.extras[TARGET][0]]
    while not done:
        for action in LiftExpert(5).act(obs)[0]:
            step = env.step(action[None, None])
            obs, done = step.obs, bool(step.done[0])
            pictures.append(obs.images["front"][0])
            positions.append(obs.extras[TARGET][0])
            if done:
                break
    env.close()
    return pictures, positions, int(obs.task[0])


def test_the_named_cube_is_where_the_picture_shows_its_colour():
    """The pixel that its centre projects to has its colour, unless a finger occludes it."""
    model, palette, right, seen = LiftTask().model, np.array(list(COLOURS.values())), 0, 0
    for seed in (11, 12, 13):
        pictures, positions, task = by_hand(seed)
        uv = project(model, "front", np.stack(positions)[:, None].astype(np.float64))[:, 0]
        column, row = ((uv + 1) / 2 * 64).astype(int).T
        shown = np.stack(pictures)[np.arange(len(pictures)), row, column] / 255.0
        light = shown.sum(1, keepdims=True) / palette.sum(1)  # faces are lit differently
        nearest = np.abs(shown[:, None] - light[..., None] * palette).sum(-1)[:, :4].argmin(1)
        right, seen = right + int((nearest == task).sum()), seen + len(nearest)
    assert right / seen > 0.85


class Recorded:
    """Episodes of lift with random actions: what a recording contains, and the cube's true positions."""

    def __init__(self, seeds: list[int], lengths: list[int]) -> None:
        env, self.seeds = make("lift", num_envs=1, render=False), seeds
        self.actions, self.positions = [], []
        random = np.random.default_rng(0)
        for seed, length in zip(seeds, lengths, strict=True):
            obs, positions = env.reset(np.zeros(1, int), np.array([seed])), []
            low, high = env.spec.action.low, env.spec.action.high
            acts = random.uniform(low, high, (length, env.spec.action_dim)).astype(np.float32)
            for action in [*acts]:
                positions.append(obs.extras[TARGET][0])
                obs = env.step(action[None, None]).obs
            self.actions.append(acts)
            self.positions.append(np.stack([*positions, obs.extras[TARGET][0]]))
        env.close()


@pytest.mark.parametrize("num_envs", [1, 2, 8])
def test_a_replayed_episode_has_its_objects_in_the_same_positions(num_envs):
    """Bit for bit, whatever other episodes are replayed beside it."""
    kept = Recorded([5, 6, 7], [12, 3, 30])
    env = make("lift", num_envs=num_envs, render=False)
    found = replayed_positions(env, kept.seeds, kept.actions)
    env.close()
    assert [len(item) for item in found] == [13, 4, 31]
    for one, other in zip(found, kept.positions, strict=True):
        assert np.array_equal(one, other)


def test_an_episode_of_another_environment_is_refused():
    kept = Recorded([5, 6], [12, 3])
    env = make("lift", num_envs=2, render=False, deadline=4)
    with pytest.raises(ContractError, match="the episode of seed 5 ends after 4 of its 12 actions"):
        replayed_positions(env, kept.seeds, kept.actions)
    env.close()


def test_episodes_that_cannot_be_replayed_are_refused():
    kept, env = Recorded([5, 6], [2, 3]), make("lift", num_envs=2, render=False)
    with pytest.raises(UserError, match="episode 1 has no seed"):
        replayed_positions(env, [5, -1], kept.actions)
    env.close()
    blind = make("counting", num_envs=1)
    with pytest.raises(UserError, match="has no 'privileged/target'"):
        replayed_positions(blind, [5], kept.actions[:1])
