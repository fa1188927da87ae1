"""Build the wheel from a clean copy, put it into bare virtual environments, and find other Pythons."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vla_rl", "sims", "world_models", "robot_drivers")
BASE = ("numpy", "msgpack", "tyro", "rich")
_ASIDE = (".*", "runs", "build", "dist", "__pycache__", "*.egg-info")
# What has to be importable with the base dependencies alone, as far as it exists.
_LIGHT = ("vla_rl.contract", "robot_drivers", "sims.toy")
_LIGHT_MODULES = (
    "sims",
    "sims.catalog",
    "vla_rl.contract.tracker",
    "sims.isolated",
    "world_models",
    "vla_rl.fleet.client",
)


def build_wheel(folder: Path, *options: str) -> Path:
    """The wheel of this checkout, built in ``folder`` from a copy, so that nothing built earlier can get into it."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*_ASIDE))
    run(sys.executable, "-m", "build", "--wheel", *options, "--outdir", folder / "dist", cwd=source)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def light_modules(wheel: Path) -> list[str]:
    """The modules in ``wheel`` that need nothing beyond the base dependencies."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names]
    light = [f"{unit}." for unit in _LIGHT]
    return sorted(m for m in modules if m in (*_LIGHT, *_LIGHT_MODULES) or m.startswith(tuple(light)))


def bare_environment(folder: Path, wheel: Path) -> Path:
    """A Python whose environment holds ``wheel`` and links to the base dependencies of this one; needs no network."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    for name in sorted(_closure(BASE)):
        for top in {path.parts[0] for path in metadata.files(name) or () if path.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    return folder / "bin" / "python"


def _closure(names: tuple[str, ...]) -> set[str]:
    """``names`` and all distributions that they need."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            needs = map(Requirement, metadata.requires(name) or ())
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def install(folder: Path, python: str, *what: object) -> Path:
    """Make a virtual environment with ``python`` and install ``what`` into it; returns its ``bin``."""
    run(python, "-m", "venv", folder)
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(folder / "bin" / "python", *pip, *what)
    return folder / "bin"


def find_python(version: str) -> str | None:
    """A Python ``version`` ("3.12") with venv and pip, on the path or among pyenv's; None when there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [
        sys.executable,
        shutil.which(f"python{version}"),
        *sorted(pyenv.glob(f"versions/{version}*/bin/python")),
    ]
    for candidate in filter(None, candidates):
        code = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
        if subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0:
            return str(candidate)
    return None


def run(*command: object, cwd: Path = ROOT) -> str:
    """The output of ``command``, without our environment variables for finding packages.  It must succeed."""
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings = {**quiet, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
