"""``python -m tests.house`` (``make house``): how long the way through the house is, in figures.

Files and lines of the product and of the tests, package by package; files that one other file of their own folder
alone reads; circles of imports at module level; protocols; and the settings of ``demo.py:demo``.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("vla_rl", "sims", "world_models", "robot_drivers", "configs")


def python_files(*folders: str) -> list[Path]:
    """Every Python file below ``folders`` of the project, but for generated ones."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if not path.stem.endswith("_pb2")]


def lines_of(paths: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def package_of(path: Path) -> str:
    """``vla_rl/fleet/x.py`` -> ``vla_rl/fleet``, ``sims/mujoco/x.py`` -> ``sims``."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "vla_rl" and len(parts) > 2 else parts[0]


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def imported(tree: ast.AST, module: str, known: Mapping[str, Any], everywhere: bool) -> Iterator[str]:
    """Modules among ``known`` that ``module`` imports: at module level, or ``everywhere`` in it."""
    nodes = ast.walk(tree) if everywhere else _at_import(tree)
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{item.name}" for item in node.names]
        for name in names:
            found = name if name in known else name.rpartition(".")[0]
            if found in known and found != module:
                yield found


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements outside of functions: what runs when a module is imported, and what is for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from _at_import(node)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """A circle, if there is any: the first module again at its end."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


def settings(config: Any) -> int:
    """How many fields a config has, with those of the configs in it."""
    if not is_dataclass(config):
        return 1
    return sum(settings(getattr(config, field.name)) for field in fields(config) if field.init)


def figures() -> dict[str, Any]:
    """Everything that :func:`main` prints, by name."""
    paths = {module_of(path): path for path in python_files(*PRODUCT)}
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in paths.items()}
    readers = {module: Counter[str]() for module in paths}
    for module, tree in trees.items():
        for other in set(imported(tree, module, paths, everywhere=True)):
            readers[other][module] += 1
    lone = [
        module
        for module, by in readers.items()
        if len(by) == 1 and paths[module].parent == paths[next(iter(by))].parent and paths[module].stem != "__init__"
    ]
    graph = {module: set(imported(tree, module, paths, everywhere=False)) for module, tree in trees.items()}
    protocols = [
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    ]
    product, tests = list(paths.values()), python_files("tests")
    from vla_rl.recipes.config_files import load_config

    return {
        "product lines": lines_of(product),
        "product files": len(product),
        "packages": Counter(map(package_of, product)),
        "lone": sorted(lone),
        "circles": circles(graph),
        "protocols": len(protocols),
        "settings of demo.py:demo": settings(load_config("demo.py:demo")),
        "test lines": lines_of(tests),
        "test files": len(tests),
        "longest": sorted(((lines_of([path]), module) for module, path in paths.items()), reverse=True)[:5],
    }


def main(show: Console) -> None:
    found = figures()
    table = Table("figure", "now", "at most", title="the house")
    most, size = found["packages"].most_common(1)[0]
    rows = [
        ("lines of the product", found["product lines"], 80_000),
        ("files of the product", found["product files"], 400),
        (f"files of the largest package, {most}", size, 60),
        ("lines of the longest file", found["longest"][0][0], 600),
        ("files that one other of their folder reads", len(found["lone"]), 20),
        ("circles of imports", len(found["circles"]), 0),
        ("protocols", found["protocols"], 75),
        ("settings of demo.py:demo", found["settings of demo.py:demo"], 70),
        ("lines of the tests", found["test lines"], 78_000),
        ("lines of the tests, of the product's", found["test lines"] / found["product lines"], 1.0),
    ]
    for name, value, limit in rows:
        number = f"{value:,}" if isinstance(value, int) else f"{value:.2f}"
        table.add_row(name, number, f"{limit:,}", style="" if value <= limit else "yellow")
    show.print(table)
    show.print("packages:", ", ".join(f"{name} {count}" for name, count in found["packages"].most_common()))
    for circle in found["circles"]:
        show.print("circle:", " - ".join(circle))
    if "--names" in sys.argv:
        show.print("read by one other of their folder:", ", ".join(found["lone"]))


if __name__ == "__main__":
    main(Console())
