"""Every frame has the object position of its own time step, and recorded episodes are replayed for positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sims.catalog import make
from sims.mujoco.render import project
from sims.mujoco.tabletop import COLOURS, LIFT_HEIGHT
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.object_positions import TARGET, collect_located_frames, replayed_positions


def located(
    seeds: list[int],
    num_envs: int,
    random_action_prob: float = 0.0,
    cameras: tuple[str, ...] = ("front",),
    **options: Any,
):
    env = make("lift", num_envs=num_envs, cameras=cameras, **options)
    try:
        return collect_located_frames(env, LiftExpert(5).act, seeds, random_action_prob, np.random.default_rng(0))
    finally:
        env.close()


@pytest.fixture(scope="module")
def frames():
    return located([11, 12, 13, 14, 15], num_envs=3)


def test_the_named_cube_is_where_the_picture_shows_its_colour(frames):
    """The pixel that its centre projects to has its colour, unless a finger occludes it."""
    model = LiftTask().model
    uv = project(model, "front", frames.positions[:, None].astype(np.float64))[:, 0]
    column, row = ((uv + 1) / 2 * 64).astype(int).T
    shown = frames.pictures[np.arange(len(frames)), row, column] / 255.0
    palette = np.array(list(COLOURS.values()))
    light = shown.sum(1, keepdims=True) / palette.sum(1)  # faces are lit differently
    nearest = np.abs(shown[:, None] - light[..., None] * palette).sum(-1)[:, :4].argmin(1)
    assert (nearest == frames.tasks).mean() > 0.85 and len(set(frames.tasks)) > 1


def by_hand(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
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
    return pictures, positions


def test_every_frame_occurs_once_with_its_own_position(frames):
    """Frames after an episode's end and of surplus environments are dropped."""
    episodes = [by_hand(seed) for seed in range(11, 16)]
    assert len(frames) == sum(len(positions) for _, positions in episodes) and frames.positions.dtype == np.float32
    alone = located([11], num_envs=1)
    for found, wanted in zip((alone.pictures, alone.positions), episodes[0], strict=True):
        assert np.array_equal(found, np.stack(wanted))


def test_the_expert_lifts(frames):
    assert 0.1 < (frames.positions[:, 2] >= LIFT_HEIGHT).mean() < 0.6


def test_an_expert_with_random_actions_lifts_less():
    randomized = located([11, 12, 13, 14, 15], num_envs=5, random_action_prob=1.0, deadline=20)
    assert (randomized.positions[:, 2] >= LIFT_HEIGHT).mean() < 0.05


def test_cameras_are_concatenated_in_the_order_of_their_names():
    both, side = (located([3], 1, cameras=cameras, deadline=5) for cameras in (("side", "front"), ("side",)))
    assert both.pictures.shape[1:] == (64, 64, 6)
    assert np.array_equal(both.pictures[..., 3:], side.pictures)


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
    for call in (
        lambda: replayed_positions(blind, [5], kept.actions[:1]),
        lambda: collect_located_frames(blind, lambda obs: obs.state, [5], 0.0, np.random.default_rng(0)),
    ):
        with pytest.raises(UserError, match="has no 'privileged/target'"):
            call()
