"""Folders of others run nothing: every command refuses them in one sentence, and no canary appears."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from robot_drivers import simulated_process
from robot_drivers.config import Part, RobotConfig
from tests.hostile import changed, checkpoint, code, forget, run
from tests.hostile_cells import KINDS, folder_name
from vla_rl.cli import fleet, imagine, main, robot
from vla_rl.cli import inspect as inspecting
from vla_rl.contract import trust
from vla_rl.pretrained import save_own

main_module, eval_command = (importlib.import_module(name) for name in ("vla_rl.cli", "vla_rl.cli.eval"))


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


TRAIN = ["train", "imitate.py:from_dataset", "--out", "trained"]
QUICK = ["--env", "point_mass", "--episodes", "1", "--num-envs", "1"]
# Every command that takes a folder or a file of somebody, and how it is given; test_no_command_is_forgotten.
COMMANDS: dict[str, list[list[str]]] = {
    "demo": [["--out", "FOLDER", "--env", "nosuch"]],
    "collect": [["--repair", "FOLDER"], ["--env", "point_mass", "--count", "1", "--num-envs", "1", "--out", "FOLDER"]],
    "train": [
        ["--resume", "FOLDER"],
        [*TRAIN[1:], "--dataset", "FOLDER"],
        [*TRAIN[1:], "--policy", "FOLDER"],
        ["imitate.py:from_dataset", "--out", "FOLDER", "--dataset", "FOLDER"],
    ],
    "eval": [
        ["FOLDER", "--episodes", "1", "--num-envs", "1"],
        ["FOLDER/checkpoints/best", *QUICK[2:]],
        ["FOLDER", *QUICK],
    ],
    "eval --suite": [["--suite", "tabletop", "--policy", "FOLDER", "--out", "suite", "--episodes", "1"]],
    "eval --against": [["FOLDER", "--against", "FOLDER"]],
    "eval --power": [["FOLDER", "--power", "0.1"]],
    "eval --parity": [["FOLDER", "--parity", "FOLDER", "--env", "point_mass"]],
    "imagine improve": [["FOLDER"]],
    "imagine agreement": [["FOLDER"]],
    "imagine rank": [["FOLDER", "FOLDER"]],
    "imagine rollout": [["FOLDER"]],
    "imagine play": [["FOLDER", "--port", "0"]],
    "push": [["FOLDER", "somebody/it", "--dry-run"]],
    "serve-policy": [["FOLDER", "--port", "0"]],
    **{f"robot {name}": [["FOLDER"]] for name in ("calibrate", "home", "teleop", "setup")},
    "robot check": [["FOLDER", "--seconds", "0.1"], ["simulated", "--seconds", "0.1", "--policy", "FOLDER"]],
    "robot record": [["FOLDER", "--out", "recorded", "--episodes", "1"]],
    "robot replay": [["simulated", "--dataset", "FOLDER"], ["FOLDER", "--dataset", "FOLDER"]],
    "robot run": [["FOLDER", "--policy", "FOLDER"], ["simulated", "--policy", "FOLDER", "--episodes", "1"]],
    "fleet simulate": [["--policy", "FOLDER", "--demonstrations", "FOLDER"]],
    "fleet export": [["FOLDER"]],
    "fleet versions": [["FOLDER"]],
    "fleet publish": [["FOLDER", "FOLDER"]],
    **{f"fleet {name}": [["FOLDER", "1"]] for name in ("try", "promote", "pin")},
    **{f"fleet {name}": [["FOLDER"]] for name in ("rollback", "unpin")},
    "serve": [
        ["FOLDER", "--port", "0", "--page-port", "0"],
        ["new", "--policy", "FOLDER", "--port", "0", "--page-port", "0"],
    ],
    **{f"certs {name}": [["FOLDER"]] for name in ("server", "list")},
    **{f"certs {name}": [["FOLDER", "arm"]] for name in ("robot", "revoke")},
    "certs init": [["FOLDER"]],
    "inspect": [["FOLDER"], ["FOLDER/checkpoints/best"]],
    **{name: [["--out", "FOLDER", "--processes", "0"]] for name in ("compare", "imagine")},
    "imagine train": [["--out", "FOLDER", "--policy", "nosuch"]],
}
# Those that make their folders, which is theirs to be, of nothing that anybody gave them.
WITHOUT = {"policies", "sims", "sims install", "sims serve", "fleet demo", "fleet", "certs", "robot"}
MADE_FOR = {  # of each kind of folder, the command that is most made for it
    "checkpoint": ("inspect", 0),
    "run": ("eval", 0),
    "dataset": ("train", 1),
    "robot": ("robot check", 0),
    "fleet": ("fleet versions", 0),
    "public": ("serve-policy", 0),
    "trace": ("eval --parity", 0),
    "size": ("inspect", 0),
    "certificates": ("certs list", 0),
    "filled": ("compare", 0),
}
OTHERS = {  # where that does not look
    "run: kept file in a note": ("train", 0),
    "run: kept file as recipe": ("train", 0),
    "size: run's metrics linked": ("train", 0),
    "size: run's lock linked": ("train", 0),
    "size: run's state linked": ("train", 0),
    "dataset: lock linked": ("collect", 0),
    "dataset: commit removes a file outside": ("collect", 0),
    "dataset: commit removes a folder outside": ("collect", 0),
    "fleet: key linked": ("fleet publish", 0),
    "fleet: ledger's segment linked": ("fleet export", 0),
    "checkpoint: remote": ("eval", 2),
    "certificates: no text": ("certs server", 0),
    "filled: metrics.jsonl": ("train", 3),
    "filled: checkpoints": ("demo", 0),
    "filled: authority": ("certs init", 0),
}
SAYS = {  # what else would refuse it later, for another reason
    **{f"filled: {name}": "leads out of its folder" for name in KINDS["filled"]},
    **{f"certificates: {name}": "leads out of its folder" for name in KINDS["certificates"] if "linked" in name},
    "checkpoint: huge pictures": "its arrays have 30,000,000,",
    "checkpoint: huge state": "its arrays have 1,000,000,",
    "dataset: data path out of the dataset": "is no path in the dataset",
    "dataset: absolute data path": "is no path in the dataset",
    "dataset: video is a list of files": "nothing else is opened",
    "dataset: 34 million frames": "of memory",
    "dataset: rows of 300,000 episodes": "of memory",
    "dataset: huge pictures declared": "of memory",
    "dataset: picture of 280 MB that the footer denies": "of memory",
    "dataset: 34 million numbers that the footer denies": "of memory",
    "trace: array of zeros": "of memory",
    "trace: array of 10^14": "cannot be read",
}
MOST_BYTES = 1_000_000_000


@pytest.fixture(scope="module")
def cells():
    """``cells({folder: (command, variant)})``: what each command did with that folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    program = [sys.executable, "-m", "tests.hostile_cells"]
    root = Path(__file__).parents[2]
    with (
        tempfile.TemporaryDirectory(prefix="hostile-") as places,
        subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
        ) as runner,
    ):
        numbers = itertools.count()

        def done(wanted: dict[str, tuple[str, int]]) -> dict[str, dict[str, Any]]:
            place, asked = f"{places}/{next(numbers)}", []
            for folder, (command, variant) in wanted.items():
                words = [word for word in command.split() if not word.startswith("--")] + COMMANDS[command][variant]
                asked.append({"folder": folder, "command": words})
            print(json.dumps({"place": place, "cells": asked}), file=runner.stdin, flush=True)
            answers = json.loads(runner.stdout.readline())
            shutil.rmtree(place, ignore_errors=True)
            return dict(zip(wanted, answers, strict=True))

        yield done
        runner.stdin.close()


