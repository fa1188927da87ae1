"""Evaluates a policy on a suite: in parallel, and where an earlier evaluation in the same folder was stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from vla_rl.contract.config import to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.evaluation.results import EpisodeResult, Journal, write_tables
from vla_rl.recipes.deployed import fingerprint
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import bar
from vla_rl.recipes.suite import Suite, differing
from vla_rl.recipes.suite_comparison import RESULTS
from vla_rl.recipes.suite_player import Block
from vla_rl.recipes.suite_report import write_suite_report
from vla_rl.recipes.suite_results import results_of
from vla_rl.recipes.workers import worker_processes, workers
from vla_rl.training.run_lock import lock_run, unlock_run
from vla_rl.training.tracking import write_json

_SUITE = "suite.json"


@dataclass(frozen=True)
class SuiteRun:
    """``policy`` (a text, see ``recipes/deployed.py``) on ``suite``, with its results in ``out``.

    ``num_envs`` environments run side by side in each of ``processes`` worker processes (1: in this one).  The first
    ``videos`` seeds of every task are recorded.  Neither ``num_envs`` nor ``processes`` changes a result.
    """

    suite: Suite
    policy: str
    out: Path
    num_envs: int = 16
    processes: int = 1
    videos: int = 2

    def __post_init__(self) -> None:
        """Raises UserError for counts with which nothing would be played."""
        check_limits(self, num_envs=(1, math.inf), processes=(1, math.inf), videos=(0, math.inf))

    def run(self) -> JsonObject:
        """Play what is missing and write the tables, ``results.json`` and ``report.html``; returns the results.

        Raises UserError when ``out`` holds the results of another suite or policy.
        """
        with _locked(self.out):
            self._claim()
            journal = Journal(self.out)
            try:
                self._play(journal)
            except KeyboardInterrupt as stop:
                done, all_of_them = len(journal.episodes), len(self.suite.keys)
                raise KeyboardInterrupt(
                    f"stopped after {done} of {all_of_them} episodes, which are kept; the same command goes on."
                ) from stop
            episodes = [journal.episodes[key] for key in self.suite.keys]
            write_tables(self.out, episodes)
            results = results_of(self.suite, self._identity(), episodes) | self.suite.analyze(episodes)
            write_suite_report(self.out, self.suite, results, episodes)
            write_json(self.out / RESULTS, results)
        return results

    def blocks(self, played: Sequence[tuple[str, int]]) -> list[Block]:
        """The episodes that are not in ``played``, in blocks for the processes."""
        known, parts = set(played), math.ceil(self.processes / len(self.suite.tasks))
        blocks = []
        for task in self.suite.tasks:
            missing = [seed for seed in self.suite.seeds if (task.name, seed) not in known]
            filmed = set(self.suite.seeds[: self.videos])
            for part in range(parts):
                own = missing[part::parts]
                first, rest = (tuple(seed for seed in own if (seed in filmed) is wanted) for wanted in (True, False))
                if own:
                    out = str(self.out)
                    blocks.append(Block(task, self.policy, first, rest, self.num_envs, self.suite.noise_seed, out))
        return blocks

    def _play(self, journal: Journal) -> None:
        blocks, lock = self.blocks(list(journal.episodes)), Lock()
        total = len(self.suite.keys)
        with bar(self.suite.name, total) as update:

            def note(episode: EpisodeResult) -> None:
                with lock:
                    journal.append(episode)
                    wins = sum(one.success for one in journal.episodes.values())
                    update(len(journal.episodes), f"success {wins / len(journal.episodes):.0%}")

            update(len(journal.episodes), "")
            _here(blocks, note) if self.processes == 1 else _in_processes(blocks, self.processes, note)

    def _identity(self) -> JsonObject:
        return {"name": self.policy, "sha256": fingerprint(self.policy)}

    def _claim(self) -> None:
        """Write what is evaluated into the folder, or compare it with what was evaluated there before."""
        path = self.out / _SUITE
        now = {"suite": to_json(self.suite), "policy": self._identity(), "videos": self.videos}
        if not path.exists():
            write_json(path, now)
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(
                f"{str(path)!r} is damaged ({error}), so it is unknown what was played; choose another --out."
            ) from error
        if difference := differing(before, now):
            raise UserError(
                f"{str(self.out)!r} holds the episodes of another evaluation ({difference}), so they would be mixed; "
                "choose another --out."
            )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = lock_run(folder)
    try:
        yield
    finally:
        unlock_run(folder, lock)


def _here(blocks: Sequence[Block], note: Callable[[EpisodeResult], None]) -> None:
    for block in blocks:
        block.play(note)


def _in_processes(blocks: Sequence[Block], processes: int, note: Callable[[EpisodeResult], None]) -> None:
    jobs: list[JsonObject] = [{"block": to_json(block)} for block in blocks]
    with worker_processes(""):
        workers(processes).map("play_block", jobs, [lambda fields: note(EpisodeResult(**fields))] * len(jobs))
