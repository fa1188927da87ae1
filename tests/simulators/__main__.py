"""``python -m tests.simulators [NAME ...]``: install simulators, run them and print what is missing.

Each is checked by ``check_env``, its expert plays, PPO trains on it for an iteration, also from tiny folders in the
formats of downloaded models, and its suite is played;
Meta-World's expert is imitated from pixels and the policy improved; at the end one PPO trains on all of them at once.
LIBERO is run with boxes for objects where its assets are not there.  Exits with 1 when something that could run went
wrong; what is missing is a row of the table.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from sims import catalog, installations
from tests.simulators.libero_boxes import home_with_boxes
from tests.simulators.parts import SMALL, parts_of, parts_of_all
from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class Row:
    """One line of the table; ``missing`` is not a failure."""

    what: str
    result: str
    missing: bool = False
    failed: bool = False


def main(names: Sequence[str], show: Console) -> int:
    """Run everything for ``names``, all without; returns the exit code."""
    rows: list[Row] = []
    installed = [name for name in names or SMALL if _install(name, rows, show)]
    without_files = [name for name in installed if _lacks_files(name, rows)]
    with _stand_ins(without_files):
        for name in installed:
            called = f"{name}, boxes for objects" if name in without_files else name
            for what, part in parts_of(name).items():
                _attempt(f"{called}: {what}", part, rows, show)
        for what, part in parts_of_all(installed).items() if installed else ():
            _attempt(f"all at once: {what}", part, rows, show)
    table = Table("simulator", Column("result", overflow="fold"), title="simulators with installations of their own")
    for row in rows:
        style = "red" if row.failed else "yellow" if row.missing else ""
        table.add_row(row.what, row.result, style=style)
    show.print(table)
    return int(any(row.failed for row in rows))


def _install(name: str, rows: list[Row], show: Console) -> bool:
    """Whether ``name`` is installed; otherwise a row says what is missing."""
    if name not in SMALL:
        raise SystemExit(f"{name!r} is not one of {', '.join(SMALL)}")
    started = time.perf_counter()
    try:
        made = installations.install(name)
    except UserError as error:
        rows.append(Row(name, f"not installed: {error}", missing=True))
        return False
    rows.append(Row(f"{name}: install", f"{made.version()}, {time.perf_counter() - started:.0f} s"))
    show.print(f"{name} is installed in {made.folder}")
    return True


def _lacks_files(name: str, rows: list[Row]) -> bool:
    """Whether files are missing that no package brings; then its refusal is a row."""
    if not installations.find(name).missing_files():
        return False
    try:
        catalog.make(name, num_envs=1, **SMALL[name]).close()
        rows.append(Row(name, "it ran although files are missing", failed=True))
    except UserError as error:
        rows.append(Row(f"{name}, its own assets", f"not run: {error}", missing=True))
    return True


@contextmanager
def _stand_ins(names: Sequence[str]) -> Iterator[None]:
    """Run with a stand-in for the files of ``names``, which can be LIBERO only."""
    assert set(names) <= {"libero"}, f"nobody has written stand-ins for {names}"
    if not names:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, home_with_boxes(Path(folder)):
        yield


def _attempt(what: str, part: Callable[[], str], rows: list[Row], show: Console) -> None:
    started = time.perf_counter()
    try:
        row = Row(what, f"{part()}, {time.perf_counter() - started:.0f} s")
    except Exception as error:  # whatever goes wrong in somebody else's simulator is a row
        show.print_exception()
        row = Row(what, f"{type(error).__name__}: {error}", failed=True)
    show.print(f"{row.what}: {row.result}")
    rows.append(row)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Console()))
