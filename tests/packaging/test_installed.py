"""The wheel in environments that hold nothing else, made by pip as a user would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.packaging.wheels import ROOT, build_wheel, find_python, install, light_modules, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PINS = ("-c", ROOT / "constraints.txt")
OLDEST = ("numpy==1.26.0", "msgpack==1.0.0", "tyro==0.9.1", "rich==13.0.0")
# Each command is a stage of the demo, cut down to seconds.
IMITATE = """train demo.py:imitate --out runs/imitate --grounding.scenes 64 --grounding.fit.steps 4
--imitation.demonstrations 4 --imitation.fit.steps 4 --evaluation.validation 4 --evaluation.num-envs 4"""
IMPROVE = """train demo.py:last_step --out runs/better --policy runs/imitate/checkpoints/imitation
--rl.experience.num-envs 4 --rl.loop.iterations 2 --rl.loop.validate-every 1
--evaluation.validation 4 --evaluation.test 4 --evaluation.num-envs 4"""
EVALUATE = "eval runs/better/checkpoints/best --episodes 4 --num-envs 4 --out evaluation.json"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_with_two_extras_it_trains_outside_the_checkout(wheel, tmp_path):
    bin = install(tmp_path / "venv", sys.executable, *PINS, f"{wheel}[train,mujoco]")
    away = tmp_path / "away"
    away.mkdir()
    commands = ("inspect", "inspect lift", IMITATE, IMPROVE, EVALUATE, "inspect runs/better/checkpoints/best")
    said = [run(bin / "vla-rl", *command.split(), cwd=away) for command in commands]
    assert "pip install 'vla-rl[report]'" in said[0] and "pip install 'vla-rl[train]'" not in said[0]
    assert "continues bit for bit" in said[1] and "log-prob gap" in said[-1]
    lines = [json.loads(line) for line in (away / "runs/better/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["stage"] == "rl"][-1] == 2
    assert json.loads((away / "evaluation.json").read_text())["episodes"] == 4
    assert "vla-rl" not in run(bin / "python", "-m", "pip", "check") and not list(away.glob("*.py"))


@pytest.mark.parametrize("version", ["3.11", "3.12"])
@pytest.mark.parametrize("others", [PINS, OLDEST], ids=["pinned", "oldest"])
def test_base_dependencies_are_enough_on(version, others, wheel, tmp_path):
    python = find_python(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version}, so nothing was shown about it; install it to run this test")
    bin = install(tmp_path / "venv", python, *others, wheel)
    modules = light_modules(wheel)
    code = f"import sys, {', '.join(modules)}\nprint('%d.%d' % sys.version_info[:2], robot_drivers.__file__)"
    said = run(bin / "python", "-c", code, cwd=tmp_path)
    assert said.startswith(f"{version} {tmp_path}")
    shown = run(bin / "vla-rl", "inspect", cwd=tmp_path)
    assert "not installed: pip install 'vla-rl[train]'" in shown
    assert "continues bit for bit" in run(bin / "vla-rl", "inspect", "counting", cwd=tmp_path)
