"""The table of ``make peers``: what each learner spent, and how many times as much as ours, with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.benchmarks.peers.race import Row
from vla_rl.contract.intervals import student

OURS = "ours"
HEADS = (
    "task",
    "learner",
    "seeds that reached it",
    "control steps, mean",
    "CPU seconds, mean",
    "wall seconds, mean",
    "CPU / ours [95 %]",
    "wall / ours [95 %]",
)


def ratio(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """``sum(other) / sum(ours)`` over the same seeds, with its 95 % interval by Fieller's theorem (1954).

    All ratios ``r`` with a mean of ``other - r ours``, which are paired, that Student's t does not tell from 0; without
    a bound where ours may be 0 itself, and of a single seed.
    """
    a, b = np.asarray(ours, float), np.asarray(other, float)
    middle = float(b.sum() / a.sum())
    if len(a) < 2:
        return middle, 0.0, math.inf
    x, y, t = float(a.mean()), float(b.mean()), student(len(a) - 1) ** 2 / len(a)
    (xx, xy), (_, yy) = np.cov(a, b).tolist()
    square, product = x * x - t * xx, x * y - t * xy
    if square <= 0.0:
        return middle, 0.0, math.inf
    half = math.sqrt(max(0.0, product**2 - square * (y * y - t * yy)))
    return middle, (product - half) / square, (product + half) / square


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The lines under ``HEADS``; ratios are over the seeds that both have finished."""
    cells = {row.key: row for row in rows}
    lines = []
    for task in dict.fromkeys(row.task for row in rows):
        for peer in sorted({row.peer for row in rows if row.task == task}, key=lambda name: (name != OURS, name)):
            own = [row for row in rows if (row.task, row.peer) == (task, peer)]
            pairs = [(cells[task, OURS, row.seed], row) for row in own if (task, OURS, row.seed) in cells]
            means = [np.mean([getattr(row, name) for row in own]) for name in ("steps", "cpu_seconds", "seconds")]
            reached = f"{sum(row.reached for row in own)} of {len(own)}"
            numbers = (f"{means[0]:,.0f}", f"{means[1]:.1f}", f"{means[2]:.1f}")
            compared = [_ratio(pairs, name) for name in ("cpu_seconds", "seconds")]
            lines.append((task, peer, reached, *numbers, *compared))
    return lines


def _ratio(pairs: Sequence[tuple[Row, Row]], name: str) -> str:
    if not pairs or pairs[0][1].peer == OURS:
        return ""
    middle, low, high = ratio(*([getattr(row, name) for row in side] for side in zip(*pairs, strict=True)))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def markdown(rows: Sequence[Row], machine: Mapping[str, Any], command: str) -> str:
    """A page: the table, the machine and the command."""
    lines = [HEADS, tuple("---" for _ in HEADS), *table(rows)]
    seeds = sorted({row.seed for row in rows})
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"# Peers, side by side\n\n{text}\n\nSeeds {', '.join(map(str, seeds))}. A ratio above 1 means that ours is "
        "faster; its interval is Fieller's, over seeds in pairs. A learner that did not reach the return is charged "
        "what it spent until it was stopped. RLinf is not in the table: version 0.3.0 has none of Gymnasium's "
        f"locomotion tasks and trains by `torch.cuda`.\n\n```sh\n{command}\n```\n\n{about}\n"
    )
