"""What the command line and recipes may not become again: long, untyped, or linked by strings."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "vla_rl"


def sources(*folders: str) -> list[tuple[Path, ast.Module]]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def untyped(tree: ast.Module) -> list[str]:
    """The functions with ``Any`` in their signature."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            hints = [node.returns, *(item.annotation for item in given if item)]
            names = [part.id for hint in hints if hint for part in ast.walk(hint) if isinstance(part, ast.Name)]
            found += [node.name] * ("Any" in names)
    return found


def test_signatures_of_recipes_are_typed():
    found = [f"{path.name}:{name}" for path, tree in sources("recipes") for name in untyped(tree)]
    assert 0 < len(found) <= 10, found


def test_simulators_are_imported_by_recipes_and_not_named_by_strings():
    for path, tree in sources("recipes", "cli"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load":
                assert not ast.unparse(node.args[0]).startswith(("'sims.", "f'sims.")), f"{path}:{node.lineno}"


def test_the_command_line_is_short():
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path, _ in sources("cli"))
    assert lines <= 1500
