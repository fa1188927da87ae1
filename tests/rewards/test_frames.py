"""Labelled frames: validation, splits, order and files."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.contract.errors import UserError
from vla_rl.rewards.frames import LabelledFrames, PairSampler, episode_progress


def frames(episodes: int = 6, length: int = 4) -> LabelledFrames:
    """``length`` moments of each episode under two texts in turn; pixel 0 counts the claims."""
    count = episodes * length * 2
    picture = np.zeros((count, 3, 5, 3), np.uint8)
    picture[:, 0, 0, 0] = np.arange(count)
    text = np.array(["lift it", "push it"] * (count // 2))
    return LabelledFrames(
        {"front": picture}, text, np.arange(count) % 3 == 0, np.repeat(np.arange(episodes), 2 * length)
    )


@pytest.mark.parametrize("shares", [(4, 1, 1), (400, 128, 256), (1000, 1, 1), (1, 1, 1000)])
def test_parts_consist_of_whole_episodes_and_lose_none(shares):
    whole = frames()
    parts = whole.split(shares, seed=3)
    held = [set(part.episode.tolist()) for part in parts]
    assert all(held) and not any(held[i] & held[j] for i in range(3) for j in range(i))
    assert set().union(*held) == set(range(6)) and sum(map(len, parts)) == len(whole)
    loaded = np.concatenate([part.images["front"][:, 0, 0, 0] for part in parts])
    assert sorted(loaded.tolist()) == list(range(48))


def test_shares_are_kept_and_the_seed_chooses():
    sizes = [len(np.unique(part.episode)) for part in frames(12).split((2, 1, 1), seed=0)]
    assert sizes == [6, 3, 3]
    drawn = {tuple(np.unique(frames(12).split((2, 1, 1), seed)[0].episode)) for seed in range(5)}
    assert len(drawn) > 1


def test_a_track_is_one_episode_under_one_text_in_order():
    tracks = frames(2, 3).tracks()
    assert [(int(t.episode[0]), str(t.text[0])) for t in tracks] == [
        (0, "lift it"),
        (0, "push it"),
        (1, "lift it"),
        (1, "push it"),
    ]
    assert [t.images["front"][:, 0, 0, 0].tolist() for t in tracks] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]


def test_saving_and_loading_restores_them(tmp_path):
    saved = frames()
    saved.save(tmp_path / "deep" / "frames.npz")
    loaded = LabelledFrames.load(tmp_path / "deep" / "frames.npz")
    for name in ("text", "label", "episode"):
        assert np.array_equal(getattr(loaded, name), getattr(saved, name))
    assert np.array_equal(loaded.images["front"], saved.images["front"]) and loaded.images.keys() == saved.images.keys()
    assert [item.name for item in (tmp_path / "deep").iterdir()] == ["frames.npz"]


def test_a_missing_damaged_or_partial_file_is_named(tmp_path):
    path = tmp_path / "frames.npz"
    with pytest.raises(UserError, match=r"frames\.npz' holds no readable"):
        LabelledFrames.load(path)
    frames().save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"frames\.npz' holds no readable"):
        LabelledFrames.load(path)
    np.savez(path, text=np.array(["a"]), label=np.array([True]))
    with pytest.raises(UserError, match="episode"):
        LabelledFrames.load(path)
    np.savez(path, text=np.array(["a"], dtype=object), label=np.array([True]), episode=np.array([1]))
    with pytest.raises(UserError, match="allow_pickle"):
        LabelledFrames.load(path)


def test_a_write_that_fails_leaves_the_file_before_it(tmp_path, monkeypatch):
    path = tmp_path / "frames.npz"
    frames(3).save(path)

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(UserError, match="could not be written"):
        frames(6).save(path)
    assert len(LabelledFrames.load(path)) == 24 and [item.name for item in tmp_path.iterdir()] == ["frames.npz"]


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


def test_a_pair_is_of_one_episode_with_its_progress():
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


def test_without_failures_all_are_successes():
    frames = episodes()
    pairs = PairSampler(frames.select(frames.episode < 2), 3, np.random.default_rng(0)).draw(10)
    assert (pairs.first.episode < 2).all()
    with pytest.raises(UserError, match="none of the 1 episodes ends in success"):
        PairSampler(frames.select(frames.episode == 2), 3, np.random.default_rng(0))
