"""Recorded episodes: complete, in order, only successes, cut into chunks inside their episode, kept on disk."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from sims.catalog import make
from sims.toy.counting import episode_length, expected_reward
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.collect import collect_demonstrations, iter_demonstrations
from vla_rl.experience.datasets import Recording, load_demonstrations, save_demonstrations, stream_demonstrations
from vla_rl.experience.demonstrations import Demonstrations


def count(obs):
    """An expert that says which step it takes: [E,1,2]."""
    return np.stack([obs.time + 1, obs.state[:, 0]], -1)[:, None].astype(np.float32)


@pytest.fixture(scope="module")
def episodes():
    env = make("counting", num_envs=3)
    return collect_demonstrations(env, count, list(range(100, 108)))


def test_successes_are_recorded_once_complete_and_in_order(episodes):
    seeds = [100, 102, 104, 106]  # odd seeds are truncated without success
    lengths = episode_length(np.array(seeds))
    assert episodes.count == 4 and len(episodes.state) == lengths.sum()
    assert episodes.seed.tolist() == np.repeat(seeds, lengths).tolist()
    assert episodes.episode.tolist() == np.repeat(np.arange(4), lengths).tolist()
    assert episodes.time.tolist() == [step for n in lengths for step in range(n)]


def test_an_action_is_paired_with_the_observation_before_it(episodes):
    assert np.array_equal(episodes.action[:, 0], episodes.time + 1)
    assert np.array_equal(episodes.action[:, 1], episodes.seed) and np.array_equal(episodes.state[:, 0], episodes.seed)
    assert np.array_equal(episodes.state[:, 1], episodes.time)
    assert np.array_equal(episodes.images["audit"][:, 0, 0, 0], episodes.time)
    assert np.array_equal(episodes.task, episodes.seed % 2)


def test_a_chunk_ends_with_its_episode(episodes):
    chunks, shown = episodes.chunks(5)
    length = np.bincount(episodes.episode)[episodes.episode]
    expected = np.minimum(episodes.time[:, None] + 1 + np.arange(5), length[:, None])
    assert np.array_equal(chunks[..., 0], expected)
    assert np.array_equal(chunks[..., 1], np.repeat(episodes.seed[:, None], 5, 1))
    assert np.array_equal(shown, episodes.time[:, None] + 1 + np.arange(5) <= length[:, None])
    assert np.array_equal(episodes.chunks(1)[0][:, 0], episodes.action) and episodes.chunks(1)[1].all()


def test_names_units_and_flags_are_recorded_too(episodes):
    assert episodes.tasks == ("count the even episode", "count the odd episode") and episodes.fps == 10
    assert episodes.state_names == ("seed", "steps", "length", "echo") and episodes.action_names == ("steps", "seed")
    ends = np.diff(episodes.episode, append=99) > 0
    assert np.array_equal(episodes.extras["next.done"], ends) and np.array_equal(episodes.extras["next.success"], ends)
    assert np.array_equal(episodes.extras["next.reward"], expected_reward(episodes.time + 1))


def same(one: Demonstrations, other: Demonstrations) -> bool:
    arrays = [{**vars(item), **item.images, **item.extras, "images": 0, "extras": 0} for item in (one, other)]
    return arrays[0].keys() == arrays[1].keys() and all(
        np.array_equal(value, arrays[1][name]) and np.asarray(value).dtype == np.asarray(arrays[1][name]).dtype
        for name, value in arrays[0].items()
    )


def test_saved_episodes_come_back(episodes, tmp_path):
    path = tmp_path / "deep" / "demos"
    save_demonstrations(episodes, path)
    assert [item.name for item in path.parent.iterdir()] == ["demos"]
    assert same(load_demonstrations(path), episodes)
    assert same(
        load_demonstrations(path, [2, 0]), Demonstrations.joined([list(stream_demonstrations(path))[i] for i in (2, 0)])
    )


def test_episodes_one_at_a_time_are_the_same_and_keep_their_numbers(episodes, tmp_path):
    save_demonstrations(episodes, tmp_path / "demos")
    parts = list(stream_demonstrations(tmp_path / "demos"))
    assert [set(part.episode) for part in parts] == [{0}, {1}, {2}, {3}] and same(
        Demonstrations.joined(parts), episodes
    )


def test_joined_episodes_share_a_table_of_tasks_and_are_renumbered(episodes):
    other = replace(episodes, tasks=("something else", "count the even episode"), task=episodes.task + 1)
    both = Demonstrations.joined([episodes, other])
    assert both.tasks == ("count the even episode", "count the odd episode", "something else")
    assert both.count == 8 and np.array_equal(both.chunks(3)[0][: len(episodes.state)], episodes.chunks(3)[0])
    assert np.array_equal(both.task, np.concatenate([episodes.task, episodes.task]))
    with pytest.raises(ContractError, match=r"with \['audit'\] cannot be joined"):
        Demonstrations.joined([episodes, replace(episodes, extras={})])


def test_tasks_are_renumbered_in_another_table(episodes):
    table = ("count sheep", "count the odd episode", "count the even episode")
    assert set(episodes.with_tasks(table).task) == {2} and episodes.with_tasks(table).tasks == table
    with pytest.raises(ContractError, match=r"'count the even episode', which is not in the table.*did you mean"):
        episodes.with_tasks(("count the odd episode",))


def test_a_folder_without_a_dataset_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"has no meta/info\.json, so it holds no readable episodes"):
        load_demonstrations(tmp_path / "nothing")


def test_an_earlier_dataset_is_moved_aside_and_other_things_are_left_alone(episodes, tmp_path):
    for _ in range(3):
        save_demonstrations(episodes, tmp_path / "demos")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["demos", "demos.1", "demos.2"]
    assert same(load_demonstrations(tmp_path / "demos.1"), episodes)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    with pytest.raises(UserError, match="is no dataset, so it was left alone"):
        save_demonstrations(episodes, tmp_path / "thesis")
    assert [item.name for item in (tmp_path / "thesis").iterdir()] == ["chapter"]
    assert not list(tmp_path.glob("*.writing"))


def test_a_write_that_fails_changes_nothing(episodes, tmp_path, monkeypatch):
    path = tmp_path / "demos"
    save_demonstrations(episodes, path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(UserError, match="no space left"):
        save_demonstrations(episodes, path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert [item.name for item in tmp_path.iterdir()] == ["demos"]


def test_a_recording_that_stops_keeps_what_was_added(episodes, tmp_path):
    parts = list_of_episodes(episodes)
    with pytest.raises(ZeroDivisionError), Recording(tmp_path / "demos") as kept:
        kept.add(parts[0])
        kept.add(parts[1])
        raise ZeroDivisionError
    assert same(load_demonstrations(tmp_path / "demos"), Demonstrations.joined(parts[:2]))
    with Recording(tmp_path / "demos") as kept:
        kept.add(parts[2])
    assert same(load_demonstrations(tmp_path / "demos"), Demonstrations.joined(parts[:3]))
    assert not (tmp_path / "demos" / "recording").exists()


def list_of_episodes(episodes: Demonstrations) -> list[Demonstrations]:
    return list(iter_demonstrations(make("counting", num_envs=3), count, sorted(set(episodes.seed.tolist()))))


def test_an_episode_that_a_dataset_cannot_hold_is_refused(episodes, tmp_path):
    with pytest.raises(ContractError, match="does not count 0, 1, 2"):
        save_demonstrations(replace(episodes, time=episodes.time + 1), tmp_path / "demos")
    with pytest.raises(ContractError, match="two tasks have the same text"):
        save_demonstrations(replace(episodes, tasks=("count", "count")), tmp_path / "demos")
    assert not list(tmp_path.iterdir())


def test_recording_needs_no_dataset_libraries_until_it_writes():
    code = "import sys, vla_rl.experience.demonstrations; assert not {'pyarrow', 'av'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_the_dataset_libraries_the_error_names_the_extra(episodes, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("vla_rl.experience.lerobot")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pyarrow is not installed.*pip install 'vla-rl\[data\]'"):
        save_demonstrations(episodes, tmp_path / "demos")


def test_an_expert_that_never_succeeds_is_named():
    with pytest.raises(UserError, match="none of 2 demonstrations"):
        collect_demonstrations(make("counting", num_envs=2), count, [101, 103])
