"""A scripted person: when they take over and hand back, how much of the time they act; help by degrees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sims.toy.point_mass import PointMassEnv, optimal_action
from vla_rl.contract.env import Observation
from vla_rl.experience.intervention import (
    Escalation,
    Help,
    HelpDesk,
    HelpedEnv,
    HelpedEpisode,
    People,
    PersonConfig,
    SupervisedEnv,
)

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


def test_a_person_takes_over_after_a_delay_and_hands_back() -> None:
    env, obs = made()
    assert far(obs)
    acted = [bool(env.step(still()).intervened[0, 0]) for _ in range(LIMIT)]
    # Without progress for 3 steps, which is seen in the third; 2 more until the hand; then 4 steps at least.
    assert acted[:9] == [False] * 5 + [True] * 4
    assert not acted[9], "the point has come nearer, so the person rests"
    assert acted[10:14] == [False] * 4, "and looks for as long again"


def test_the_person_does_what_the_expert_would() -> None:
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
    assert env._rule.share < 0.7


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


def test_a_persons_noise_is_seeded_and_within_the_bounds() -> None:
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
        shares.append(env._rule.share)
    assert shares[-1] > 0.1 and max(shares) <= 0.2


def test_one_person_is_with_one_robot_at_a_time() -> None:
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
    share = env._rule.share
    assert not env.step(still()).valid.any() and env._rule.share == share


# -- help by degrees: what is due after which failures, what ends it, and what it may cost ---------------------------

NONE, REPLAY, RETURN, GUIDED = Help
FRESH, SHOWN, AGAIN = HelpedEpisode(), HelpedEpisode(REPLAY, shown=True), HelpedEpisode(REPLAY)
PERSON = PersonConfig(patience=2, delay=0, hold=3, noise=0.0, max_share=1.0)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        (1, [NONE, REPLAY, RETURN, GUIDED, NONE]),
        (2, [NONE, REPLAY, REPLAY, RETURN, RETURN, GUIDED, GUIDED, NONE]),
    ],
)
def test_help_grows_with_failures_and_is_then_given_up(attempts: int, expected: list[Help]) -> None:
    rule = Escalation(attempts=attempts)
    assert [rule.due((0.3,) * failures) for failures in range(len(expected))] == expected


def test_who_comes_further_is_not_helped_more() -> None:
    rule = Escalation(gain=0.1)
    assert rule.due((0.3, 0.5)) == REPLAY and rule.due((0.3, 0.39)) == RETURN
    assert rule.due((0.3, 0.5, 0.5)) == RETURN, "not further than before"
    assert rule.due((0.5, 0.3, 0.45)) == GUIDED, "further than the last, but not than the best"


# -- a desk, by hand --------------------------------------------------------------------------------------------------


def played(desk: HelpDesk, outcomes: list[bool], robot: int = 0, affordable: int = 9) -> list[HelpedEpisode]:
    """The episodes of ``robot``, whose attempts end with ``outcomes``; the last one has not ended."""
    found = []
    for success in (*outcomes, None):
        found += desk.next([robot], affordable)
        if success is not None:
            desk.ended(robot, success, 0.3)
    return found


@pytest.mark.parametrize("fails", [2, 3, 4])
def test_a_success_ends_all_help(fails: int) -> None:
    """Of the policy itself, at whatever degree; a person's demonstration is none."""
    desk = HelpDesk(Escalation(), 1)
    outcomes = [*[False, True, False, False, False][:fails], True, False]
    episodes = played(desk, outcomes)
    assert episodes[fails] != FRESH and episodes[fails + 1 :] == [FRESH, SHOWN]
    assert desk.reached[0] == (0.3,)


def test_robots_do_not_touch_each_other() -> None:
    desk, random = HelpDesk(Escalation(), 3), np.random.default_rng(0)
    alone = [HelpDesk(Escalation(), 1) for _ in range(3)]
    for _ in range(200):
        robot, success = int(random.integers(3)), bool(random.random() < 0.4)
        assert desk.next([robot], 9) == alone[robot].next([0], 9)
        desk.ended(robot, success, 0.2)
        alone[robot].ended(0, success, 0.2)
        assert desk.reached[robot] == alone[robot].reached[0]
    assert len({desk.reached[robot] for robot in range(3)}) > 1


