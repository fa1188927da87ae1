"""The pages about what is one's own are followed to the letter, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT
from tests.patience import PATIENCE

# Numbers that stand in a page are made smaller; nothing is added to its commands.
SMALL = {
    "--count": "4",
    "--imitation.fit.steps": "2",
    "--rl.loop.iterations": "1",
    "--rl.loop.env-steps": "600",
}
_RUN = """
import runpy, shlex, sys
from vla_rl.cli import main
for given in sys.argv[1:]:
    if given.startswith("vla-rl "):
        main(shlex.split(given)[1:])
    elif given.startswith("python "):
        sys.argv = shlex.split(given)[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        exec(given, {})
"""


def steps(page: str, *sections: str) -> Iterator[str]:
    """Files that a page shows, Python blocks, and lines of ``sh`` blocks, of its ``sections`` and in their order."""
    parts = re.split(r"^## (.*)\n", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
    chapters = dict(zip(parts[1::2], parts[2::2], strict=True))
    for section in sections:
        for kind, block in re.findall(r"^```(python|sh)\n(.*?)^```", chapters[section], re.M | re.S):
            if kind == "python":
                yield block
            else:
                yield from re.sub(r"\s*\\\n\s*", " ", block).splitlines()


def small(command: str) -> str:
    """``command`` with smaller numbers, where it has any."""
    words = shlex.split(command, comments=True)
    return shlex.join([SMALL.get(before, word) for before, word in zip(["", *words], words, strict=False)])


def follow(folder: Path, page: str, *sections: str) -> str:
    """What the commands and Python blocks print, one after the other in one process."""
    todo = []
    for step in steps(page, *sections):
        if shown := re.fullmatch(r'--8<-- "(.*)"\n', step):
            (folder / shown[1]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / shown[1], folder / shown[1])
        elif step.startswith("cd "):
            folder = folder / step[3:]
        else:
            todo.append(small(step) if step.startswith(("vla-rl ", "python ")) else step)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = [sys.executable, "-P", "-c", f"import os, sys; sys.path.append(os.getcwd()){_RUN}", *todo]
    done = subprocess.run(code, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_an_own_environment_is_imitated_and_improved_twice(tmp_path):
    printed = follow(tmp_path, "docs/bring/simulator.md", "A complete one", "Check it", "Use it")
    assert "stop the ball at the mark" in printed
    results = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(results) == 3 and all(result["episodes"] == 512 for result in results)
    for run, algorithm in (("last_step", "PPOConfig"), ("residual_td3", "ResidualTD3Config")):
        config = json.loads((tmp_path / "docs/examples/runs" / run / "config.json").read_text())
        assert config["rl"]["algorithm"]["class"].endswith(algorithm) and config["env"]["name"] == "ball_env:make"


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "sections", "left"),
    [
        ("environment", ("A complete task", "Use it"), "examples/runs/reach_ppo/summary.json"),
        ("policy", ("A complete one", "Train it", "Check it"), "examples/runs/point_mass/summary.json"),
        ("dataset", ("Write one from your own recordings",), "runs/imitate_mine/summary.json"),
    ],
)
def test_a_page_s_commands_run_in_their_order(page, sections, left, tmp_path):
    follow(tmp_path, f"docs/bring/{page}.md", *sections)
    assert list(tmp_path.rglob(left))
