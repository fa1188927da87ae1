"""A scripted person: when they take over, what they do, when they hand back, and how much of the time they act."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from sims.toy.point_mass import PointMassEnv, optimal_action
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.experience.intervention import People, PersonConfig, SupervisedEnv

LIMIT = 16  # of an episode
EVERYTHING = PersonConfig(patience=3, delay=2, hold=4, noise=0.0, max_share=1.0)


def expert(obs: Observation) -> np.ndarray:
    return optimal_action(obs)[:, None]


def progress(obs: Observation) -> np.ndarray:
    """1 at the goal, 0 in a corner."""
    found: np.ndarray = 1 - np.linalg.norm(obs.state, axis=1) / np.sqrt(2)
    return found


def made(config: PersonConfig = EVERYTHING, num_envs: int = 1, seed: int = 3) -> tuple[SupervisedEnv, Observation]:
    env = SupervisedEnv(PointMassEnv(num_envs), expert, progress, config)
    return env, env.reset(np.arange(num_envs), seed + np.arange(num_envs))


def still(num_envs: int = 1, horizon: int = 1) -> np.ndarray:
    return np.zeros((num_envs, horizon, 2), np.float32)


def far(obs: Observation) -> bool:
    return bool(np.abs(obs.state).max() > 0.5)


def test_a_person_takes_over_after_what_is_seen_and_a_delay_and_hands_back_when_it_is_better() -> None:
    env, obs = made()
    assert far(obs)
    acted = [bool(env.step(still()).intervened[0, 0]) for _ in range(LIMIT)]
    # Without progress for 3 steps, which is seen in the third; 2 more until the hand; then 4 steps at least.
    assert acted[:9] == [False] * 5 + [True] * 4
    assert not acted[9], "the point has come nearer, so the person rests"
    assert acted[10:14] == [False] * 4, "and looks for as long again"


def test_the_person_does_what_the_expert_would_and_the_policy_does_the_rest() -> None:
    env, _ = made()
    steps = [env.step(np.full((1, 1, 2), 0.001, np.float32)) for _ in range(9)]
    for before, step in itertools.pairwise(steps[4:]):
        np.testing.assert_array_equal(step.executed[:, 0], optimal_action(before.obs))
    np.testing.assert_allclose(np.concatenate([step.executed[0] for step in steps[:5]]), 0.001)


def test_whoever_makes_progress_is_left_alone() -> None:
    env, obs = made()
    for _ in range(LIMIT):
        step = env.step(expert(obs))
        obs = step.obs
        assert not step.intervened.any() or progress(obs)[0] > 0.95
    assert env.share < 0.7


def test_a_slip_is_seen_at_once() -> None:
    env, obs = made(PersonConfig(patience=99, slip=0.1, delay=0, hold=3, noise=0.0, max_share=1.0))
    away = np.sign(obs.state)[:, None] * 0.2
    env.step(expert(obs))
    acted = [bool(env.step(away.astype(np.float32)).intervened[0, 0]) for _ in range(2)]
    assert acted == [False, True]


def test_a_take_over_inside_a_chunk_lasts_to_its_end() -> None:
    env, _ = made()
    first, second = env.step(still(horizon=8)), env.step(still(horizon=8))
    assert first.intervened[0].tolist() == [False] * 5 + [True] * 3
    assert second.intervened[0].tolist() == [True] * 8, (
        "one step of four was missing, so the next chunk is the person's"
    )
    assert first.executed.shape == (1, 8, 2) and first.valid.all() and first.reward.shape == (1, 8)


def test_the_same_episode_however_actions_are_cut() -> None:
    one, _ = made(PersonConfig(patience=3, delay=2, hold=99, noise=0.3, max_share=1.0))
    other, _ = made(PersonConfig(patience=3, delay=2, hold=99, noise=0.3, max_share=1.0))
    single = [one.step(still()) for _ in range(LIMIT)]
    chunked = other.step(still(horizon=8)), other.step(still(horizon=8), "all")
    for name in ("executed", "reward", "intervened", "valid"):
        whole, parts = ([getattr(step, name) for step in steps] for steps in (chunked, single))
        np.testing.assert_array_equal(np.concatenate(whole, 1), np.concatenate(parts, 1))
    assert len(chunked[1].frames) == 8
    np.testing.assert_array_equal(chunked[1].frames[3].state, single[11].obs.state)


def test_the_noise_of_a_person_follows_from_the_seed_and_stays_within_the_bounds() -> None:
    config = PersonConfig(patience=1, delay=0, hold=99, noise=0.5, max_share=1.0)

    def played(num_envs: int, seed: int) -> np.ndarray:
        env, _ = made(config, num_envs, seed)
        found: np.ndarray = np.concatenate([env.step(still(num_envs)).executed for _ in range(LIMIT)], 1)
        return found

    together, alone = played(3, 10), played(1, 12)
    np.testing.assert_array_equal(together[2], alone[0])
    assert np.abs(together).max() <= np.float32(0.2) and together[:, 3:].std() > 0.05
    assert not np.array_equal(together[0, 3:], together[1, 3:])


def test_a_person_acts_in_no_larger_share_of_steps_than_allowed() -> None:
    config = PersonConfig(patience=2, delay=0, hold=4, noise=0.0, max_share=0.2)
    env, _ = made(config, 16)
    shares, seeds = [], iter(range(100, 1000))
    for _ in range(80):
        done = np.flatnonzero(env.step(still(16)).done)
        env.reset(done, np.array([next(seeds) for _ in done], np.int64))
        shares.append(env.share)
    assert shares[-1] > 0.1 and max(shares) <= 0.2


def test_one_person_is_with_one_robot_at_a_time_and_free_again_afterwards() -> None:
    people = People(1)
    envs = [SupervisedEnv(PointMassEnv(1), expert, progress, EVERYTHING, people) for _ in range(2)]
    for number, env in enumerate(envs):
        env.reset([0], [3 + number])
    acted = np.array([[bool(env.step(still()).intervened[0, 0]) for env in envs] for _ in range(LIMIT)])
    assert acted.any(0).all() and not acted.all(1).any()
    assert acted[5:9, 0].all() and acted[9:, 1].any(), "the second robot waits for the first one's person"
    alone = made()[0]
    assert [bool(alone.step(still()).intervened[0, 0]) for _ in range(LIMIT)][:9] == acted[:9, 0].tolist()
    for number, env in enumerate(envs):  # also where an episode ended under a person's control
        env.reset([0], [5 + number])
    assert people.free == 1


def test_what_idles_is_neither_watched_nor_counted() -> None:
    env, _ = made()
    for _ in range(LIMIT):
        env.step(still())
    share = env.share
    assert not env.step(still()).valid.any() and env.share == share


def test_numbers_without_a_meaning_are_refused() -> None:
    bad: list[tuple[str, Any]] = [("patience", 0), ("delay", -1), ("hold", 0), ("noise", -0.1), ("max_share", 1.1)]
    for name, value in bad:
        with pytest.raises(UserError, match=f"PersonConfig.{name} is {value}"):
            PersonConfig(**{name: value})
