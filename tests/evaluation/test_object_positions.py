"""Sightings belong to their pictures, and recorded episodes are repeated to know where things were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sims.catalog import make
from sims.mujoco.render import project
from sims.mujoco.tabletop import COLOURS, LIFT_HEIGHT
from sims.mujoco.tasks.lift import LiftTask
from sims.mujoco.tasks.lift_expert import LiftExpert
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.object_positions import TARGET, replayed_positions, watch


def looked(seeds: list[int], rows: int, clumsy: float = 0.0, cameras: tuple[str, ...] = ("front",), **options: Any):
    env = make("lift", num_envs=rows, cameras=cameras, **options)
    try:
        return watch(env, LiftExpert(5).act, seeds, clumsy, np.random.default_rng(0))
    finally:
        env.close()


@pytest.fixture(scope="module")
def seen():
    return looked([11, 12, 13, 14, 15], rows=3)


def test_the_named_cube_is_where_the_picture_shows_its_colour(seen):
    """At the pixel that its centre projects to, unless a finger is before it."""
    model = LiftTask().model
    uv = project(model, "front", seen.positions[:, None].astype(np.float64))[:, 0]
    column, row = ((uv + 1) / 2 * 64).astype(int).T
    shown = seen.pictures[np.arange(len(seen)), row, column] / 255.0
    palette = np.array(list(COLOURS.values()))
    light = shown.sum(1, keepdims=True) / palette.sum(1)  # faces are lit differently
    nearest = np.abs(shown[:, None] - light[..., None] * palette).sum(-1)[:, :4].argmin(1)
    assert (nearest == seen.tasks).mean() > 0.85 and len(set(seen.tasks)) > 1


def by_hand(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The expert's chunks played one action at a time: every picture and the place that belongs to it."""
    env = make("lift", num_envs=1)
    obs, done = env.reset(np.zeros(1, int), np.array([seed])), False
    pictures, places = [obs.images["front"][0]], [obs.extras[TARGET][0]]
    while not done:
        for action in LiftExpert(5).act(obs)[0]:
            step = env.step(action[None, None])
            obs, done = step.obs, bool(step.done[0])
            pictures.append(obs.images["front"][0])
            places.append(obs.extras[TARGET][0])
            if done:
                break
    env.close()
    return pictures, places


def test_every_frame_is_there_once_with_the_place_of_its_moment(seen):
    """Rows that idle or repeat the last seed are not kept."""
    episodes = [by_hand(seed) for seed in range(11, 16)]
    assert len(seen) == sum(len(places) for _, places in episodes) and seen.positions.dtype == np.float32
    alone = looked([11], rows=1)
    for found, wanted in zip((alone.pictures, alone.positions), episodes[0], strict=True):
        assert np.array_equal(found, np.stack(wanted))


def test_the_expert_lifts(seen):
    assert 0.1 < (seen.positions[:, 2] >= LIFT_HEIGHT).mean() < 0.6


def test_a_clumsy_expert_lifts_less():
    clumsy = looked([11, 12, 13, 14, 15], rows=5, clumsy=1.0, deadline=20)
    assert (clumsy.positions[:, 2] >= LIFT_HEIGHT).mean() < 0.05


def test_cameras_lie_side_by_side_in_the_order_of_their_names():
    both, side = (looked([3], 1, cameras=cameras, deadline=5) for cameras in (("side", "front"), ("side",)))
    assert both.pictures.shape[1:] == (64, 64, 6)
    assert np.array_equal(both.pictures[..., 3:], side.pictures)


class Recorded:
    """Random play of lift, an episode at a time: what a recording keeps, and where the cube was."""

    def __init__(self, seeds: list[int], lengths: list[int]) -> None:
        env, self.seeds = make("lift", num_envs=1, render=False), seeds
        self.actions, self.positions = [], []
        random = np.random.default_rng(0)
        for seed, length in zip(seeds, lengths, strict=True):
            obs, places = env.reset(np.zeros(1, int), np.array([seed])), []
            low, high = env.spec.action.low, env.spec.action.high
            acts = random.uniform(low, high, (length, env.spec.action_dim)).astype(np.float32)
            for action in [*acts]:
                places.append(obs.extras[TARGET][0])
                obs = env.step(action[None, None]).obs
            self.actions.append(acts)
            self.positions.append(np.stack([*places, obs.extras[TARGET][0]]))
        env.close()


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_repeated_episode_has_its_objects_where_they_were(rows):
    """To the last bit, whoever is repeated beside it and however long that lasts."""
    kept = Recorded([5, 6, 7], [12, 3, 30])
    env = make("lift", num_envs=rows, render=False)
    found = replayed_positions(env, kept.seeds, kept.actions)
    env.close()
    assert [len(item) for item in found] == [13, 4, 31]
    for one, other in zip(found, kept.positions, strict=True):
        assert np.array_equal(one, other)


def test_an_episode_of_another_environment_is_noticed():
    kept = Recorded([5, 6], [12, 3])
    env = make("lift", num_envs=2, render=False, deadline=4)
    with pytest.raises(ContractError, match="the episode of seed 5 ends after 4 of its 12 actions"):
        replayed_positions(env, kept.seeds, kept.actions)
    env.close()


def test_what_cannot_be_repeated_is_refused():
    kept, env = Recorded([5, 6], [2, 3]), make("lift", num_envs=2, render=False)
    with pytest.raises(UserError, match="episode 1 has no seed"):
        replayed_positions(env, [5, -1], kept.actions)
    env.close()
    blind = make("counting", num_envs=1)
    for call in (
        lambda: replayed_positions(blind, [5], kept.actions[:1]),
        lambda: watch(blind, lambda obs: obs.state, [5], 0.0, np.random.default_rng(0)),
    ):
        with pytest.raises(UserError, match="has no 'privileged/target'"):
            call()
