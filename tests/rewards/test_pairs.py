"""Pairs of frames: how much progress lies between them, and how they are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.rewards.frames import LabelledFrames, PairSampler, episode_progress


@pytest.mark.parametrize(
    ("label", "progress"),
    [
        ("00001", [0, 1 / 4, 2 / 4, 3 / 4, 1]),
        ("001111", [0, 1 / 2, 1, 1, 1, 1]),
        ("0110001", [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1]),  # done in passing, and undone
        ("111", [0, 1, 1]),  # it starts at its end; the smallest work is one frame
        ("00110", [0, 0, 0, 0, 0]),
        ("0", [0]),
    ],
)
def test_progress_of_an_episode_by_hand(label, progress):
    found = episode_progress(np.array([c == "1" for c in label]))
    np.testing.assert_allclose(found, progress, rtol=1e-6)
    assert found.dtype == np.float32


def episodes() -> LabelledFrames:
    """Two that end in success (20 and 30 frames), one that does not (25), their frames in a jumble; pixel 0 counts."""
    episode = np.repeat([0, 1, 2], [20, 30, 25])
    label = np.concatenate([np.arange(20) >= 18, np.arange(30) >= 25, np.zeros(25, bool)])
    picture = np.zeros((75, 1, 1, 3), np.uint8)
    picture[:, 0, 0, 0] = np.arange(75)
    frames = LabelledFrames({"front": picture}, np.array(["lift it"] * 75), label, episode)
    # Episodes may be interleaved (as those of a VecEnv are); only the order within each matters.
    return frames.select(np.argsort(np.concatenate([np.arange(20), np.arange(30), np.arange(25)]), kind="stable"))


def drawn(near: int, count: int = 4000):
    pairs = PairSampler(episodes(), near, np.random.default_rng(0)).draw(count)
    return pairs, *(side.images["front"][:, 0, 0, 0].astype(int) for side in (pairs.first, pairs.second))


def test_a_pair_is_of_one_episode_in_either_order_with_its_progress():
    pairs, first, second = drawn(near=3)
    assert np.array_equal(pairs.first.episode, pairs.second.episode)
    want = np.concatenate([np.minimum(np.arange(20) / 18, 1), np.minimum(np.arange(30) / 25, 1), np.zeros(25)])
    np.testing.assert_allclose(pairs.before, want[first], rtol=1e-6)
    np.testing.assert_allclose(pairs.after, want[second], rtol=1e-6)
    assert np.array_equal(pairs.second.label, np.isin(second, [18, 19, *range(45, 50)]))
    assert 0.41 < (first < second).mean() < 0.5 and 0.41 < (first > second).mean() < 0.5
    assert set(first.tolist()) == set(second.tolist()) == set(range(75))


def test_half_of_the_pairs_are_of_successes_and_half_are_near():
    pairs, first, second = drawn(near=3)
    assert (pairs.first.episode < 2).mean() == 0.5
    # Those of the other half are near by chance: at most 7 of 20.
    assert 0.5 < (abs(first - second) <= 3).mean() < 0.5 + 0.5 * 0.35
    assert abs(first - second).max() > 20


def test_batches_differ_and_follow_from_the_generator():
    def sampled(seed: int):
        batches = PairSampler(episodes(), 3, np.random.default_rng(seed)).batches(8)
        return [next(batches).first.images["front"][:, 0, 0, 0].tolist() for _ in range(3)]

    assert sampled(1) == sampled(1) != sampled(2) and sampled(1)[0] != sampled(1)[1]


def test_without_failures_all_are_successes_and_without_successes_there_is_nothing():
    frames = episodes()
    pairs = PairSampler(frames.select(frames.episode < 2), 3, np.random.default_rng(0)).draw(10)
    assert (pairs.first.episode < 2).all()
    with pytest.raises(UserError, match="none of the 1 episodes ends in success"):
        PairSampler(frames.select(frames.episode == 2), 3, np.random.default_rng(0))
