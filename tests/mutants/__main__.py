"""``python -m tests.mutants [--all] [WORD ...]``: put faults into a copy of the repository and see their tests fail.

Without arguments, those whose file or tests differ from the commit before the last; with words, those whose name,
package or file holds one.  Exits with 1 when a fault is missed, cannot be put in, or names tests that fail without it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.mutants.fault import ROOT, Fault, faults

WORKERS = 2
PATIENCE = 120  # seconds; a fault may make a test wait for ever, which counts as caught
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one means that it could not test
_ASIDE = (".venv", ".git", ".cache", "runs", "build", "dist", "__pycache__", "*.egg-info", ".*_cache")
# A fault that cannot run shows nothing about the tests.
_CARELESS = ("NameError", "SyntaxError", "ImportError", "UnboundLocalError")
# Loaded by pytest from the copy: the code under test must be the copy's, not that of an editable installation.
_SENTINEL = """
import pathlib, importlib
here = pathlib.Path(__file__).resolve().parent
for name in ("vla_rl", "vla_rl.contract", "sims", "vla_rl.contract.tracker"):
    found = pathlib.Path(importlib.import_module(name).__file__).resolve()
    assert here in found.parents, f"{name} comes from {found} and not from {here}"
"""


class Copy:
    """A copy of the repository, and a process that runs tests in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_ASIDE))
        (folder / "mutants_sentinel.py").write_text(_SENTINEL, encoding="utf-8")
        # Of the code under test nothing compiled is kept: it could be stale.
        settings = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self._runner = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.warm"],
            cwd=folder,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], patience: float) -> tuple[int | None, str]:
        """Exit code and output of ``tests``; None when they did not end within ``patience`` seconds."""
        assert self._runner.stdin is not None and self._runner.stdout is not None
        self._runner.stdin.write(json.dumps({"tests": list(tests), "patience": patience}) + "\n")
        self._runner.stdin.flush()
        answer = json.loads(self._runner.stdout.readline())
        return answer["code"], answer["output"]

    def close(self) -> None:
        self._runner.kill()
        self._runner.wait()


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
    """Run the faults that ``words`` choose; returns the exit code."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    chosen = list(_chosen(faults(), words))
    if not chosen:
        print("no fault was chosen, so nothing was tried; name a word of one, or --all (see tests/mutants/).")
        return int(bool(words))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    start = time.perf_counter()
    with _copies() as copies, ThreadPoolExecutor(WORKERS) as pool:
        complaints = list(pool.map(lambda tests: _sound(copies, tests), _shares(chosen)))
        if any(complaints):
            console.print("the tests must pass before faults are put in:\n" + "\n".join(complaints), markup=False)
            return 1
        outcomes = _try_all(pool, copies, chosen, console)
    console.print(_table(outcomes))
    caught = sum(outcome.good for outcome in outcomes)
    console.print(f"{caught} of {len(outcomes)} faults caught in {time.perf_counter() - start:.0f} s")
    return 0 if caught == len(outcomes) else 1


def _chosen(found: Iterable[Fault], words: Sequence[str]) -> Iterator[Fault]:
    if "--all" in words:
        yield from found
        return
    changed = () if words else _changed()
    for fault in found:
        names = [path.relative_to(ROOT).as_posix() for path in fault.places()]
        named = any(word in text for word in words for text in (fault.name, fault.package, *names))
        if named or {*names, *(test.partition("::")[0] for test in fault.tests)} & {*changed}:
            yield fault


def _changed() -> list[str]:
    """Files that differ from the commit before the last."""
    command = ["git", "diff", "--name-only", "HEAD~1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit("git knows no commit before the last here, so nothing was tried; name a word, or --all.")
    return done.stdout.splitlines()


@contextmanager
def _copies() -> Iterator[SimpleQueue[Copy]]:
    with tempfile.TemporaryDirectory(prefix="vla-rl-mutants-") as folder:
        made = [Copy(Path(folder) / str(i)) for i in range(WORKERS)]
        free: SimpleQueue[Copy] = SimpleQueue()
        for copy in made:
            free.put(copy)
        try:
            yield free
        finally:
            for copy in made:
                copy.close()


def _try_all(
    pool: ThreadPoolExecutor, copies: SimpleQueue[Copy], chosen: Sequence[Fault], console: Console
) -> list[Outcome]:
    """What became of each fault; those that were not caught are printed at once."""
    columns = TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    outcomes = []
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(chosen))
        for outcome in pool.map(lambda fault: _try(copies, fault), chosen):
            outcomes.append(outcome)
            bar.advance(task)
            if not outcome.good:
                console.print(f"{outcome.fault.package}, {outcome.fault.name}: {outcome.verdict}", markup=False)
    return outcomes


def _shares(chosen: Sequence[Fault]) -> list[list[str]]:
    """Every named test once, split among the workers."""
    tests = sorted({test for fault in chosen for test in fault.tests})
    # A parametrised case is part of its test, which pytest would otherwise run twice.
    tests = [test for test in tests if "[" not in test or test.split("[")[0] not in tests]
    return [part for i in range(WORKERS) if (part := tests[i::WORKERS])]


def _sound(copies: SimpleQueue[Copy], tests: Sequence[str]) -> str:
    """Run ``tests`` without a fault; returns what is wrong, "" when they pass."""
    copy = copies.get()
    try:
        code, output = copy.run(tests, 10 * PATIENCE)
    finally:
        copies.put(copy)
    return "" if code == PASSED else output[-3000:]


def _try(copies: SimpleQueue[Copy], fault: Fault) -> Outcome:
    copy, start = copies.get(), time.perf_counter()
    try:
        return Outcome(fault, _verdict(copy, fault), time.perf_counter() - start)
    finally:
        copies.put(copy)


def _verdict(copy: Copy, fault: Fault) -> str:
    if (found := len(fault.places(copy.folder))) != 1:
        return f"STALE: the old text is there {found} times"
    with fault.applied(copy.folder):
        code, output = copy.run(fault.tests, PATIENCE)
    if code is None:
        return f"caught (no end after {PATIENCE} s)"
    if code == FAILED and not any(error in output for error in _CARELESS):
        return "caught"
    if code == PASSED:
        return "MISSED"
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return f"BROKEN: pytest could not test (exit code {code}): {' '.join(last)[:160]}"


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("package", "fault", "verdict", title="every fault must be caught")
    table.add_column("s", justify="right")
    for outcome in outcomes:
        style = None if outcome.good else "bold red"
        table.add_row(outcome.fault.package, outcome.fault.name, outcome.verdict, f"{outcome.seconds:.1f}", style=style)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
