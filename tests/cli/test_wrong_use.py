"""Every command answers wrong use with one sentence, status 1 or 2, and no traceback.

The table has every command, and every command of commands, of ``vla-rl``; a new one must be entered.  IN is replaced by
things that are not what the command wants, OUT by places where nothing can be written.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_rl.cli import COMMANDS, fleet, imagine, main, robot
from vla_rl.cli import inspect as inspecting

_WITHIN = {
    "certs": fleet.CERTS,
    "fleet": fleet.COMMANDS,
    "imagine": imagine.COMMANDS,
    "policies": ("install",),
    "robot": robot.COMMANDS,
    "sims": inspecting.COMMANDS,
}
USES = {
    "demo": ["--out OUT", "--no-such 1"],
    "collect": ["--env point_mass --count 1 --out OUT", "--repair IN", "--env IN:make", "--env IN"],
    "train": [
        "IN",
        "IN:config",
        "demo.py:last_step --policy IN --out new",
        "imitate.py:from_dataset --dataset IN --out new",
        "imitate.py:from_dataset --dataset IN --policy IN --out new",
        "gym.py:cartpole --out OUT",
        "compare.py:rlpd --policy IN --demonstrations IN --out new",
        "--resume IN",
    ],
    "eval": [
        "IN",
        "IN --env point_mass",
        "IN --against IN",
        "IN --power 0.1",
        "IN --parity IN",
        "--suite tabletop --policy IN --out new",
        "--suite tabletop --policy expert --out OUT",
        "--suite IN --policy expert --out new",
    ],
    "compare": [f"{name}--config IN" for name in ("", "samplers ", "imagination ")] + ["--out OUT --config IN"],
    "serve-policy": ["IN", "IN --env point_mass", "IN --layout IN"],
    "push": ["IN somebody/policy --dry-run", "IN IN --dry-run"],
    "serve": [
        "new --policy IN --port 0 --page-port 0",
        "new --learn fleet.py:learn_residual --policy IN --port 0 --page-port 0",
        "/dev/null/below --port 0 --page-port 0",
        "new --learn IN",
    ],
    "inspect": ["IN", "IN --env.options {}", "demo.py:demo --policy IN"],
    "certs init": ["file", "/dev/null/below"],
    "certs server": ["IN"],
    "certs robot": ["IN left"],
    "certs revoke": ["IN left"],
    "certs list": ["IN"],
    "fleet simulate": ["IN", "fleet.py:hg_dagger --policy IN --out new", "fleet.py:hg_dagger --out OUT"],
    "fleet demo": ["IN", "--out OUT"],
    "fleet export": ["IN", "IN --out OUT"],
    "fleet versions": ["IN"],
    "fleet publish": ["IN IN", "new IN"],
    "fleet try": ["IN 1"],
    "fleet promote": ["IN 1"],
    "fleet rollback": ["IN"],
    "fleet pin": ["IN 1"],
    "fleet unpin": ["IN"],
    "imagine train": ["IN", "imagine.py:lift --out OUT --policy IN", "imagine.py:lift --policy IN --out new"],
    "imagine improve": ["IN"],
    "imagine agreement": ["IN"],
    "imagine rank": ["IN IN IN"],
    "imagine rollout": ["IN"],
    "imagine play": ["IN"],
    "robot setup": ["OUT"],
    "robot calibrate": ["IN"],
    "robot check": ["IN", "simulated --seconds 0.1 --policy IN"],
    "robot home": ["IN"],
    "robot teleop": ["IN"],
    "robot record": ["IN", "simulated --policy IN --out new", "simulated --policy expert --episodes 1 --out OUT"],
    "robot replay": ["IN", "simulated --dataset IN"],
    "robot run": ["IN --policy expert", "simulated --policy IN", "IN --policy IN", "simulated --server IN"],
    "policies install": ["IN"],
    "sims install": ["IN"],
    "sims serve": ["IN"],
}
IN = ("nested", "missing", "file", "empty", "dataset")
OUT = ("file", ".", "/dev/null/below")


def test_the_table_has_every_command():
    within = {f"{name} {inner}" for name, table in _WITHIN.items() for inner in table}
    assert set(USES) == (set(COMMANDS) - set(_WITHIN)) | within


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """What IN is replaced by."""
    folder = tmp_path_factory.mktemp("things")
    (folder / "file").write_text("neither JSON nor Python: {")
    (folder / "empty").mkdir()
    (folder / "nested").mkdir()
    (folder / "nested/config.json").write_text('{"a":' * 3000 + "1" + "}" * 3000)
    (folder / "dataset/meta").mkdir(parents=True)
    (folder / "dataset/meta/info.json").write_text(json.dumps({"codebase_version": "v3.0"}))
    return folder


def _uses():
    """Every use with everything that IN or OUT may be; only the first of each in the gate."""
    for command, templates in USES.items():
        for template in templates:
            name, values = ("OUT", OUT) if "OUT" in template else ("IN", IN) if "IN" in template else ("", ("",))
            for number, value in enumerate(values):
                marks = [pytest.mark.full] if number else []
                words = " ".join((command, template, value)).replace(str(Path.cwd()), "")
                yield pytest.param(command, template, name, value, marks=marks, id=words)


@pytest.mark.parametrize(("command", "template", "name", "value"), list(_uses()))
def test_it_is_refused_in_one_sentence(command, template, name, value, things, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    path = str(things / value) if name == "IN" else value
    arguments = [path + word[len(name) :] if name and word.startswith(name) else word for word in template.split()]
    with pytest.raises(SystemExit) as end:
        main([*command.split(), *arguments])
    said = capsys.readouterr().err
    assert end.value.code in (1, 2), said
    last = said.strip().splitlines()[-1]
    assert last.startswith("vla-rl: ") and "Traceback" not in said and "VLA_RL_TRACEBACK" not in last, said


def test_the_working_folder_is_no_run_folder(tmp_path, monkeypatch, complaint):
    monkeypatch.chdir(tmp_path)
    assert "'.' is the working folder" in complaint("train", "gym.py:cartpole", "--out", ".")
    assert not list(tmp_path.iterdir())


def test_an_earlier_run_that_has_its_name_again_is_said_to(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["train", "demo.py:last_step", "--policy", str(tmp_path / "none"), "--out", str(tmp_path / "run")])
    assert (tmp_path / "run/config.json").read_text() == "{}" and not (tmp_path / "run.1").exists()
    assert "nothing was recorded, so the earlier run is in" in " ".join(capsys.readouterr().err.split())


def test_a_dataset_that_cannot_be_recorded_anew_keeps_its_name(tmp_path, complaint):
    (tmp_path / "data/meta").mkdir(parents=True)
    assert "declares no scripted expert" in complaint("collect", "--env", "gym", "--out", tmp_path / "data")
    assert (tmp_path / "data/meta").is_dir()


def test_a_dataset_is_told_from_a_checkpoint(tmp_path, capsys, complaint):
    meta = tmp_path / ("longer than a line of text, " * 4) / "meta"
    meta.mkdir(parents=True)
    (meta / "info.json").write_text('{"codebase_version": "v3.0", "features": {"action": {}}}')
    main(["inspect", str(meta.parent)])
    assert f"{meta.parent}: a dataset" in capsys.readouterr().out
    assert "has no config.json" in complaint("eval", meta.parent, "--env", "point_mass")