def wrong(done: dict[str, Any], statuses: set[int]) -> str:
    """What is wrong with what a command did, "" for nothing."""
    last = (done["said"].strip().splitlines() or [""])[-1]
    if done["did"]:
        return f"it {', '.join(done['did'])}"
    if done["status"] not in statuses or "Traceback" in done["said"] or "VLA_RL_TRACEBACK" in last:
        return f"status {done['status']}: {done['said'][-1500:]}"
    if "\x1b" in done["said"]:
        return "it steers the terminal"
    if done["peak"] > MOST_BYTES:
        return f"{done['peak'] / 1e9:.1f} GB"
    if done["status"] in (1, 2) and not (last.startswith("vla-rl: ") and last.endswith((".", "?"))):
        return f"no sentence: {last}"
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_hostile_is_refused(cells, kind):
    """By the command that is most made for it."""
    folders = [folder_name(kind, name) for name in KINDS[kind]]
    found = cells({folder: OTHERS.get(folder, MADE_FOR[kind]) for folder in folders})
    problems = {name: problem for name, done in found.items() if (problem := wrong(done, {1, 2}))}
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())
    other = {name: done["said"] for name, done in found.items() if SAYS.get(name, "") not in done["said"]}
    assert not other, "\n".join(f"{name}: {said}" for name, said in other.items())


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_hostile_does_harm_under_any_command(cells, command):
    problems = {}
    for variant, kind in itertools.product(range(len(COMMANDS[command])), KINDS):
        found = cells({folder_name(kind, name): (command, variant) for name in KINDS[kind]})
        for folder, done in found.items():
            if problem := wrong(done, {0, 1, 2, 130}):
                problems[f"{folder}, variant {variant}"] = problem
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())


