"""Evaluates a policy on a suite: in parallel, and where an earlier evaluation in the same folder was stopped."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from threading import Lock

import numpy as np

from vla_rl import __version__
from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.config import JsonObject, to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.contract.trust import read_json
from vla_rl.evaluation.report import Cell, Recording, Report, Tile, mean_text, percent
from vla_rl.evaluation.results import TABLES, EpisodeResult, Journal, write_tables
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.policies.vla.checkpoint import is_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import sims
from vla_rl.recipes.deployed import check_instructions, fingerprint
from vla_rl.recipes.progress import bar
from vla_rl.recipes.shared_disk import SharedDisk
from vla_rl.recipes.suite import Suite, SuiteTask, differing
from vla_rl.recipes.suite_comparison import RESULTS
from vla_rl.recipes.suite_player import VIDEOS, Block
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


PAGE = "report.html"


def write_suite_report(folder: Path, suite: Suite, results: JsonObject, episodes: Sequence[EpisodeResult]) -> Path:
    """Write the page into ``folder``; returns its path."""
    policy = results["policy"]
    report = Report(f"{policy['name']} on {suite.name}", f"Protocol `{results['protocol']}`.")
    tasks = "1 task" if len(suite.tasks) == 1 else f"{len(suite.tasks)} tasks"
    count, seeds = suite.episodes, f"{suite.episodes} seeds from {suite.first_seed}"
    tiles = []
    if "score" in results:
        tiles.append(Tile.of("success", Rate(**results["score"]), f"{tasks}, {seeds} each"))
    latency = results["latency_ms"]
    tiles.append(Tile("ms per decision", latency["mean"], percent=False, note=f"at most {latency['max']:.1f}"))
    report.tiles(tiles)
    suite.draw(report, results)
    report.section("Tasks", "95 % Wilson intervals; mean returns with 95 % intervals from 64 episodes on.")
    header = ["task", "success", "mean return", "mean length", "ends"]
    report.table(header, [_row(name, task) for name, task in results["tasks"].items()], f"{count} episodes each.")
    for name, said in results.get("remarks", {}).items():
        report.text(f"{name}: {' '.join(said)}")
    shown = suite.shown(results)
    if films := [_film(folder, one) for one in episodes if one.video and one.task in shown]:
        report.videos("Videos", films)
    report.section("Versions", ", ".join(f"{name} {version}" for name, version in results["versions"].items()))
    report.text(f"Policy: `{policy['name']}`, SHA-256 `{policy['sha256'] or 'none'}`, on {policy['device']}.")
    return report.write(folder / PAGE)


def _film(folder: Path, episode: EpisodeResult) -> Recording:
    label = f"{episode.task}, seed {episode.seed}: {episode.cause.replace('_', ' ')}"
    return Recording(folder / episode.video, label, episode.success)


def _row(name: str, task: JsonObject) -> list[Cell]:
    ends = ", ".join(f"{cause.replace('_', ' ')} {count}" for cause, count in task["causes"].items())
    earned = task["returns"]
    mean = mean_text(earned["mean"], earned["low"], earned["high"])
    rate = percent(Rate(*(task[key] for key in ("success", "low", "high", "episodes")))) if "success" in task else None
    return [name, rate, mean, round(task["mean_length"], 1), ends]


_SAID = ("success", "length", "returns")
_PACKAGES = ("numpy", "torch", "mujoco", "gymnasium")


def results_of(suite: Suite, policy: JsonObject, episodes: Sequence[EpisodeResult]) -> JsonObject:
    """Protocol, policy, score and tasks with their intervals, latency and versions.

    Every task has equally many episodes, so the score over all episodes is the mean over tasks.  Its Wilson interval is
    that of one pooled rate, which is wider than necessary when tasks differ: strata only reduce the variance.
    """
    of_task = {task.name: [one for one in episodes if one.task == task.name] for task in suite.tasks}
    rated = [task for task in suite.tasks if task.success is not None]
    decisions = np.array([episode.decisions for episode in episodes])
    mean_ms = np.array([episode.mean_ms for episode in episodes])
    results: JsonObject = {
        "protocol": suite.protocol,
        "policy": policy,
        "tasks": {task.name: _task(task, of_task[task.name]) for task in suite.tasks},
        "latency_ms": {
            "mean": round(float((mean_ms * decisions).sum() / decisions.sum()), 3),
            "max": round(max(episode.max_ms for episode in episodes), 3),
        },
        "suite": to_json(suite),
        "versions": _versions(suite),
    }
    if said := {task.name: found for task in suite.tasks if (found := remarks(of_task[task.name]))}:
        results["remarks"] = said
    if rated:
        wins = [one.success for task in rated for one in of_task[task.name]]
        results["score"] = asdict(Rate.of(wins))
    return results


def remarks(episodes: Sequence[EpisodeResult]) -> list[str]:
    """What can hardly be meant about the ``episodes`` of one task, as ``vla-rl eval`` says it of a checkpoint's."""
    success, length, returns = (np.array([getattr(one, name) for one in episodes]) for name in _SAID)
    causes, family = tuple(one.cause for one in episodes), ("",) * len(episodes)
    return Outcomes(np.arange(len(episodes)), success, causes, length, family, returns).remarks(math.inf)


def _task(task: SuiteTask, episodes: Sequence[EpisodeResult]) -> JsonObject:
    found: JsonObject = asdict(Rate.of([one.success for one in episodes])) if task.success is not None else {}
    found["returns"] = asdict(MeanReturn.of([one.returns for one in episodes]))
    found["mean_length"] = float(np.mean([one.length for one in episodes]))
    found["causes"] = dict(Counter(one.cause for one in episodes).most_common())
    return found


def _versions(suite: Suite) -> JsonObject:
    """Of what is installed here, and of the simulators of the suite that have installations of their own."""
    found = {"vla-rl": __version__, "contract": str(CONTRACT_VERSION), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # not installed here, so nothing was measured with it
    played = {task.env.name for task in suite.tasks}
    own = [made for made in sims.installations().known() if made.name in played]
    found |= {f"{made.name}'s installation": made.version() for made in own if made.version()}
    return found
