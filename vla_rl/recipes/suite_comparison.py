"""Compares the results of two evaluations of one suite, and says how many episodes a difference takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json
from vla_rl.evaluation.paired import pairs_by_task, pairs_of
from vla_rl.evaluation.power import episodes_needed, independent_discordance
from vla_rl.evaluation.report import Bar, Cell, Report, mean_text, percent
from vla_rl.evaluation.results import EPISODES, EpisodeResult, read_episodes
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.suite import differing
from vla_rl.training.tracking import write_json

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
    pairs = pairs_by_task(*episodes, judged)
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
    tasks = [one["score"] if name == ALL else one["tasks"][name] for one in results]
    keys = ("success", "low", "high", "episodes")
    return [{key: task[key] for key in keys} for task in tasks if "success" in task]


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

_BASES = (0.5, 0.7, 0.8, 0.9, 0.95)


def power_table(difference: float, rates: Sequence[float] = _BASES) -> list[tuple[float, int, int]]:
    """(success, episodes if outcomes are independent, if one policy wins wherever the other does) for each rate.

    The other policy has ``success + difference``, or ``success - difference`` where that would be more than 1; rates
    that leave no room for either are left out.
    """
    alike = episodes_needed(difference, difference)
    rows = []
    for rate in rates:
        other = rate + difference if rate + difference <= 1 else rate - difference
        if other >= 0:
            rows.append((rate, episodes_needed(difference, independent_discordance(rate, other - rate)), alike))
    return rows


def needed_between(task: JsonObject, difference: float) -> int:
    """Episodes that ``difference`` takes between two compared policies, by their measured share of discordant pairs."""
    measured = (task["first_alone"] + task["second_alone"]) / task["episodes"]
    return episodes_needed(difference, max(measured, difference))
