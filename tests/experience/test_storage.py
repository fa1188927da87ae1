"""A replay in files: equal to one in memory, readable by the next process, never misread."""

from __future__ import annotations

import json

import pytest
import torch

from tests.experience.replays import GAMMA, audit, filled, of_ended_episodes, source
from tests.experience.test_replay import line, same
from tests.toys import seeded
from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.errors import UserError
from vla_rl.experience.replay import InMemory, OnDisk, Replay
from vla_rl.training.checkpoint import latest_state, save_state


def on_disk(folder, capacity=60, gamma=GAMMA, n_step=3):
    return Replay(capacity, gamma, n_step, OnDisk(folder))


def test_on_the_disk_equals_in_memory_and_outlives_the_process(tmp_path):
    """The ring has wrapped; another number of steps may use the same decisions."""
    one, two = filled(Replay(60, GAMMA, 3, InMemory())), filled(on_disk(tmp_path))
    reopened, farther = on_disk(tmp_path), on_disk(tmp_path, n_step=5)
    for replay in (two, reopened):
        assert len(replay) == len(one) > 30 and replay.columns.keys() == one.columns.keys()
        assert all(torch.equal(item, replay.columns[name]) for name, item in one.columns.items())
        assert same(one.sample(64, seeded(1)), replay.sample(64, seeded(1)))
    audit(farther.transitions(of_ended_episodes(farther)), 4, 5)
    for replay in (one, reopened):
        filled(replay, windows=1)
    assert all(torch.equal(item, reopened.columns[name]) for name, item in one.columns.items())


def test_a_resumed_run_has_what_is_on_the_disk_and_its_running_episodes(tmp_path):
    windows = [window for maker in [source()] for window in (maker.next() for _ in range(4))]
    one, two = Replay(60, GAMMA, 3), on_disk(tmp_path / "replay")
    for window in windows[:2]:
        one.add(window), two.add(window)
    save_state(tmp_path / "state", 1, {"replay": two.state_dict()})
    assert not two.state_dict()["columns"] and two.state_dict()["running"]
    resumed = on_disk(tmp_path / "replay")
    resumed.load_state_dict(latest_state(tmp_path / "state")[1]["replay"])
    for window in windows[2:]:
        assert one.add(window) == resumed.add(window)
    assert same(one.sample(64, seeded(1)), resumed.sample(64, seeded(1)))


def test_the_next_process_knows_the_robots(tmp_path):
    first = on_disk(tmp_path)
    for robot in ("left", "right"):
        first.add(line([1.0, 1.0], robot=robot, stream=robot))
    second = on_disk(tmp_path)
    second.add(line([1.0], robot="right", stream="right"))
    found = second.transitions(second.decisions())
    assert [second.robots[i] for i in found.robot] == ["left", "left", "right", "right", "right"]


def test_other_numbers_are_refused(tmp_path, monkeypatch):
    filled(on_disk(tmp_path))
    with pytest.raises(UserError, match=r"made with gamma 0\.9 but this is 0\.5, so its decisions would be misread"):
        on_disk(tmp_path, gamma=0.5)
    with pytest.raises(UserError, match="made with capacity 60 but this is 61"):
        on_disk(tmp_path, 61)
    monkeypatch.setattr("vla_rl.experience.replay.CONTRACT_VERSION", CONTRACT_VERSION + 1)
    with pytest.raises(UserError, match=f"made with contract_version {CONTRACT_VERSION} but this is"):
        on_disk(tmp_path)


def test_damage_is_named(tmp_path):
    filled(on_disk(tmp_path))
    path, meta = tmp_path / "reward.bin", (tmp_path / "replay.json").read_text()
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=r"reward\.bin' has 236 bytes where 240 are needed"):
        on_disk(tmp_path)
    path.write_bytes(whole)
    wrong = json.loads(meta)
    wrong["columns"]["reward"] = [[], "float33"]
    for text in (meta[:-9], "[]", json.dumps(wrong), json.dumps({"capacity": 60})):
        (tmp_path / "replay.json").write_text(text)
        with pytest.raises(UserError, match=r"replay\.json' is damaged .*delete the folder"):
            on_disk(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be used .* so nothing was kept"):
        filled(on_disk(tmp_path / "file" / "replay"))


@pytest.mark.parametrize("written", range(0, 10, 3))
def test_killed_inside_a_write_there_are_only_whole_decisions(tmp_path, written):
    """The decisions that were being overwritten are gone, the new ones are missing; all others are untouched."""

    class Killed(BaseException):
        pass

    class Dying(dict):
        """Columns of which only so many can still be written."""

        left = 1 + written

        def __getitem__(self, name):
            if self.left == 0:
                raise Killed
            self.left -= 1
            return super().__getitem__(name)

    replay = on_disk(tmp_path, 9, 1.0, 1)
    for number in (0, 10):
        replay.add(line([1.0, 2.0, 3.0], number))
    replay.columns = Dying(replay.columns)
    replay._require_fit = lambda columns: None
    with pytest.raises(Killed):
        replay.add(line([7.0, 8.0, 9.0], 20))
    resumed = on_disk(tmp_path, 9, 1.0, 1)
    found = resumed.transitions(resumed.decisions())
    whole = {number + i: start + i for number, start in ((0, 1.0), (10, 1.0)) for i in range(3)}
    kept = dict(zip(found.features["id"].tolist(), found.reward.tolist(), strict=True))
    assert kept.items() <= whole.items() and kept.keys() == {10, 11, 12}
    resumed.add(line([7.0, 8.0, 9.0], 20))
    assert set(resumed.transitions(resumed.decisions()).features["id"].tolist()) == {10, 11, 12, 20, 21, 22}
