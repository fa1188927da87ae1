"""Evaluates a policy on a suite: in parallel, and where an earlier evaluation in the same folder was stopped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from vla_rl.contract.config import to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.contract.trust import read_json
from vla_rl.evaluation.results import TABLES, EpisodeResult, Journal, write_tables
from vla_rl.policies.vla.checkpoint import is_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.deployed import check_instructions, fingerprint
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import bar
from vla_rl.recipes.shared_disk import SharedDisk
from vla_rl.recipes.suite import Suite, differing
from vla_rl.recipes.suite_comparison import RESULTS
from vla_rl.recipes.suite_player import VIDEOS, Block
from vla_rl.recipes.suite_report import PAGE, write_suite_report
from vla_rl.recipes.suite_results import results_of
from vla_rl.recipes.workers import chosen_engine, worker_processes, workers
from vla_rl.training.device import resolve_device
from vla_rl.training.run_lock import lock_run, unlock_run
from vla_rl.training.tracking import write_json

_SUITE = "suite.json"


@dataclass(frozen=True)
class SuiteRun:
    """``policy`` (a text, see ``recipes/deployed.py``) on ``suite``, with its results in ``out``.

    ``num_envs`` environments run side by side in each of ``processes`` worker processes (1: in this one), which the
    chosen engine starts (``on_engine``); on other machines they must share the disk that ``out`` is on.  The first
    ``videos`` seeds of every task are recorded.  Neither ``num_envs`` nor ``processes`` changes a result.  The policy
    computes on ``device`` (see ``resolve_device``); its kind is part of the identity, as other kinds round differently.
    ``vla`` says how a public folder is opened, and is part of its identity.
    """

    suite: Suite
    policy: str
    out: Path
    num_envs: int = 16
    processes: int = 1
    videos: int = 2
    device: str = "cpu"
    vla: VLAOptions = VLAOptions()

    def __post_init__(self) -> None:
        """Raises UserError for counts with which nothing would be played, and for a device that does not exist."""
        check_limits(self, num_envs=(1, math.inf), processes=(1, math.inf), videos=(0, math.inf))
        resolve_device(self.device)

    def run(self) -> JsonObject:
        """Play what is missing and write the tables, ``results.json`` and ``report.html``; returns the results.

        Raises UserError when ``out`` holds the results of another suite or policy, and for a checkpoint that was not
        trained for one of the tasks.
        """
        check_instructions(self.policy, {task.name: task.env for task in self.suite.tasks})
        with _locked(self.out):
            journal = self._journal()
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
        out, noise_seed = str(self.out), self.suite.noise_seed
        blocks = []
        for task in self.suite.tasks:
            missing = [seed for seed in self.suite.seeds if (task.name, seed) not in known]
            filmed = set(self.suite.seeds[: self.videos])
            for part in range(parts):
                own = missing[part::parts]
                first, rest = (tuple(seed for seed in own if (seed in filmed) is wanted) for wanted in (True, False))
                if own:
                    where = (self.num_envs, noise_seed, out, self.device)
                    blocks.append(Block(task, self.policy, first, rest, *where, self.vla))
        return blocks

    def _play(self, journal: Journal) -> None:
        blocks, lock = self.blocks(list(journal.episodes)), Lock()
        rated = {task.name for task in self.suite.tasks if task.success is not None}
        outcomes = Counter(one.success for one in journal.episodes.values() if one.task in rated)
        with bar(self.suite.name, len(self.suite.keys)) as update:

            def show() -> None:
                share = f"success {outcomes[True] / outcomes.total():.0%}" if outcomes else ""
                update(len(journal.episodes), share)

            def note(episode: EpisodeResult) -> None:
                with lock:
                    if episode.key in journal.episodes:
                        return  # a process that died had played it, and the block began again
                    journal.append(episode)
                    outcomes.update([episode.success] if episode.task in rated else [])
                    show()

            show()
            if self.processes == 1 and not chosen_engine().away:
                _here(blocks, note)
            else:
                self._in_processes(blocks, note)

    def _in_processes(self, blocks: Sequence[Block], note: Callable[[EpisodeResult], None]) -> None:
        with closing(SharedDisk(self.out)) as disk, worker_processes(""):
            jobs: list[JsonObject] = [{"block": to_json(block), "disk": disk.given()} for block in blocks]
            workers(self.processes).map("play_block", jobs, [lambda fields: note(EpisodeResult(**fields))] * len(jobs))

    def _identity(self) -> JsonObject:
        options = {"vla": to_json(self.vla)} if is_public(Path(self.policy)) else {}
        found = {"name": self.policy, "sha256": fingerprint(self.policy), **options}
        return {**found, "device": resolve_device(self.device).type}

    def _journal(self) -> Journal:
        """The episodes that this evaluation has played in the folder, which is marked as its own.

        Raises UserError when there are episodes of another evaluation, or files of something else.
        """
        path, own = self.out / _SUITE, {"suite": to_json(self.suite), "policy": self._identity(), "videos": self.videos}
        if not path.exists():
            self._require_unused()
        journal = Journal(self.out)
        if not journal.episodes:  # whatever was begun here, a misspelt policy for instance, has played nothing
            write_json(path, own)
            return journal
        try:
            before = read_json(path)
        except ValueError as error:
            raise UserError(
                f"{str(path)!r} is damaged ({error}), so it is unknown what was played; choose another --out."
            ) from error
        if difference := differing(before, own):
            raise UserError(
                f"{str(self.out)!r} holds the episodes of another evaluation ({difference}), so they would be mixed; "
                "choose another --out."
            )
        return journal

    def _require_unused(self) -> None:
        """Raise UserError when a file of something else, such as the page of a run, would be overwritten."""
        taken = [name for name in (*TABLES, RESULTS, PAGE, VIDEOS) if (self.out / name).exists()]
        if taken:
            raise UserError(
                f"{str(self.out)!r} holds {', '.join(taken)} of something else, which would be overwritten; choose a "
                "folder of its own by --out."
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
