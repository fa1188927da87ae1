"""Evaluates a policy on a suite: in parallel, and where an earlier evaluation in the same folder was stopped."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from threading import Lock

import numpy as np

from vla_rl import __version__
from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.config import JsonObject, check_limits, to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json
from vla_rl.evaluation.report import Bar, Cell, Recording, Report, Tile, mean_text, percent
from vla_rl.evaluation.results import EPISODES, TABLES, EpisodeResult, Journal, read_episodes, write_tables
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import MeanReturn, Rate, episodes_needed, independent_discordance, pairs_of
from vla_rl.policies.vla.checkpoint import is_public
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import sims
from vla_rl.recipes.policies import check_instructions, fingerprint
from vla_rl.recipes.suite import VIDEOS, Block, Suite, SuiteTask, differing
from vla_rl.recipes.terminal import bar
from vla_rl.recipes.workers import SharedDisk, chosen_engine, worker_processes, workers
from vla_rl.training.device import resolve_device
from vla_rl.training.tracking import lock_run, unlock_run, write_json

_SUITE = "suite.json"


@dataclass(frozen=True)
class SuiteRun:
    """``policy`` (a text, see ``recipes/policies.py``) on ``suite``, with its results in ``out``.

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
        with ExitStack() as at_the_end:
            at_the_end.callback(unlock_run, self.out, lock_run(self.out))
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
                for block in blocks:
                    block.play(note)
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


PAGE = "report.html"


def write_suite_report(folder: Path, suite: Suite, results: JsonObject, episodes: Sequence[EpisodeResult]) -> Path:
    """Write the page into ``folder``; returns its path."""
    policy = results["policy"]
    report = Report(f"{policy['name']} on {suite.name}", f"Protocol `{results['protocol']}`.")
    tasks = "1 task" if len(suite.tasks) == 1 else f"{len(suite.tasks)} tasks"
    count, seeds = suite.episodes, f"{suite.episodes} seeds from {suite.first_seed}"
    score, latency = results.get("score"), results["latency_ms"]
    tiles = [Tile.of("success", Rate(**score), f"{tasks}, {seeds} each")] if score else []
    took = Tile("ms per decision", latency["mean"], percent=False, note=f"at most {latency['max']:.1f}")
    report.tiles([*tiles, took])
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
    earned, rate = task["returns"], rate_of(task)
    mean = mean_text(earned["mean"], earned["low"], earned["high"])
    return [name, percent(rate) if rate else None, mean, round(task["mean_length"], 1), ends]


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
    if said := {task.name: found for task in suite.tasks if (found := _remarks(of_task[task.name]))}:
        results["remarks"] = said
    if rated:
        wins = [one.success for task in rated for one in of_task[task.name]]
        results["score"] = asdict(Rate.of(wins))
    return results


def _remarks(episodes: Sequence[EpisodeResult]) -> list[str]:
    """What can hardly be meant about the ``episodes`` of one task, as ``vla-rl eval`` says it of a checkpoint's."""
    rows = [(one.seed, one.success, one.cause, one.length, "", one.returns) for one in episodes]
    seeds, success, causes, length, family, returns = zip(*rows, strict=True)
    arrays = np.array(seeds), np.array(success), causes, np.array(length), family, np.array(returns)
    return Outcomes(*arrays).remarks(math.inf)


def _task(task: SuiteTask, episodes: Sequence[EpisodeResult]) -> JsonObject:
    rate = asdict(Rate.of([one.success for one in episodes])) if task.success is not None else {}
    return {
        **rate,
        "returns": asdict(MeanReturn.of([one.returns for one in episodes])),
        "mean_length": float(np.mean([one.length for one in episodes])),
        "causes": dict(Counter(one.cause for one in episodes).most_common()),
    }


def rate_of(task: JsonObject) -> Rate | None:
    """The success of a task, or of all, in ``results.json``; None where there is none."""
    return Rate(*(task[key] for key in ("success", "low", "high", "episodes"))) if "success" in task else None


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


RESULTS, COMPARISON = "results.json", "comparison.json"
ALL = "all"  # the row of all tasks together


