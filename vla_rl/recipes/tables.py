"""Tables and trees of plain text on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from vla_rl.contract.errors import printable


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of plain text: square brackets are no markup in it."""
    made = Table(*columns, title=_text(title, "bold"), title_justify="left", show_header=any(columns))
    for row in rows:
        made.add_row(*(_text(cell) for cell in row))
    return made


def tree(name: str, value: Mapping[str, object]) -> Tree:
    """Nested settings or results, one per line."""
    made = Tree(_text(name, "bold"))
    for key, item in value.items():
        if isinstance(item, Mapping) and {"success", "low", "high", "episodes"} <= set(item):
            interval = f"[{100 * item['low']:.1f}, {100 * item['high']:.1f}]"
            made.add(_text(f"{key}: {item['success']:.1%} {interval} of {item['episodes']} episodes"))
        elif isinstance(item, Mapping) and item:
            kind = str(item.get("class", "")).rpartition(":")[2]
            made.add(
                tree(f"{key}: {kind}" if kind else key, {name: part for name, part in item.items() if name != "class"})
            )
        else:
            made.add(_text(f"{key}: {item:.4g}" if isinstance(item, float) else f"{key}: {item}"))
    return made


def sizes(of: object) -> Table:
    """Parameters per module, and how many of them are trained; none for what is no network."""
    policy: Any = of
    trained = {id(item) for item in policy.trainable().values()} if hasattr(policy, "trainable") else None
    rows = []
    for name, module in [*policy.named_children(), ("all", policy)] if hasattr(policy, "named_children") else []:
        counts = [(item.numel(), trained is None or id(item) in trained) for item in module.parameters()]
        rows.append((name, f"{sum(n for n, _ in counts):,}", f"{sum(n for n, learns in counts if learns):,}"))
    return table(f"{type(policy).__name__}: parameters", ("module", "number", "trained"), rows)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)
