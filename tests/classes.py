"""``python -m tests.classes``: write ``vla_rl/contract/classes.json``, the classes of ours that data may name.

They are the frozen dataclasses, all that is made by ``from_pretrained``, and the world model, but for the command
line's.  A name that two of them have is in the table for neither: ``name_of`` says so when one is to be written.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from vla_rl.contract.load import CLASSES, OURS

ROOT = Path(__file__).resolve().parents[1]


def table() -> dict[str, str]:
    """{name: module} as the source has it now."""
    found = {(module, node.name): node for module, node in _classes()}
    made = {
        key
        for key, node in found.items()
        if key[1] == "WorldModel" or any(_name(item) == "from_pretrained" for item in node.body)
    }
    while True:
        names = {name for _, name in made}
        more = {key for key, node in found.items() if any(_name(base) in names for base in node.bases)} - made
        if not more:
            break
        made |= more
    chosen = sorted(key[::-1] for key, node in found.items() if key in made or _is_frozen(node))
    names_only = [name for name, _ in chosen]
    return {name: module for name, module in chosen if names_only.count(name) == 1 and not name.startswith("_")}


def _classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] != ("vla_rl", "cli"):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                yield from ((".".join(parts), node) for node in tree.body if isinstance(node, ast.ClassDef))


def _name(node: ast.AST) -> str:
    """The name of a definition, or the last one of an expression: ``C`` of ``C``, ``m.C`` and ``C[T]``."""
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return str(getattr(node, "name", getattr(node, "attr", getattr(node, "id", ""))))


def _is_frozen(node: ast.ClassDef) -> bool:
    return any("dataclass" in text and "frozen=True" in text for text in map(ast.unparse, node.decorator_list))


def main() -> None:
    """Write the table."""
    CLASSES.write_text(json.dumps(table(), indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
