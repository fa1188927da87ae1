"""Reads the metrics and the result of a run from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.contract.config import JsonMapping, JsonObject
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json
from vla_rl.evaluation.report import Series
from vla_rl.training.tracking import read_metrics

SCORE, BAND = "eval/score", ("eval/score_low", "eval/score_high")
_OLD_NAMES = {"validation", "env_steps_total", "env_steps"}  # before metrics had prefixes


def rows(run: Path, stage: str = "") -> list[JsonObject]:
    """The lines of ``metrics.jsonl``, of one stage if it is named; none where nothing was logged.

    Raises UserError for a damaged line, and for a run whose metrics have the names of an older version.
    """
    found = [row for row in read_metrics(run) if not stage or row["stage"] == stage]
    if old := sorted({name for row in found for name in _OLD_NAMES & row.keys()}):
        raise UserError(
            f"the metrics in {str(run)!r} have names of an older vla-rl ({', '.join(old)}), so they would be misread; "
            "report that run with the version that wrote it, or run it again."
        )
    return found


def summary(run: Path) -> JsonObject:
    """The result of the finished run in the folder ``run``."""
    return read_json(run / "summary.json")


def validation_curve(name: str, lines: Sequence[JsonObject], clock: str, family: str = "") -> Series:
    """Validation success over ``clock``, an entry of the lines: with its interval, or of one kind of task."""
    key = f"eval/{family}" if family else SCORE
    found = [line for line in lines if key in line and clock in line]
    return curve_of(name, found, clock, key, *(() if family else BAND))


def curve_of(name: str, lines: Sequence[JsonMapping], x: str, y: str, *ends: str) -> Series:
    """A line from entries of ``lines``; the band of both ``ends`` where all have one (few returns have no interval)."""
    band = [[line[end] for line in lines] for end in ends if all(line.get(end) is not None for line in lines)]
    return Series(name, [line[x] for line in lines], [line[y] for line in lines], *(band if len(band) == 2 else ()))


def watched(run: Path) -> list[JsonObject]:
    """The validations of RL: what was spent before each, its success rate, and its number of episodes (``played``)."""
    found, episodes = [], 0
    for row in rows(run, "rl"):
        episodes += int(row.get("rollout/episodes", 0))
        if "eval/score" in row:
            rate = {"success": row["eval/score"], "low": row["eval/score_low"], "high": row["eval/score_high"]}
            before = {"env_steps": int(row["env/steps_total"]), "episodes": episodes, "elapsed_s": row["elapsed_s"]}
            found.append(before | {"played": int(row["eval/episodes"])} | rate)
    return found
