"""Somebody else's ``sims``, ``world_models`` or ``robot_drivers`` is found before anything of it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.wheels import PACKAGES, ROOT
from vla_rl.contract.load import GENERIC, MARK, check_packages

FOREIGN = 'raise SystemExit("the foreign package was imported")\n'


@pytest.fixture
def home(tmp_path) -> Path:
    """A folder with our packages, as site-packages has them after an installation."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / "site" / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "site"


def start(*path: Path, cwd: Path) -> tuple[int, str]:
    """Status and last words of ``vla-rl inspect nothing`` with ``path`` before all else on Python's path."""
    paths = [str(part) for part in path]
    code = f"import sys\nsys.path[:0] = {paths!r}\nfrom vla_rl.cli import main\nmain(['inspect', 'it'])"
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=settings, capture_output=True, text=True)
    return done.returncode, done.stderr.strip()


def test_ours_are_ours(home, tmp_path):
    check_packages()
    status, said = start(home, cwd=tmp_path)
    assert status == 2 and "'it' is no environment" in said
    assert all(MARK in (ROOT / name / "__init__.py").read_bytes() for name in GENERIC)


_FULL = [(name, file) for name in GENERIC for file in ("{}/__init__.py", "{}.py")]


@pytest.mark.parametrize(
    ("name", "file"), [pytest.param(*one, marks=pytest.mark.full if 0 < i < 5 else []) for i, one in enumerate(_FULL)]
)
def test_another_one_that_comes_first_is_named(home, tmp_path, name, file):
    foreign = tmp_path / "other" / file.format(name)
    foreign.parent.mkdir(parents=True)
    foreign.write_text(FOREIGN)
    status, said = start(foreign.parents[0] if file == "{}.py" else foreign.parents[1], home, cwd=tmp_path)
    assert status == 2 and said.count("\n") == 0
    assert f"'{foreign}' would be imported as {name!r} but is not vla-rl's" in said and "rename it" in said


def test_a_folder_in_the_current_one_is_named(home, tmp_path):
    (tmp_path / "here" / "sims").mkdir(parents=True)
    (tmp_path / "here" / "sims" / "__init__.py").write_text(FOREIGN)
    status, said = start(Path(""), home, cwd=tmp_path / "here")
    assert status == 2 and f"'{tmp_path / 'here' / 'sims' / '__init__.py'}' would be imported as 'sims'" in said


def test_a_folder_without_code_is_named_where_python_takes_it(home, tmp_path):
    (tmp_path / "here" / "sims").mkdir(parents=True)
    assert "'it' is no environment" in start(tmp_path / "here", home, cwd=tmp_path)[1]
    shutil.rmtree(home / "sims")
    status, said = start(tmp_path / "here", home, cwd=tmp_path)
    assert status == 2 and f"'{tmp_path / 'here' / 'sims'}' would be imported as 'sims'" in said


@pytest.mark.parametrize(
    ("place", "cure"),
    [
        ("site", "uninstall simtoolkit, then install vla-rl again (pip install --force-reinstall --no-deps vla-rl) in"),
        ("elsewhere", "uninstall simtoolkit or give vla-rl an environment of its own."),
    ],
)
def test_the_distribution_it_came_with_is_named(home, tmp_path, place, cure):
    """Installed over ours, or before it on the path."""
    foreign = tmp_path / place / "sims" / "__init__.py"
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text(FOREIGN)
    distribution = tmp_path / place / "simtoolkit-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: simtoolkit\nVersion: 1.0\n")
    (distribution / "top_level.txt").write_text("sims\n")
    status, said = start(tmp_path / place, home, cwd=tmp_path)
    assert status == 2 and f"'{foreign}' would be imported as 'sims'" in said and cure in said


def test_a_missing_package_of_ours_is_named(home, tmp_path):
    shutil.rmtree(home / "robot_drivers")
    code = "import sys\nsys.meta_path = [finder for finder in sys.meta_path if 'editable' not in str(finder)]\n"
    code += f"sys.path[:0] = [{str(home)!r}]\nfrom vla_rl.cli import main\nmain(['inspect'])"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=own)
    assert done.returncode == 2 and f"'robot_drivers' of vla-rl is not beside '{home / 'vla_rl'}'" in done.stderr
