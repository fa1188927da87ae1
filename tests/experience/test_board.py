"""Rollouts in a shared folder: whole, the newest, each read once; what is foreign or damaged is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.experience.makers import gaussian
from tests.patience import PATIENCE
from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.wire import framed
from vla_rl.experience.background import saved_rollout
from vla_rl.experience.board import Board, layout
from vla_rl.experience.worker import as_arrays

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def played() -> Rollout:
    return gaussian("point_mass", 2, 3, 2, seed=1).next()


def numbered(rollout: Rollout, *numbers: int) -> list[Rollout]:
    return [replace(rollout, info={"number": float(number)}) for number in numbers]


def numbers(rollouts: list[Rollout]) -> list[int]:
    return [int(rollout.info["number"]) for rollout in rollouts]


def test_a_rollout_arrives_as_it_was(played, tmp_path):
    Board(tmp_path, "same").publish(played)
    (found,) = Board(tmp_path, "same").newest(1)
    here, there = saved_rollout(played), saved_rollout(found)
    assert here.keys() == there.keys() and layout(played) == layout(found)
    for name in ("features", "final_features", "aux"):
        assert all(torch.equal(item, there[name][key]) for key, item in here[name].items())
    for name in ("sample", "logprob", "reward", "valid", "version", "final_index", "seeds", "task"):
        assert torch.equal(here[name], there[name])
    assert found.info["env/steps"] == 12 and found.robot == "point_mass"


def test_the_newest_of_each_learner_come_first_and_none_twice(played, tmp_path):
    one, two, reader = (Board(tmp_path, "same") for _ in range(3))
    for rollout in numbered(played, 11, 12, 13):
        one.publish(rollout)
    for rollout in numbered(played, 21, 22):
        two.publish(rollout)
    assert sorted(numbers(reader.newest(3))) in ([12, 13, 22], [13, 21, 22])
    assert numbers(reader.newest(9)) == [], "what is older than one that was read is never read"
    (late,) = numbered(played, 14)
    one.publish(late)
    reader.publish(played)
    assert numbers(reader.newest(9)) == [14], "and never its own"


def test_learners_take_turns(played, tmp_path):
    boards, reader, order = [Board(tmp_path, "same") for _ in range(3)], Board(tmp_path, "same"), []
    for step in range(6):
        for learner, board in enumerate(boards):
            board.publish(numbered(played, 10 * learner + step)[0])
        order += numbers(reader.newest(1))
    assert [number % 10 for number in order] == [0, 1, 2, 3, 4, 5], "always the newest"
    assert sorted(number // 10 for number in order[:3]) == [0, 1, 2] and order[0] // 10 == order[3] // 10


def test_only_the_newest_are_kept_and_what_a_careless_owner_keeps_is_not_read(played, tmp_path):
    owner = Board(tmp_path, "same", keep=3)
    for rollout in numbered(played, *range(1, 8)):
        owner.publish(rollout)
    assert sorted(int(path.name[13:21]) for path in tmp_path.iterdir()) == [5, 6, 7]
    assert numbers(Board(tmp_path, "same", keep=2).newest(9)) == [7, 6]


def test_a_file_that_its_owner_removes_meanwhile_is_left_out(played, tmp_path):
    owner, reader = Board(tmp_path, "same", keep=9), Board(tmp_path, "same")
    for rollout in numbered(played, 1, 2, 3):
        owner.publish(rollout)
    listed = reader._numbers()
    owner._path(owner.learner, 3).unlink()
    reader._numbers = lambda: listed
    assert numbers(reader.newest(1)) == [2]


def test_a_resumed_learner_is_the_same_and_counts_on(played, tmp_path):
    first, other = Board(tmp_path, "same"), Board(tmp_path, "same")
    other.publish(played)
    first.publish(played)
    assert len(first.newest(1)) == len(other.newest(1)) == 1
    state = first.state_dict()
    first.publish(played)  # after what was saved
    (tmp_path / f"{first.learner}.writing").write_bytes(b"half")
    resumed = Board(tmp_path, "same")
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.newest(9) == [], "what it had read"
    resumed.publish(played)
    assert sorted(resumed._numbers()[first.learner]) == [1, 2, 3]
    assert len(other.newest(9)) == 2 and not list(tmp_path.glob("*.writing"))


def _message(found: Rollout, **changes) -> dict:
    return {"contract_version": CONTRACT_VERSION, "common": "same", "rollout": saved_rollout(found), **changes}


def _without(rollout: Rollout, name: str) -> dict:
    return {key: value for key, value in saved_rollout(rollout).items() if key != name}


DAMAGED = {
    "empty": lambda rollout: b"",
    "cut": lambda rollout: framed(as_arrays(_message(rollout)))[:-9],
    "garbage": lambda rollout: b"something else altogether",
    "incomplete": lambda rollout: framed(as_arrays(_message(rollout, rollout=_without(rollout, "reward")))),
    "ragged": lambda rollout: framed(as_arrays(_message(replace(rollout, valid=rollout.valid[:1])))),
}
STRANGE = {
    "another policy": lambda rollout: framed(as_arrays(_message(rollout, common="other"))),
    "another version": lambda rollout: framed(as_arrays(_message(rollout, contract_version=CONTRACT_VERSION + 1))),
    "another message": lambda rollout: framed({"hello": 1}),
}


@pytest.mark.parametrize("name", [*DAMAGED, *STRANGE])
def test_what_is_damaged_or_strange_is_refused_in_one_sentence(name, played, tmp_path):
    path = tmp_path / "0123456789ab-00000001.rollout"
    path.write_bytes((DAMAGED | STRANGE)[name](played))
    board = Board(tmp_path, "same")
    with pytest.raises(UserError) as caught:
        board.newest(1)
    said = str(caught.value)
    assert path.name in said and said.endswith(".") and said.count(". ") == 0
    assert ("is damaged or no rollout" in said) == (name in DAMAGED)


def test_a_folder_that_cannot_be_used_is_refused(played, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be used .*so no rollout is shared"):
        Board(tmp_path / "file" / "shared", "same")
    board = Board(tmp_path / "gone", "same")
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(UserError, match=r"cannot be used .*so no rollout is shared"):
        board.publish(played)


def test_bfloat16_is_refused_before_anything_is_written(played, tmp_path):
    half = {name: item.bfloat16() for name, item in played.features.items()}
    with pytest.raises(UserError, match="is bfloat16, which a message cannot hold"):
        Board(tmp_path, "same").publish(replace(played, features=half))
    assert not list(tmp_path.iterdir())


def test_entries_that_contradict_each_other_are_refused(played):
    assert layout(played)["features/state"] == "float32[2]" and layout(played)["reward"] == "float32[2]"
    for change in ({"seeds": played.seeds[:, :1]}, {"final_features": {"state": torch.zeros(5, 2)}}):
        with pytest.raises(ContractError, match="does not begin with"):
            layout(replace(played, **change))


@pytest.mark.full
def test_two_processes_read_whole_rollouts_once_and_one_is_killed_in_the_middle_of_a_write(tmp_path):
    folder, steady, dying = tmp_path / "shared", (1, 60, 0), (2, 1000, 25)
    command = [sys.executable, "-m", "tests.experience.sharing_learner", str(folder)]
    processes = [
        subprocess.Popen([*command, *map(str, numbers)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for numbers in (steady, dying)
    ]
    said = [process.communicate(timeout=PATIENCE)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, -9]
    assert len(list(folder.glob("*.writing"))) == 1, "what was being written"
    published, read = ([_said(lines, what) for lines in said] for what in ("published", "read"))
    assert len(published[0]) == 60 and len(published[1]) == 25 and min(map(len, read)) >= 1
    for reader, other in ((0, 1), (1, 0)):
        whole = published[other][: 24 if other else 60]
        assert all(found in whole for found in read[reader]), "none is torn or from nowhere"
        assert len({str(found) for found in read[reader]}) == len(read[reader]), "none is read twice"
    assert len({str(found) for found in published[0]}) == 60


def _said(lines: list[str], what: str) -> list:
    """The counters [T+1,E,2] of the rollouts of which this was said."""
    return [found for kind, found in map(json.loads, lines) if kind == what]
