"""Progress on the terminal: what is being done, how far, how fast, how well, and how long it will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(stderr=True, highlight=False, soft_wrap=True)  # a path that is cut by lines cannot be copied


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar for ``total`` things; call the result with how many are done and a short remark (rate, success)."""
    columns = (
        TextColumn("[bold]{task.description:<14}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total, remark="")

        def update(done: int, remark: str = "") -> None:
            progress.update(task, completed=done, remark=remark)

        yield update
