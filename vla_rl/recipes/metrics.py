"""Reads the metrics of a run from its folder."""

from __future__ import annotations

import json
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.recipes.json_types import JsonObject

_OLD_NAMES = {"validation", "env_steps_total", "env_steps"}  # before metrics had prefixes


def rows(run: Path, stage: str = "") -> list[JsonObject]:
    """The lines of ``metrics.jsonl``, of one stage if it is named.

    Raises UserError for a run whose metrics have the names of an older version.
    """
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row for row in map(json.loads, lines) if not stage or row["stage"] == stage]
    if old := sorted({name for row in found for name in _OLD_NAMES & row.keys()}):
        raise UserError(
            f"the metrics in {str(run)!r} have names of an older vla-rl ({', '.join(old)}), so they would be misread; "
            "report that run with the version that wrote it, or run it again."
        )
    return found


def watched(run: Path) -> list[JsonObject]:
    """The validations of RL: the training episodes before each, its success rate, and its number of episodes."""
    found, episodes = [], 0
    for row in rows(run, "rl"):
        episodes += int(row.get("rollout/episodes", 0))
        if "eval/score" in row:
            rate = {"success": row["eval/score"], "low": row["eval/score_low"], "high": row["eval/score_high"]}
            found.append({"episodes": episodes, "played": int(row["eval/episodes"]), **rate})
    return found
