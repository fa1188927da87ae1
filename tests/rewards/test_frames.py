"""Labelled frames: validation, splits, order and files."""

from __future__ import annotations

import re

import numpy as np
import pytest

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.rewards.frames import LabelledFrames


def frames(episodes: int = 6, length: int = 4) -> LabelledFrames:
    """``length`` moments of each episode under two texts in turn; pixel 0 counts the claims."""
    count = episodes * length * 2
    picture = np.zeros((count, 3, 5, 3), np.uint8)
    picture[:, 0, 0, 0] = np.arange(count)
    text = np.array(["lift it", "push it"] * (count // 2))
    return LabelledFrames(
        {"front": picture}, text, np.arange(count) % 3 == 0, np.repeat(np.arange(episodes), 2 * length)
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"label": np.zeros(48, np.int64)}, "'label'"),
        ({"label": np.zeros(47, bool)}, "'images/front'"),
        ({"text": np.array(["a"] * 47)}, "'text'"),
        ({"text": np.arange(48)}, "'text'"),
        ({"episode": np.zeros(3, np.int64)}, "'episode'"),
        ({"images": {"front": np.zeros((48, 3, 5, 3), np.float32)}}, "'front'"),
        ({"images": {"front": np.zeros((48, 3, 5), np.uint8)}}, "'front'"),
        ({"images": {}}, "there are none"),
    ],
)
def test_the_array_that_does_not_fit_is_named(change, named):
    with pytest.raises(ContractError, match=re.escape(named)):
        LabelledFrames(**{**vars(frames()), **change})


def test_no_frames_are_refused():
    with pytest.raises(ContractError, match="there are none"):
        frames().select(np.zeros(48, bool))


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


def test_too_few_episodes_are_refused():
    with pytest.raises(UserError, match="2 episodes cannot be split into 3 parts"):
        frames(2).split((1, 1, 1), seed=0)


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