def test_less_help_is_given_before_the_budget_is_exceeded() -> None:
    for demonstrations, returns, affordable in itertools.product((0, 2, 9), (0, 3, 9), (0, 1)):
        desk = HelpDesk(Escalation(demonstrations=demonstrations, returns=returns), 4)
        for _ in range(40):
            episodes = desk.next(range(4), affordable)
            assert sum(episode.shown for episode in episodes) <= affordable
            for robot in range(4):
                desk.ended(robot, False, 0.3)
        assert desk.demonstrations <= demonstrations and desk.returns <= returns
        assert desk.returns == returns and (desk.demonstrations > 0) == bool(demonstrations and returns and affordable)
    without = HelpDesk(Escalation(demonstrations=0), 1)
    assert played(without, [False, False]) == [FRESH, AGAIN, HelpedEpisode(RETURN)], (
        "the policy tries again all the same"
    )
    short = HelpDesk(Escalation(returns=1), 1)
    assert played(short, [False, True, False]) == [FRESH, SHOWN, AGAIN, FRESH], "nobody puts the robot back again"


# -- in a simulator ---------------------------------------------------------------------------------------------------


class Episodes:
    """Plays one episode after the other; ``away`` first goes right for so many steps, then stands still."""

    def __init__(self, num_envs: int = 1, help: Escalation | None = None, person: PersonConfig = PERSON) -> None:
        self.env = HelpedEnv(PointMassEnv(num_envs), expert, progress, person, help or Escalation(demonstration=4))
        self.seed = 0

    def play(self, solves: bool = False) -> tuple[np.ndarray, np.ndarray, int]:
        """State and time [2],[] where the first episode begins, and where a person acted in it [T]."""
        self.seed += 1
        obs = self.env.reset([0], [self.seed])
        begin, time, acted, done = obs.state[0].copy(), int(obs.time[0]), [], False
        while not done:
            action = expert(obs) if solves or obs.time[0] < 3 else still()
            step = self.env.step(action.astype(np.float32))
            acted.append(bool(step.intervened[0, 0]))
            obs, done = step.obs, bool(step.done[0])
        return begin, np.array(acted), time


def test_the_simulator_puts_the_robot_back_where_it_got_stuck() -> None:
    episodes = Episodes()
    first, nobody, start = episodes.play()
    assert start == 0 and not nobody.any(), "a new scene is the policy's alone"
    hard, shown, time = episodes.play()
    assert time == 3, "the last moment of progress: three steps towards the goal, then nothing"
    assert shown[:4].all() and not shown[4:].any(), "four steps of a demonstration, then the policy"
    again, alone, start = episodes.play()
    assert start == 0 and not alone.any() and np.array_equal(again, first), "the same scene from its beginning"
    back, alone, time = episodes.play()
    assert time == 3 and not alone.any() and np.array_equal(back, hard)
    back, guided, time = episodes.play()
    assert time == 3 and np.array_equal(back, hard) and not guided[:2].any() and guided[3:].any()
    other, nobody, start = episodes.play()
    assert start == 0 and not nobody.any() and not np.array_equal(other, first), "another scene"
    desk = episodes.env.desk
    assert desk.given == {NONE: 2, REPLAY: 1, RETURN: 1, GUIDED: 1} and (desk.demonstrations, desk.returns) == (1, 3)


def test_demonstrations_and_guidance_share_the_persons_steps() -> None:
    shares = []
    for share in (0.0, 0.2):
        person = PersonConfig(patience=2, delay=0, hold=4, noise=0.0, max_share=share)
        env = HelpedEnv(PointMassEnv(8), expert, progress, person, Escalation(demonstration=4))
        env.reset(np.arange(8), np.arange(8))
        seeds = itertools.count(100)
        for _ in range(200):
            done = np.flatnonzero(env.step(still(8)).done)
            env.reset(done, np.array([next(seeds) for _ in done], np.int64))
            shares.append(env._rule.share)
            assert env._rule.share <= share
        assert env.desk.given[GUIDED] and (env.desk.demonstrations > 3) == (share > 0)
    assert max(shares) > 0.1


def test_one_person_demonstrates_to_one_robot_at_a_time() -> None:
    env = HelpedEnv(PointMassEnv(3), expert, progress, PERSON, Escalation(demonstration=30), people=People(1))
    env.reset([0, 1, 2], [1, 2, 3])
    acted = []
    for count in range(200):
        step = env.step(still(3))
        acted.append(step.intervened[:, 0])
        done = np.flatnonzero(step.done)
        env.reset(done, 10 * count + done)
    assert np.sum(acted, 1).max() == 1 and np.any(acted, 0).all()


def test_an_episode_that_is_broken_off_ends_help() -> None:
    episodes = Episodes()
    first, _, _ = episodes.play()
    assert episodes.env.reset([0], [9]).time[0] == 3, "a demonstration begins"
    episodes.env.step(still())
    other, nobody, start = episodes.play()
    assert start == 0 and not nobody.any() and not np.array_equal(other, first)
    assert episodes.env.desk.given == {NONE: 2, REPLAY: 0, RETURN: 0, GUIDED: 0}
