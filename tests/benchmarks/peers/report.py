"""The table of ``make peers``: what each learner spent, and how many times as much as ours, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.benchmarks.peers.race import Row

RESAMPLES, BOOTSTRAP_SEED = 10_000, 0
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
    """``sum(other) / sum(ours)`` over the same seeds, with the 95 % percentile interval of resampled seeds.

    A resample draws seeds, and with each the numbers of both, as they are paired.
    """
    a, b = np.asarray(ours, float), np.asarray(other, float)
    draws = np.random.default_rng(BOOTSTRAP_SEED).integers(len(a), size=(RESAMPLES, len(a)))
    low, high = np.quantile(b[draws].sum(1) / a[draws].sum(1), [0.025, 0.975])
    return float(b.sum() / a.sum()), float(low), float(high)


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
        "faster; its interval is a bootstrap over seeds, paired. A learner that did not reach the return is charged "
        "what it spent until it was stopped. RLinf is not in the table: version 0.3.0 has none of Gymnasium's "
        f"locomotion tasks and trains by `torch.cuda`.\n\n```sh\n{command}\n```\n\n{about}\n"
    )
