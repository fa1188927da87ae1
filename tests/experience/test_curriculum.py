"""A curriculum: what it believes of scenes by hand, what it draws, and what sources tell it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch

from sims.base import NumpyEnv
from tests.breaking import BreakingEnv
from tests.experience.makers import Patient
from tests.experience.test_breakdowns import HORIZON, LONG
from tests.experience.test_groups import Uniform, same
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.experience.curriculum import CurriculumStream, InOrder, LearningProgress, OutcomeVariance, SeedStream
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import RolloutSource, WindowConfig
from vla_rl.training.checkpoint import latest_state, save_state

CHANCES = (0.0, 0.5, 1.0)  # of seed modulo 3
ENTRY = ArraySpec((1,), "float32", 0.0, 1.0)
SPEC = EnvSpec("bandit", {}, ENTRY, ENTRY, ("one", "other"), 0.1, 1, 1, families=("a", "b"))
GROUPS = GroupConfig(groups=6, size=4, ahead=0, limit=6, num_envs=24)


def stream(config=None, seeds=None, spec=SPEC) -> CurriculumStream:
    return (config or OutcomeVariance(scenes=4)).stream(seeds or SeedStream(300, 10**6), spec)


class Bandit(NumpyEnv):
    """One step; success has a known chance in each scene, and every second scene is of the other family."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(SPEC, num_envs, {})

    def _begin(self, row, seed):
        """Nothing is drawn."""

    def _instruction(self):
        return self._seed % 2

    def _advance(self, env_ids, action):
        won = action[:, 0] < np.array(CHANCES)[self._seed[env_ids] % 3]
        return won.astype(np.float32), won, ~won

    def _state(self):
        return np.zeros((self.num_envs, 1), np.float32)


# -- what is believed -------------------------------------------------------------------------------------------------


def test_chances_and_scores_by_hand():
    """A half-life of a quarter of four scenes' episodes is one episode: every count is halved by the next one."""
    known = stream(OutcomeVariance(scenes=4, half_life=0.25, prior=2.0))
    for seed, success, family in ((300, True, "a"), (301, False, "a"), (300, False, "a"), (302, True, "b")):
        known.note(seed, success, family)
    half, of_a, of_b, of_all = Fraction(1, 2), Fraction(9, 23), Fraction(2, 3), Fraction(17, 31)
    wanted = [
        (2 * of_a + half**3) / (2 + half**3 + half),  # succeeded three episodes ago and failed one ago
        2 * of_a / (2 + half**2),
        (2 * of_b + 1) / 3,
        of_all,  # never played, so of no family
    ]
    np.testing.assert_allclose(known.chances(), [[float(p) for p in wanted]], rtol=1e-12)
    np.testing.assert_allclose(known.scores(), [float(p * (1 - p)) for p in wanted], rtol=1e-12)


def test_learning_progress_by_hand():
    known = stream(LearningProgress(scenes=4, half_life=0.5, fast=0.25, prior=2.0), spec=replace(SPEC, families=()))
    known.note(301, False, "bandit")
    known.note(301, True, "bandit")
    slow = 0.5**0.5  # what is left of the first outcome
    chance = {}
    for left in (0.5, slow):
        mean = 2 / (2 + 1 + left)
        chance[left] = (mean, (2 * mean + 1) / (2 + 1 + left))
    wanted = [abs(chance[0.5][played] - chance[slow][played]) for played in (0, 1, 0, 0)]
    np.testing.assert_allclose(known.scores(), wanted, rtol=1e-12)


def test_outcomes_are_forgotten():
    known = stream(OutcomeVariance(scenes=4, half_life=1.0, prior=2.0))
    for _ in range(50):
        known.note(300, True, "a")
    mastered = known.chances()[0, 0]
    for _ in range(50):
        known.note(301, False, "a")
    assert mastered > 0.8 and known.chances()[0, 0] < 0.25, "it is believed to be like the present of its family"


# -- what is drawn ----------------------------------------------------------------------------------------------------


