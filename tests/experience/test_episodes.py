"""Recorded episodes: complete, in order, only successes, cut into chunks inside their episode, kept on disk."""

from __future__ import annotations

import numpy as np
import pytest

from sims.catalog import make
from sims.toy.counting import episode_length
from vla_rl.contract.errors import UserError
from vla_rl.experience.episodes import Episodes, record


def count(obs):
    """An expert that says which step it takes: [E,1,2]."""
    return np.stack([obs.time + 1, obs.state[:, 0]], -1)[:, None].astype(np.float32)


@pytest.fixture(scope="module")
def episodes():
    env = make("counting", num_envs=3)
    return record(env, count, list(range(100, 108)))


def test_successes_are_recorded_once_complete_and_in_order(episodes):
    seeds = [100, 102, 104, 106]  # odd seeds are truncated without success
    lengths = episode_length(np.array(seeds))
    assert episodes.count == 4 and len(episodes.state) == lengths.sum()
    assert episodes.seed.tolist() == np.repeat(seeds, lengths).tolist()
    assert episodes.episode.tolist() == np.repeat(np.arange(4), lengths).tolist()
    assert episodes.time.tolist() == [step for n in lengths for step in range(n)]


def test_an_action_belongs_to_the_observation_it_was_chosen_on(episodes):
    assert np.array_equal(episodes.action[:, 0], episodes.time + 1)
    assert np.array_equal(episodes.action[:, 1], episodes.seed) and np.array_equal(episodes.state[:, 0], episodes.seed)
    assert np.array_equal(episodes.state[:, 1], episodes.time)
    assert np.array_equal(episodes.images["audit"][:, 0, 0, 0], episodes.time)
    assert np.array_equal(episodes.task, episodes.seed % 2)


def test_a_chunk_ends_with_its_episode(episodes):
    chunks = episodes.chunks(5)
    length = np.bincount(episodes.episode)[episodes.episode]
    expected = np.minimum(episodes.time[:, None] + 1 + np.arange(5), length[:, None])
    assert np.array_equal(chunks[..., 0], expected)
    assert np.array_equal(chunks[..., 1], np.repeat(episodes.seed[:, None], 5, 1))
    assert np.array_equal(episodes.chunks(1)[:, 0], episodes.action)


def test_saved_episodes_come_back(episodes, tmp_path):
    path = tmp_path / "deep" / "demos.npz"
    episodes.save(path)
    again = Episodes.load(path)
    assert [item.name for item in path.parent.iterdir()] == ["demos.npz"]
    for name in ("state", "task", "time", "action", "episode", "seed"):
        kept, read = getattr(episodes, name), getattr(again, name)
        assert kept.dtype == read.dtype and np.array_equal(kept, read)
    assert np.array_equal(again.images["audit"], episodes.images["audit"]) and len(again.images) == 1


def test_what_cannot_be_read_is_said_in_one_sentence(episodes, tmp_path):
    path = tmp_path / "demos.npz"
    with pytest.raises(UserError, match="no readable episodes"):
        Episodes.load(path)
    episodes.save(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 0xFF
    for damaged in (b"", b"not a zip file", whole[: len(whole) // 2], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="no readable episodes"):
            Episodes.load(path)


def test_a_write_that_fails_changes_nothing(episodes, tmp_path, monkeypatch):
    path = tmp_path / "demos.npz"
    episodes.save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(UserError, match="no space left"):
        episodes.save(path)
    assert path.read_bytes() == before and [item.name for item in tmp_path.iterdir()] == ["demos.npz"]


def test_an_expert_that_never_succeeds_is_named():
    with pytest.raises(UserError, match="none of 2 demonstrations"):
        record(make("counting", num_envs=2), count, [101, 103])
