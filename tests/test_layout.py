"""The arrows of the design, what no package may contain, and sizes: read from the source, without running it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
LEAVES = ("sims", "world_models", "robot_drivers")
PACKAGES = ("vla_rl", *LEAVES)
_CONTRACT = "vla_rl.contract"
# Checkpoint folders of networks: what policies and rewards share besides the contract.
_PRETRAINED = "vla_rl.pretrained"
_PAGES = "vla_rl.pages"  # templates and the server of every page
_ASIDE = {_CONTRACT, _PRETRAINED, _PAGES, "vla_rl.experience", "vla_rl.rewards", "vla_rl.fleet", "vla_rl.evaluation"}
_LEARNER = {"vla_rl", *_ASIDE, "vla_rl.policies", "vla_rl.algorithms"}
# Who may import what of ours, besides itself.
ARROWS: dict[str, set[str]] = {
    "vla_rl": set(),
    _CONTRACT: set(),
    _PRETRAINED: {_CONTRACT},
    _PAGES: {_CONTRACT},
    "vla_rl.policies": {_CONTRACT, _PRETRAINED},
    "vla_rl.algorithms": {_CONTRACT, "vla_rl.policies"},
    "vla_rl.experience": {_CONTRACT},
    "vla_rl.rewards": {_CONTRACT, _PRETRAINED},
    "vla_rl.fleet": {_CONTRACT, _PAGES},
    "vla_rl.evaluation": {_CONTRACT, _PAGES, "vla_rl.experience"},
    "vla_rl.serving": {"vla_rl", _CONTRACT, _PRETRAINED, "vla_rl.policies"},
    "vla_rl.training": _LEARNER,
    "vla_rl.recipes": {*_LEARNER, "vla_rl.training", "vla_rl.serving"},
    "vla_rl.cli": {*_LEARNER, "vla_rl.training", "vla_rl.serving", "vla_rl.recipes"},
    **{leaf: {_CONTRACT} for leaf in LEAVES},
}
# The one module of recipes that may import a leaf, inside its functions: what is not installed is not missed.
LAZY: dict[str, str] = {f"vla_rl.recipes.{leaf}": leaf for leaf in ("sims", "world_models")}
# The part of recipes that joins robots with the rest: they need numpy only, and nothing but the command imports it.
ROBOTS = "vla_rl.recipes.robots"
TORCH_FREE = (
    _CONTRACT,
    "robot_drivers",
    "sims.catalog",
    "sims.gym",
    "sims.installations",
    "sims.isolated",
    "sims.isolation",
    "sims.metaworld",
    "sims.mujoco",
    "sims.multi_task",
    "sims.base",
    "sims.robosuite",
    "sims.toy",
    "sims.warp",
    "vla_rl.cli.fleet",
)
PICKLES = (
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "torch.load",
    "torch.save",
)
CHECKPOINTS = ("torch.optim", "torch.save", "torch.load", "safetensors")
MAX_FILE, MAX_FUNCTION = 600, 70


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.text, self.path)

    @property
    def nodes(self) -> list[ast.AST]:
        return _nodes(self.text, self.path)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> list[str]:
        return self.path.split("/")[:-1]


@lru_cache(maxsize=1)
def _parsed(text: str, path: str) -> ast.Module:
    """For all rules about a file in turn; the trees of all files at once take much memory."""
    return ast.parse(text, path)


@lru_cache(maxsize=1)
def _nodes(text: str, path: str) -> list[ast.AST]:
    return list(ast.walk(_parsed(text, path)))


Finding = tuple[int, str]
Rule = Callable[[Source], Iterator[Finding]]
SOURCES = [
    Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
]


def within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def unit_of(name: str) -> str:
    """``vla_rl.policies.flow`` -> ``vla_rl.policies``, ``sims.toy`` -> ``sims``; "" for what is not ours."""
    parts = name.split(".")
    if parts[0] == "vla_rl" and len(parts) > 1:
        unit = ".".join(parts[:2])
        return unit if unit in ARROWS or len(parts) > 2 else "vla_rl"
    return parts[0] if parts[0] in (*PACKAGES, "configs", "tests") else ""


@lru_cache(maxsize=1)
def imports(source: Source) -> list[tuple[int, str, str]]:
    """(line, full name, local name if it differs) of everything that is imported, anywhere in the file."""
    return list(_imports(source))


def _imports(source: Source) -> Iterator[tuple[int, str, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                yield node.lineno, item.name, item.asname or ""
        elif isinstance(node, ast.ImportFrom):
            base = source.package[: len(source.package) - node.level + 1] if node.level else []
            base = [*base, node.module] if node.module else base
            for item in node.names:
                yield node.lineno, ".".join([*base, item.name]), item.asname or item.name


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def references(source: Source) -> Iterator[Finding]:
    """Every imported name and every ``a.b.c``, with ``import torch as t`` seen through."""
    local = {alias: name for _, name, alias in imports(source) if alias}
    yield from ((line, name) for line, name, _ in imports(source))
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            yield node.lineno, f"{local.get(first, first)}.{rest}"


def wrong_arrows(source: Source) -> Iterator[Finding]:
    own = unit_of(source.module)
    if own not in ARROWS:
        yield 1, f"{own} is not in the picture; add it to ARROWS here and to the README's tree"
        return
    at_import = {node.lineno for node in source.tree.body}
    for line, name, _ in imports(source):
        unit = unit_of(name)
        lazy = LAZY.get(source.module) == unit and line not in at_import
        robots = unit == "robot_drivers" and within(source.module, ROBOTS)
        if unit and unit != own and unit not in ARROWS[own] and not (lazy or robots):
            yield line, f"{own} imports {name}"


def heavy_contract(source: Source) -> Iterator[Finding]:
    if unit_of(source.module) == _CONTRACT:
        light = {*sys.stdlib_module_names, "numpy", "vla_rl"}
        if source.path.endswith("/wire.py"):
            light.add("msgpack")
        yield from ((line, f"imports {name}") for line, name, _ in imports(source) if name.split(".")[0] not in light)


def torch_where_none_is(source: Source) -> Iterator[Finding]:
    if within(source.module, *TORCH_FREE):
        yield from ((line, f"imports {name}") for line, name, _ in imports(source) if within(name, "torch"))


def learning_in_leaves(source: Source) -> Iterator[Finding]:
    if source.package[0] in LEAVES:
        yield from (found for found in references(source) if within(found[1], *CHECKPOINTS))
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                yield node.lineno, "calls backward()"


def unsafe_code(source: Source) -> Iterator[Finding]:
    yield from (found for found in references(source) if within(found[1], *PICKLES))
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            yield node.lineno, f"{node.func.id}()"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "allow_pickle"


def too_long(source: Source) -> Iterator[Finding]:
    lines = source.text.count("\n")
    if lines > MAX_FILE:
        yield lines, f"more than {MAX_FILE} lines; two files may be clearer"
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                yield node.lineno, f"{node.name} has {length} lines, more than {MAX_FUNCTION}"


def undocumented(source: Source) -> Iterator[Finding]:
    if source.package[0] == "vla_rl":
        for node in source.tree.body:
            public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if public and not node.name.startswith("_") and not ast.get_docstring(node):
                yield node.lineno, f"{node.name} has no docstring"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        wrong_arrows,
        heavy_contract,
        torch_where_none_is,
        learning_in_leaves,
        unsafe_code,
        too_long,
        undocumented,
    )
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """What every rule finds, file by file."""
    found: dict[str, list[str]] = {name: [] for name in RULES}
    for source in SOURCES:
        for name, rule in RULES.items():
            found[name] += [f"{source.path}:{line}: {what}" for line, what in rule(source)]
    return found


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str, found: dict[str, list[str]]) -> None:
    assert not found[name], "\n".join([name, *found[name]])


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("wrong_arrows", "vla_rl/policies/x.py", "from vla_rl.algorithms.ppo import Ppo"),
        ("wrong_arrows", "vla_rl/policies/x.py", "from ..algorithms import ppo"),
        ("wrong_arrows", "vla_rl/policies/x.py", "from vla_rl import training"),
        ("wrong_arrows", "vla_rl/experience/x.py", "def f():\n    import vla_rl.policies.flow"),
        ("wrong_arrows", "vla_rl/evaluation/x.py", "from vla_rl.rewards import success"),
        ("wrong_arrows", "vla_rl/contract/x.py", "from vla_rl import policies"),
        ("wrong_arrows", "vla_rl/recipes/x.py", "from vla_rl.cli import main"),
        ("wrong_arrows", "vla_rl/recipes/x.py", "def f():\n    import sims.catalog"),
        ("wrong_arrows", "vla_rl/recipes/sims.py", "import sims.catalog"),
        ("wrong_arrows", "vla_rl/recipes/sims.py", "def f():\n    import world_models.env"),
        ("wrong_arrows", "vla_rl/cli/x.py", "import sims.toy.counting"),
        ("wrong_arrows", "vla_rl/cli/x.py", "import configs.demo"),
        ("wrong_arrows", "sims/toy/x.py", "from vla_rl.policies import flow"),
        ("wrong_arrows", "sims/toy/x.py", "from world_models import env"),
        ("wrong_arrows", "vla_rl/unheard_of/x.py", ""),
        ("heavy_contract", "vla_rl/contract/x.py", "import msgpack"),
        ("torch_where_none_is", "sims/mujoco/x.py", "def f():\n    from torch import nn"),
        ("torch_where_none_is", "robot_drivers/x.py", "import torch.nn as nn"),
        ("learning_in_leaves", "world_models/x.py", "import torch as t\nt.optim.Adam([])"),
        ("learning_in_leaves", "world_models/x.py", "from torch.optim import Adam"),
        ("learning_in_leaves", "world_models/x.py", "from safetensors.torch import save_file"),
        ("learning_in_leaves", "world_models/x.py", "loss.backward()"),
        ("unsafe_code", "sims/x.py", "import pickle"),
        ("unsafe_code", "vla_rl/training/x.py", "import torch.nn as nn\nimport torch\ntorch.load('x')"),
        ("unsafe_code", "vla_rl/training/x.py", "from torch import load"),
        ("unsafe_code", "vla_rl/training/x.py", "eval('1')"),
        ("unsafe_code", "vla_rl/training/x.py", "try:\n    f()\nexcept:\n    pass"),
        ("unsafe_code", "vla_rl/training/x.py", "import numpy as np\nnp.load('x', allow_pickle=True)"),
        ("too_long", "sims/x.py", "\n" * (MAX_FILE + 1)),
        ("too_long", "sims/x.py", "def f():\n" + "    g()\n" * MAX_FUNCTION),
        ("undocumented", "vla_rl/cli/x.py", "def f():\n    pass"),
        ("undocumented", "vla_rl/cli/x.py", "class C:\n    pass"),
    ],
)
def test_rule_catches(name: str, path: str, text: str) -> None:
    assert list(RULES[name](Source(path, text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("vla_rl/algorithms/x.py", "from vla_rl.policies import critics\nfrom vla_rl.contract.env import Step"),
        ("vla_rl/cli/x.py", "from vla_rl import __version__\nfrom vla_rl.training import loop"),
        ("vla_rl/contract/wire.py", "import json\nimport msgpack\nimport numpy as np"),
        ("vla_rl/training/x.py", "import torch\nmodel.eval()\ntorch.optim.Adam([])\nloss.backward()"),
        ("world_models/x.py", "import torch\nfrom vla_rl.contract import env"),
        ("vla_rl/recipes/sims.py", 'def f():\n    """Lazily."""\n    import sims.catalog'),
        ("sims/toy/x.py", "from sims.toy import counting\nfrom . import point_mass"),
    ],
)
def test_rules_leave_good_code_alone(path: str, text: str) -> None:
    assert not [found for rule in RULES.values() for found in rule(Source(path, text))]


def test_what_needs_no_torch_imports_none():
    modules = [source.module for source in SOURCES if within(source.module, *TORCH_FREE)]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


def test_every_folder_is_packaged() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {".".join(source.package) for source in SOURCES}
    configs = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.py")}
    folders |= {"vla_rl._configs" + folder.removeprefix("configs").replace("/", ".") for folder in configs}
    missing = sorted(folders - set(setup["packages"]))
    assert not missing, f"{missing} would not be in the wheel; add them to tool.setuptools.packages in pyproject.toml"
