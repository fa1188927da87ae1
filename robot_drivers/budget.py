"""How old what a policy decides on is, how late its decision comes, and which way of executing chunks that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from robot_drivers.findings import Finding
from robot_drivers.runtime import PATIENCE


@dataclass(frozen=True)
class PolicyTiming:
    """Decisions that were measured: seconds [N] of each, and how many actions their chunk has."""

    seconds: np.ndarray
    horizon: int


@dataclass
class Budget:
    """The parts of the delay that are known, in seconds: 99 % of them take at most so long.

    pictures     age of the camera's newest picture that is oldest; None without cameras
    measurement  what it takes to measure the joints; None where they do not answer
    """

    control_hz: float
    pictures: float | None = None
    measurement: float | None = None

    def findings(self, policy: PolicyTiming | None) -> Iterator[Finding]:
        """The latency in control steps and, of a policy that was measured, which execution fits."""
        parts = {"pictures": self.pictures, "joints": self.measurement}
        known = {name: part for name, part in parts.items() if part is not None}
        text = " + ".join(f"{name} {1e3 * part:.0f} ms" for name, part in known.items()) or "nothing was measured"
        before = sum(known.values())
        if policy is None:
            yield Finding("latency", f"{text}; with --policy CHECKPOINT its decisions are measured too")
            return
        half, most = (float(share) for share in np.quantile(policy.seconds, (0.5, 0.99)))
        delay = max(1, math.ceil(most * self.control_hz))
        total = math.ceil((before + most) * self.control_hz)
        text = f"{text} + decision {1e3 * half:.0f} ms (99 % at most {1e3 * most:.0f} ms)"
        late = f"{1e3 * (before + most):.0f} ms, {total} control steps of {1e3 / self.control_hz:.0f} ms"
        slow = most > PATIENCE
        cure = f"decisions later than {PATIENCE:g} s are not executed: take a faster computer or a smaller policy."
        yield Finding("latency", f"{text} = {late}", cure if slow else "")
        yield self._execution(delay, policy.horizon)

    def _execution(self, delay: int, horizon: int) -> Finding:
        """Whether a chunk lasts until the next one is there: D <= steps <= H - D (real-time chunking, Black et al.)."""
        lasts = f"a chunk has {horizon} actions ({horizon / self.control_hz:.2f} s) and comes {delay} steps late"
        if horizon >= 2 * delay:
            return Finding(
                "execution",
                f"{lasts}: receding_horizon and real-time chunking with --steps {delay} to {horizon - delay}, "
                f"temporal_ensembling; open_loop stands still for {delay} steps between chunks",
            )
        return Finding(
            "execution",
            f"{lasts}, so it is over before the next one is there",
            "run with --execution open_loop, or take a faster computer or a policy with longer chunks.",
        )