def read_results(folder: Path) -> JsonObject:
    """``results.json`` of a finished evaluation; raises UserError when there is none or it is damaged."""
    path = folder / RESULTS
    if not path.is_file():
        raise UserError(
            f"{str(folder)!r} has no {RESULTS}, so it holds no finished evaluation of a suite; name the folder that "
            "vla-rl eval --suite wrote."
        )
    try:
        found = read_json(path)
        return {**found, "protocol": found["protocol"], "tasks": found["tasks"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{str(path)!r} is damaged ({error}), so its results cannot be read; run the evaluation again, which makes "
            "it from the journal."
        ) from error


def compare(first: Path, second: Path) -> JsonObject:
    """Compare ``first`` with ``second`` on the same episodes; writes ``comparison.json`` and ``.html`` into ``first``.

    Raises UserError when they were played by different protocols.
    """
    ours, theirs = read_results(first), read_results(second)
    if ours["protocol"] != theirs["protocol"]:
        difference = differing(ours["suite"], theirs["suite"]) or f"{ours['protocol']} or {theirs['protocol']}"
        raise UserError(
            f"{str(first)!r} and {str(second)!r} were played by different protocols ({difference}), so their numbers "
            "cannot be compared; evaluate both by one suite."
        )
    episodes = _episodes(first, ours), _episodes(second, theirs)
    judged = {name: "success" in task for name, task in ours["tasks"].items()}
    pairs = {}
    for name, rated in judged.items():
        ours_of, theirs_of = ([one for one in side if one.task == name] for side in episodes)
        pairs[name] = pairs_of(ours_of, theirs_of, rated)
    if len(pairs) > 1 and all(judged.values()):
        pairs[ALL] = pairs_of(*episodes, by_success=True)
    found: JsonObject = {
        "protocol": ours["protocol"],
        "first": ours["policy"],
        "second": theirs["policy"],
        "tasks": {name: {**asdict(one), "rates": _rates(name, ours, theirs)} for name, one in pairs.items()},
    }
    write_json(first / COMPARISON, found)
    _page(first, found)
    return found


def _episodes(folder: Path, results: JsonObject) -> list[EpisodeResult]:
    """The episodes of a finished evaluation; raises UserError when the table lacks some of them."""
    found = read_episodes(folder)
    expected = sum(task["returns"]["episodes"] for task in results["tasks"].values())
    if len({episode.key for episode in found}) != expected:
        raise UserError(
            f"{str(folder / EPISODES)!r} has {len(found)} episodes of {expected}, so they cannot be paired; run the "
            "evaluation again, which makes the table from its journal."
        )
    return found


def _rates(name: str, *results: JsonObject) -> list[JsonObject]:
    """Both policies' rates of a task; none where there is no success."""
    rates = [rate_of(one["score"] if name == ALL else one["tasks"][name]) for one in results]
    return [asdict(rate) for rate in rates if rate]


def _page(folder: Path, found: JsonObject) -> None:
    names = [found[side]["name"] for side in ("first", "second")]
    report = Report(f"{names[0]} against {names[1]}", f"Protocol `{found['protocol']}`, the same seeds.")
    text = (
        f"First: `{names[0]}`. Second: `{names[1]}`.\n\n"
        "Difference: first minus second, with its 95 % interval: Tango's score interval of successes; of returns a "
        "bootstrap of pairs within tasks, from 64 pairs on. p: McNemar's exact two-sided test, not corrected for the "
        "number of tasks."
    )
    report.section("Tasks", text)
    header = ["task", "first", "second", "difference", "first alone", "second alone", "p"]
    report.table(header, [row(name, task) for name, task in found["tasks"].items()])
    bars = [
        Bar(label, rate["success"], rate["low"], rate["high"], group=name)
        for name, task in found["tasks"].items()
        for label, rate in zip(("first", "second"), task["rates"], strict=False)
    ]
    if bars:
        report.bars("Success", bars)
    report.write(folder / "comparison.html")


def row(name: str, task: JsonObject) -> list[Cell]:
    """The cells of a comparison's table: task, both rates, difference, discordant pairs, p."""
    found = task["difference"]
    if task["p_value"] is None:
        return [name, None, None, mean_text(found["mean"], found["low"], found["high"]), None, None, None]
    rates = [percent(Rate(**rate)) for rate in task["rates"]]
    difference = f"{found['mean']:+.1%} [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    return [name, *rates, difference, task["first_alone"], task["second_alone"], f"{task['p_value']:.2g}"]


# -- power -------------------------------------------------------------------------------------------------------------

COMMON_RATES = (0.5, 0.7, 0.8, 0.9, 0.95)  # of a policy that has not been evaluated


def needed_from(rate: float, difference: float) -> tuple[int, int] | None:
    """Episodes if outcomes are independent, and if one policy wins wherever the other does; from the success of one.

    The other has ``rate + difference``, or ``rate - difference`` where that would be more than 1; None where neither
    can be.
    """
    other = rate + difference if rate + difference <= 1 else rate - difference
    if other < 0:
        return None
    independent = independent_discordance(rate, other - rate)
    return episodes_needed(difference, independent), episodes_needed(difference, difference)


def needed_between(task: JsonObject, difference: float) -> int:
    """Episodes that ``difference`` takes between two compared policies, by their measured share of discordant pairs."""
    measured = (task["first_alone"] + task["second_alone"]) / task["episodes"]
    return episodes_needed(difference, max(measured, difference))
