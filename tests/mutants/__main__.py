"""``python -m tests.mutants [WORD ...]``: put each fault into a copy of the repository and see its tests fail.

With words, only faults whose name or file holds one.  Exits with 1 when a fault is missed, cannot be put in, or names
tests that fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.mutants.fault import ROOT, Fault
from tests.mutants.faults import FAULTS

WORKERS = 2
PATIENCE = 300  # seconds; a fault may make a test wait for ever, which counts as caught
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one means that it could not test
_ASIDE = (".venv", ".git", ".cache", "runs", "build", "dist", "__pycache__", "*.egg-info", ".*_cache")
# A fault that cannot run shows nothing about the tests.
_CARELESS = ("NameError", "SyntaxError", "ImportError", "UnboundLocalError")
# Loaded by pytest from the copy: the code under test must be the copy's, not that of an editable installation.
_SENTINEL = """
import pathlib, importlib
here = pathlib.Path(__file__).resolve().parent
for name in ("vla_rl", "vla_rl.contract", "sims", "vla_rl.contract.rows"):
    found = pathlib.Path(importlib.import_module(name).__file__).resolve()
    assert here in found.parents, f"{name} comes from {found} and not from {here}"
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one fault; ``seconds`` of its tests."""

    fault: Fault
    verdict: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.verdict.startswith("caught")


def main(words: Sequence[str]) -> int:
    """Run the faults whose names or files hold one of ``words``, all without; returns the exit code."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    faults = [fault for fault in FAULTS if not words or any(word in fault.name + fault.file for word in words)]
    if not faults:
        named = " or ".join(map(repr, words))
        print(f"no fault has {named} in its name or file, so nothing was tried; see tests/mutants/.")
        return 1
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vla-rl-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(WORKERS):
            copies.put(_copy(Path(folder) / str(i)))
        with ThreadPoolExecutor(WORKERS) as pool:
            complaints = list(pool.map(lambda tests: _sound(copies, tests), _shares(faults)))
            if any(complaints):
                console.print("the tests must pass before faults are put in:\n" + "\n".join(complaints), markup=False)
                return 1
            outcomes = _try_all(pool, copies, faults, console)
    console.print(_table(outcomes))
    caught = sum(outcome.good for outcome in outcomes)
    console.print(f"{caught} of {len(outcomes)} faults caught in {time.perf_counter() - start:.0f} s")
    return 0 if outcomes and caught == len(outcomes) else 1


def _try_all(
    pool: ThreadPoolExecutor, copies: SimpleQueue[Path], faults: Sequence[Fault], console: Console
) -> list[Outcome]:
    """What became of each fault; those that were not caught are printed at once."""
    columns = TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    outcomes = []
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(faults))
        for outcome in pool.map(lambda fault: _try(copies, fault), faults):
            outcomes.append(outcome)
            bar.advance(task)
            if not outcome.good:
                console.print(f"{outcome.fault.name} ({outcome.fault.file}): {outcome.verdict}", markup=False)
    return outcomes


def _copy(target: Path) -> Path:
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*_ASIDE))
    (target / "mutants_sentinel.py").write_text(_SENTINEL, encoding="utf-8")
    return target


def _shares(faults: Sequence[Fault]) -> list[list[str]]:
    """Every named test once, split among the workers."""
    tests = sorted({test for fault in faults for test in fault.tests})
    # A parametrised case is part of its test, which pytest would otherwise run twice.
    tests = [test for test in tests if "[" not in test or test.split("[")[0] not in tests]
    return [part for i in range(WORKERS) if (part := tests[i::WORKERS])]


def _sound(copies: SimpleQueue[Path], tests: Sequence[str]) -> str:
    """Run ``tests`` without a fault; returns what is wrong, "" when they pass."""
    copy = copies.get()
    try:
        code, output = _pytest(copy, tests, patience=10 * PATIENCE)
    finally:
        copies.put(copy)
    return "" if code == PASSED else output[-3000:]


def _try(copies: SimpleQueue[Path], fault: Fault) -> Outcome:
    copy, start = copies.get(), time.perf_counter()
    try:
        return Outcome(fault, _verdict(copy, fault), time.perf_counter() - start)
    finally:
        copies.put(copy)


def _verdict(copy: Path, fault: Fault) -> str:
    found = fault.occurrences(copy)
    if found != 1:
        return f"STALE: the old text is there {found} times"
    with fault.applied(copy):
        try:
            code, output = _pytest(copy, fault.tests, PATIENCE)
        except subprocess.TimeoutExpired:
            return f"caught (no end after {PATIENCE} s)"
    if code == FAILED and not any(error in output for error in _CARELESS):
        return "caught"
    if code == PASSED:
        return "MISSED"
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return f"BROKEN: pytest could not test (exit code {code}): {' '.join(last)[:160]}"


def _pytest(copy: Path, tests: Sequence[str], patience: float) -> tuple[int, str]:
    """Exit code and output of ``tests`` in ``copy``, of whose code nothing compiled is kept: it could be stale."""
    settings = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "mutants_sentinel", "--tb=short", "-m", ""]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *tests],
        cwd=copy,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience,
    )
    return done.returncode, done.stdout


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("fault", "file", "verdict", title="every fault must be caught")
    table.add_column("s", justify="right")
    for outcome in outcomes:
        style = None if outcome.good else "bold red"
        fault = outcome.fault
        table.add_row(fault.name, fault.file, outcome.verdict, f"{outcome.seconds:.1f}", style=style)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
