"""Folders of others run nothing: every command refuses them in one sentence, and no canary appears."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.hostile import CHECKPOINTS, RUNS, changed, checkpoint, code, run
from vla_rl.cli.main import main
from vla_rl.contract import trust
from vla_rl.pretrained import save_own


@pytest.fixture(autouse=True)
def a_user(tmp_path, monkeypatch):
    """Nothing is known of this user yet, who works in a folder that others have written into."""
    home = tmp_path / "work"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_accepted", set())
    monkeypatch.setattr(trust, "_all", [])
    known, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if name.startswith(("theirs", "mine", "vla_rl_config_")):
            del sys.modules[name]


def refused(capsys, *arguments) -> str:
    """The one sentence with which a command ends."""
    with pytest.raises(SystemExit) as end:
        main([str(item) for item in arguments])
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert said.startswith("vla-rl: ") and said.count("\n") == 1, said
    return said


def forget() -> None:
    """As if another program had written what this test made."""
    trust._accepted.clear()
    for mark in trust._marks().glob("*"):
        mark.unlink()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused(name, tmp_path, capsys):
    canary = tmp_path / "canary"
    CHECKPOINTS[name](tmp_path / "theirs", canary)
    forget()
    refused(capsys, "eval", tmp_path / "theirs", "--env", "point_mass", "--episodes", 1, "--num-envs", 1)
    refused(capsys, "inspect", tmp_path / "theirs")
    assert not canary.exists()


@pytest.mark.parametrize("name", RUNS)
def test_a_hostile_run_is_refused(name, tmp_path, capsys):
    canary, folder = tmp_path / "canary", tmp_path / "theirs"
    RUNS[name](folder, canary)
    forget()
    if name not in ("kept file in a note", "kept file as recipe"):  # which are read for --resume only
        refused(capsys, "eval", folder, "--episodes", 1, "--num-envs", 1)
        refused(capsys, "eval", folder / "checkpoints" / "best", "--episodes", 1, "--num-envs", 1)
    refused(capsys, "train", "--resume", folder)
    refused(capsys, "imagine", "play", folder)
    assert not canary.exists()


def test_an_own_run_needs_no_flag_and_an_altered_one_does(tmp_path, capsys):
    canary = tmp_path / "canary"
    code(Path("mine.py"), canary)
    checkpoint(tmp_path / "own")
    changed(tmp_path / "own", policy="mine:X")
    trust.mark_file(tmp_path / "own" / "config.json")
    trust._accepted.clear()
    assert trust.named_class(trust.read_named(tmp_path / "own" / "config.json")["policy"]).__name__ == "X"
    canary.unlink()
    trust._accepted.clear()
    changed(tmp_path / "own", note=1)
    assert "--trust" in refused(capsys, "inspect", tmp_path / "own")
    assert not canary.exists()


def test_trust_is_asked_for_once(tmp_path, capsys):
    canary, folder = tmp_path / "canary", tmp_path / "theirs"
    run(folder, env={"class": "vla_rl.recipes.env_config:EnvConfig", "name": "theirs_beside:make"})
    code(Path("theirs_beside.py"), canary)
    forget()
    assert "'theirs_beside:make'" in refused(capsys, "eval", folder)
    with pytest.raises(SystemExit):  # what their code makes is no environment
        main(["eval", str(folder), "--episodes", "1", "--trust"])
    assert canary.exists()
    trust._all.clear()
    trust._accepted.clear()
    assert trust.read_named(folder / "config.json")["env"]["name"] == "theirs_beside:make"


class Mine:
    """A policy of the user's own, which writes its checkpoint by itself."""

    def save_pretrained(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "config.json").write_text(json.dumps({"contract_version": 2, "policy": "mine:X"}))


def test_a_policy_that_saves_itself_is_the_users_own(tmp_path):
    code(Path("mine.py"), tmp_path / "canary")
    save_own(Mine(), tmp_path / "own")
    trust._accepted.clear()
    assert trust.read_named(tmp_path / "own" / "config.json")["policy"] == "mine:X"


def test_another_module_of_the_same_name_is_not_the_users(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "own"
    run(folder, env={"class": "vla_rl.recipes.env_config:EnvConfig", "name": "mine:make"})
    code(Path("mine.py"), tmp_path / "own canary")
    trust.mark_file(folder / "config.json")
    forgotten = tmp_path / "other"
    code(forgotten / "mine.py", tmp_path / "canary")
    monkeypatch.chdir(forgotten)
    sys.path[:] = [item for item in sys.path if not item.endswith("work")]
    trust._accepted.clear()
    assert "the module 'mine' is not the one" in refused(capsys, "eval", folder)
    assert not (tmp_path / "canary").exists()
    assert json.loads((folder / "config.json").read_text())["seed"] == 1