def test_no_command_is_forgotten():
    groups = {"robot": robot.COMMANDS, "imagine": imagine.COMMANDS, "sims": inspecting.COMMANDS}
    groups |= {"certs": fleet.CERTS, "fleet": fleet.COMMANDS}
    inner = {f"{name} {one}" for name, table in groups.items() for one in table}
    inner |= {f"eval {way}" for way in eval_command._WAYS}
    assert set(main_module.COMMANDS) | inner == set(COMMANDS) | WITHOUT


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
    run(folder, env={"class": "EnvConfig", "name": "theirs_beside:make"})
    code(Path("theirs_beside.py"), canary)
    forget()
    assert "'theirs_beside:make'" in refused(capsys, "eval", folder)
    with pytest.raises(SystemExit):  # what their code makes is no environment
        main(["eval", str(folder), "--episodes", "1", "--trust"])
    assert canary.exists()
    trust._all.clear()
    trust._accepted.clear()
    assert trust.read_named(folder / "config.json")["env"]["name"] == "theirs_beside:make"


def test_a_named_environment_stands_for_that_of_a_run(tmp_path, capsys):
    folder = tmp_path / "theirs"
    run(folder, env={"class": "EnvConfig", "name": "theirs_beside:make"})
    code(Path("theirs_beside.py"), tmp_path / "canary")
    forget()
    main(["eval", str(folder), "--env", "point_mass", "--episodes", "1", "--num-envs", "1"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 1
    assert "'theirs_beside:make'" in refused(capsys, "eval", folder, "--env=theirs_beside:make")
    assert not (tmp_path / "canary").exists()


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
    run(folder, env={"class": "EnvConfig", "name": "mine:make"})
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


def arm_file(**driver: Any) -> Path:
    """A robot file of one's own, written by hand, beside a driver of one's own."""
    path = Path("arm.json")
    path.write_text(json.dumps({"driver": driver, "tasks": ["wait"], "seconds": 3}))
    return path


def test_ones_own_driver_is_trusted_once_whatever_the_rest_is(tmp_path, capsys):
    canary = tmp_path / "canary"
    code(Path("mine.py"), canary)
    file = arm_file(name="mine:X", options={})
    assert "names the class 'mine:X'" in refused(capsys, "robot", "calibrate", file) and not canary.exists()
    assert "mine:X made a X" in refused(capsys, "robot", "calibrate", file, "--trust") and canary.exists()
    trust._all.clear()
    trust._accepted.clear()
    file.write_text(json.dumps({**json.loads(file.read_text()), "seconds": 5, "tasks": ["lift"]}))
    assert "mine:X made a X" in refused(capsys, "robot", "calibrate", file)
    arm_file(name="mine:X", options={"path": "elsewhere"})
    assert "names the class 'mine:X'" in refused(capsys, "robot", "calibrate", file)


def test_what_setup_wrote_is_the_users_own():
    RobotConfig(Part("robot_drivers.ur:UR", {"host": "192.0.2.7"})).save(Path("arm.json"))
    trust._accepted.clear()
    assert RobotConfig.load(Path("arm.json")).driver.options["host"] == "192.0.2.7"


@pytest.mark.parametrize("entry", [{"robot": {"env": "theirs_beside:make"}}, {"record": "log.txt"}])
def test_a_simulated_robots_file_of_others_starts_nothing(entry, tmp_path, monkeypatch):
    code(Path("theirs_beside.py"), tmp_path / "canary")
    Path("kept.txt").write_text("kept")
    Path("robot.json").write_text(json.dumps({"address": "kept.txt", **entry}))
    with pytest.raises(SystemExit, match="names an environment or a file"):
        simulated_process.main(["robot.json"])
    Path("robot.json").write_text(json.dumps({"address": "kept.txt"}))
    monkeypatch.setattr(simulated_process, "Hardware", lambda *given: None)
    with pytest.raises(OSError, match="in use"):
        simulated_process.main(["robot.json"])
    assert not (tmp_path / "canary").exists() and Path("kept.txt").read_text() == "kept"
