"""A worker of a simulator runs with what the simulator's pins bring, whatever else is installed here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from sims import installations
from sims.catalog import CATALOG, find
from tests.catalog_options import IN_AN_INSTALLATION
from tests.patience import PATIENCE
from vla_rl.contract.task import extras_of

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = {name: (name,) for name in IN_AN_INSTALLATION} | {"maniskill": ("maniskill", "maniskill_lift")}
# Packages that are called otherwise than their distribution and are not installed here.
PACKAGES = {"hf-libero": "libero", "genesis-world": "genesis"}
TABLETOP = ("sims.mujoco.tabletop", "sims.mujoco.render", "sims.mujoco.render", "sims.mujoco.scene")
LIFT = ("genesis", "maniskill_lift")  # the rules of our tabletop in another simulator
# Imports the modules after "-" where the packages before it are not, as it would be in an installation.
HIDING = """
import importlib, sys
at = sys.argv.index("-")
hidden, absent = set(sys.argv[1].split(",")), set(sys.argv[2].split(","))
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is in no pin", name=name)
sys.meta_path.insert(0, Hide())
for module in sys.argv[at + 1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in absent:
            raise
"""


@cache
def pinned(name: str) -> frozenset[str]:
    """The packages that the pins of the installation ``name`` bring."""
    lines = (installations._PINS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    names = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines if not line.startswith("#")}
    here = {package for package, owners in distributions().items() if names & set(owners)}
    return frozenset(here | {PACKAGES.get(one, one.replace("-", "_")) for one in names})


@cache
def distributions() -> dict[str, list[str]]:
    """{package: the distributions here that bring it}, without our own."""
    found = metadata.packages_distributions()
    ours = {"vla_rl", "sims", "world_models", "robot_drivers"}
    return {
        package: [re.sub(r"[-_.]+", "-", owner).lower() for owner in owners]
        for package, owners in found.items()
        if package not in ours
    }


@cache
def imported(module: str) -> frozenset[str]:
    """What ``module`` of ours imports, anywhere in it: modules of ours, and packages of others."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    return frozenset(name for node in ast.walk(tree) for name in _names(node) if name != "__future__")


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (item.name for item in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None and not node.level, "imports are absolute here"
        inner = [f"{node.module}.{item.name}" for item in node.names]
        yield from (name for name in [node.module, *inner] if name == node.module or ours(name))


def ours(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return name.partition(".")[0] in ("vla_rl", "sims") and (path.is_dir() or path.with_suffix(".py").is_file())


def needed(name: str) -> tuple[set[str], set[str]]:
    """The modules of ours and the packages of others that a worker of the catalogue's entry ``name`` imports."""
    expert = extras_of(find(name)).expert
    modules = ["sims.isolation.worker", CATALOG[name].partition(":")[0]]
    modules += [expert.partition(":")[0]] if isinstance(expert, str) else []
    found: set[str] = set()
    others: set[str] = set()
    while modules:
        module = modules.pop()
        if module in found:
            continue
        found.add(module)
        modules += [one for one in imported(module) if ours(one)]
        others |= {top for one in imported(module) if not ours(one) and (top := one.partition(".")[0]) != "sims"}
    return found, others - sys.stdlib_module_names


@pytest.mark.parametrize("installation", sorted(IN_AN_INSTALLATION))
def test_a_worker_imports_what_its_simulators_pins_bring_and_nothing_else(installation):
    allowed, modules = pinned(installation), set()
    for name in ENTRIES[installation]:
        own, packages = needed(name)
        assert packages <= allowed, f"{sorted(packages - allowed)} are in no pin of {installation}"
        assert name in LIFT or not own & set(TABLETOP), f"{name} imports our tabletop"
        modules |= own

    hidden, absent = set(distributions()) - allowed, allowed - set(distributions())
    assert {"rich", "tyro", "pytest"} - allowed <= hidden and ("torch" in hidden) == ("torch" not in allowed)
    given = [",".join(sorted(hidden)), ",".join(sorted(absent)), "-", *sorted(modules)]
    command = [sys.executable, "-c", HIDING, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
