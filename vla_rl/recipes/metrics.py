"""What the metrics of a run say, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows(run: Path, stage: str = "") -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, of one stage if it is named."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if not stage or row["stage"] == stage]


def watched(run: Path) -> list[dict[str, Any]]:
    """The validations of RL: episodes it had learnt from by then, success, and how many were played to tell."""
    found, episodes = [], 0
    for row in rows(run, "rl"):
        episodes += int(row.get("episodes", 0))
        if "validation" in row:
            seen = {"success": row["validation"], "low": row["validation_low"], "high": row["validation_high"]}
            found.append({"episodes": episodes, "played": int(row["validation_episodes"]), **seen})
    return found