def test_a_share_goes_in_order_and_the_rest_by_score():
    known = stream()
    for seed, success in ((300, True), (300, False), (301, True), (301, True), (302, False)) * 4:
        known.note(seed, success, "a")
    scores, count = known.scores(), 2000
    drawn = np.array(list(islice(known, count))) - 300
    assert drawn[3::4].tolist() == [0, 1, 2, 3] * (count // 16)
    shares = np.bincount(np.delete(drawn, slice(3, None, 4)), minlength=4) / (0.75 * count)
    wanted = scores / scores.sum()
    assert (abs(shares - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / (0.75 * count))).all()
    assert wanted.max() > 1.5 * wanted.min()
    assert known.counters() == {
        "rollout/curriculum_draws": count,
        "rollout/curriculum_score": pytest.approx(scores[drawn].sum()),
    }
    assert known.counters() == {"rollout/curriculum_draws": 0, "rollout/curriculum_score": 0}


@pytest.mark.parametrize(("kind", "explore"), [(OutcomeVariance, 1.0), (OutcomeVariance, 0.1), (LearningProgress, 0.3)])
def test_every_scene_comes_back_in_time(explore, kind):
    known, last = stream(kind(scenes=7, explore=explore)), dict.fromkeys(range(300, 307), 0)
    for number in range(1, 400):
        seed = next(known)
        assert number - last[seed] <= 7 / explore + 1
        last[seed] = number
        known.note(seed, seed == 303 and number % 2 == 0, "a")  # all else is hopeless
        assert number - min(last.values()) <= 7 / explore + 1


def played(known: CurriculumStream, count: int, seed: int = 0) -> np.ndarray:
    """The scenes of ``count`` draws from a bandit."""
    luck, drawn = np.random.default_rng(seed), []
    for _ in range(count):
        drawn.append(next(known))
        known.note(drawn[-1], luck.random() < CHANCES[drawn[-1] % 3], "a")
    return np.array(drawn)


def test_most_draws_go_to_scenes_whose_outcome_is_open():
    known = stream(OutcomeVariance(scenes=12, half_life=50.0, prior=0.5))
    drawn = played(known, 2000)[1000:]
    explored = 0.25 / 3
    assert np.mean(drawn % 3 == 1) == pytest.approx(explored + 0.75, abs=0.1)
    assert np.mean(drawn % 3 == 0) == pytest.approx(explored, abs=0.05)
    assert np.mean(drawn % 3 == 2) == pytest.approx(explored, abs=0.05)


def test_learning_progress_prefers_what_is_being_learnt():
    known, drawn = stream(LearningProgress(scenes=8, half_life=8.0, fast=2.0), SeedStream(0, 100)), []
    for number in range(900):
        drawn.append(next(known))
        known.note(drawn[-1], drawn[-1] % 2 == 0 or (drawn[-1] == 5 and number >= 300), "a")
    before, after, late = (Counter(drawn[i : i + 60])[5] / 60 for i in (240, 320, 840))
    assert after > 0.25 > before and after > late


def test_taken_scenes_are_left_out_unless_all_are():
    known = stream(OutcomeVariance(scenes=4, explore=0.5))
    assert {known.draw([300, 302]) for _ in range(40)} == {301, 303}
    assert {known.draw(range(300, 304)) for _ in range(40)} == set(range(300, 304))


def test_parts_share_the_first_scenes_and_draw_on_their_own():
    config = OutcomeVariance(scenes=10).split(2)
    parts = [config.stream(SeedStream(300 + part, 10**6, 2), SPEC) for part in range(2)]
    drawn = [list(islice(part, 60)) for part in parts]
    assert set(drawn[0]) | set(drawn[1]) == set(range(300, 310)) and not set(drawn[0]) & set(drawn[1])
    assert [seed + 1 for seed in drawn[0]] != drawn[1]
    assert WindowConfig(4, curriculum=OutcomeVariance(10)).split(2) == WindowConfig(2, curriculum=config)
    assert replace(GROUPS, curriculum=OutcomeVariance(10)).split(2).curriculum == config


# -- what is saved ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OutcomeVariance, LearningProgress])
def test_a_saved_stream_goes_on(kind, tmp_path):
    known, resumed = stream(kind(scenes=9)), stream(kind(scenes=9))
    played(known, 100)
    save_state(tmp_path, 1, known.state_dict())
    resumed.load_state_dict(latest_state(tmp_path)[1])
    assert np.array_equal(played(known, 200, 1), played(resumed, 200, 1))
    assert np.array_equal(known.scores(), resumed.scores())


def test_what_was_saved_stays_as_it_was():
    known = stream()
    played(known, 5)
    saved, before = known.state_dict(), known.scores()
    for seed in (1, 2):
        played(known, 5, seed)
        known.load_state_dict(saved)
        assert np.array_equal(known.scores(), before)


@pytest.mark.parametrize("state", [{"drawn": 4}, stream(OutcomeVariance(scenes=5)).state_dict()])
def test_the_state_of_another_curriculum_is_refused(state):
    with pytest.raises(UserError, match="that of another curriculum"):
        stream().load_state_dict(state)


@pytest.mark.parametrize("config", [WindowConfig(6, 3), replace(GROUPS, ahead=2, limit=12)])
def test_a_saved_source_goes_on_bit_for_bit(config, tmp_path):
    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        scenes = replace(config, curriculum=OutcomeVariance(scenes=30))
        return scenes.build(Bandit(config.num_envs), Uniform(), SeedStream(300, 10**6), generator)

    one, resumed = made(1), made(2)
    for _ in range(3):
        one.next()
    save_state(tmp_path, 3, one.state_dict())
    resumed.load_state_dict(latest_state(tmp_path)[1])
    for _ in range(6):
        same(one.next(), resumed.next())


# -- what sources tell ------------------------------------------------------------------------------------------------


class Noting(CurriculumStream):
    """Keeps what it is told."""

    def __init__(self, scenes, spec=SPEC, start=300):
        super().__init__(SeedStream(start, 10**6), OutcomeVariance(scenes=scenes), spec)
        self.told = []

    def note(self, seed, success, family):
        self.told.append((seed, success, family))
        super().note(seed, success, family)


def test_a_window_tells_every_outcome_once():
    known = Noting(20)
    rollout = RolloutSource(Bandit(5), Uniform(), 30, known, torch.Generator()).next()
    seeds, success = rollout.seeds.flatten().tolist(), rollout.success.flatten().tolist()
    assert known.told == [(seed, won, "ab"[seed % 2]) for seed, won in zip(seeds, success, strict=True)]
    assert 0 < sum(success) < len(success) == rollout.info["rollout/episodes"]
    assert rollout.info["rollout/curriculum_draws"] == 5 + len(success)
    assert 0 < rollout.info["rollout/curriculum_score"] <= 0.25 * (5 + len(success))


def test_every_member_is_told_once_and_no_scene_is_in_two_groups():
    known = Noting(20)
    maker = GROUPS.build(Bandit(10), Uniform(), known, torch.Generator())  # some idle at the end
    for _ in range(5):
        known.told.clear()
        rollout = maker.next()
        seeds, success = rollout.seeds[0].tolist(), rollout.success.any(0).tolist()
        assert sorted(known.told) == sorted((s, won, "ab"[s % 2]) for s, won in zip(seeds, success, strict=True))
        assert len(set(seeds)) == GROUPS.groups == rollout.info["rollout/curriculum_draws"]


def test_episodes_whose_simulator_broke_down_do_not_count():
    env = BreakingEnv(2, {seed: 1 for seed in LONG}, 1)
    known = Noting(400, env.spec, 0)
    rollout = RolloutSource(env, Patient(HORIZON), 40, known, torch.Generator()).next()
    assert rollout.info["rollout/truncated_by_worker"] > 0 < rollout.info["rollout/episodes"]
    assert len(known.told) == rollout.info["rollout/episodes"]


class Cut(Bandit):
    """Every scene with an odd number is cut off for a reason that is not the policy's."""

    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        odd = self._seed % 2 == 1
        flags = {"terminated": step.terminated & ~odd, "success": step.success & ~odd}
        cause = np.where(odd, "uncertainty", step.cause).tolist()
        return replace(step, truncated=step.truncated | odd, cause=cause, **flags)


def test_cut_off_episodes_do_not_count_and_slow_ones_do():
    known = Noting(20)
    RolloutSource(Cut(4), Uniform(), 20, known, torch.Generator()).next()
    assert known.told and {seed % 2 for seed, *_ in known.told} == {0}
    assert {won for _, won, _ in known.told} == {False, True}


def test_fewer_groups_are_uniform():
    """A third of the scenes each succeeds never, half the time and always; nothing uniform is replaced here."""

    def share(curriculum):
        config = replace(GROUPS, curriculum=curriculum)
        maker = config.build(Bandit(24), Uniform(), SeedStream(300, 10**6), torch.Generator().manual_seed(3))
        rollouts = [maker.next() for _ in range(40)][20:]
        return sum(rollout.info["rollout/groups_uniform"] for rollout in rollouts) / (20 * GROUPS.groups)

    in_order = (1 + 1 + 2 * 0.5**4) / 3
    assert share(InOrder()) == pytest.approx(in_order, abs=4 * (in_order * (1 - in_order) / 120) ** 0.5)
    assert share(OutcomeVariance(scenes=36)) < 0.7 * in_order
