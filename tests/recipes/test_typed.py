"""Limits on the command line and recipes: lines, untyped signatures, links by strings."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vla_rl.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2] / "vla_rl"


def sources(*folders: str) -> list[tuple[Path, ast.Module]]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def untyped(tree: ast.Module) -> list[str]:
    """The functions with ``Any`` in their signature, and the fields of classes that are ``Any``, by name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            hints = [node.returns, *(item.annotation for item in given if item)]
            found += [node.name] * any(map(_says_any, hints))
        elif isinstance(node, ast.ClassDef):  # a dataclass's fields are the signature of its constructor
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            found += [f"{node.name}.{ast.unparse(item.target)}" for item in fields if _says_any(item.annotation)]
    return found


def _says_any(hint: ast.expr | None) -> bool:
    if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
        hint = ast.parse(hint.value, mode="eval").body
    parts = [] if hint is None else list(ast.walk(hint))
    return any(isinstance(part, ast.Name) and part.id == "Any" for part in parts)


def test_signatures_of_recipes_are_typed():
    found = [f"{path.name}:{name}" for path, tree in sources("recipes", "recipes/imagine") for name in untyped(tree)]
    assert 0 < len(found) <= 10, found


@pytest.mark.parametrize(
    "source",
    [
        "def f(a: Any): ...",
        "def f(\n    a: int,\n    *,\n    b: dict[str, Any],\n) -> None: ...",
        "def f(\n    a: int,\n) -> tuple[\n    Any, int\n]: ...",
        "def f(a: 'Any'): ...",
        "async def f(*rest: Any): ...",
        "class A:\n    def f(self, **rest: Any): ...",
        "class A:\n    f: Any",
    ],
)
def test_an_untyped_signature_is_found_wherever_it_says_any(source):
    assert len(untyped(ast.parse(source))) == 1
    assert not untyped(ast.parse(source.replace("Any", "object")))


def test_simulators_are_imported_by_recipes_and_not_named_by_strings():
    for path, tree in sources("recipes", "cli"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load":
                assert not ast.unparse(node.args[0]).startswith(("'sims.", "f'sims.")), f"{path}:{node.lineno}"


def test_the_command_line_is_short():
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path, _ in sources("cli"))
    assert lines <= 150 * len(COMMANDS)
