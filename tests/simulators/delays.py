"""``python -m tests.simulators.delays RUN [EPISODES] [MS ...]``: ways to execute chunks, and what delay costs them.

A flow policy drives the simulated SO-101 as ``vla-rl robot run simulated --speed 1 --delay MS`` does: through executor
and supervisor, in lock-step, on the first EPISODES test scenes, the same for every way of execution.  A line holds
success with its Wilson interval (95 %), the largest acceleration of a joint in an episode, as it was requested and as
it was executed (median of the episodes and largest), the share of control steps in which the supervisor changed a
joint's request, and how many steps an episode takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from robot_drivers.record import ControlStep
from vla_rl.contract.intervals import wilson
from vla_rl.evaluation.seed_ranges import TEST, held_out
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.person import waiting
from vla_rl.recipes.robots.session import open_session
from vla_rl.recipes.terminal import console

STEPS = 8  # actions of a chunk before the next is asked for, with a receding horizon
SEED = 1  # of the policy's noise: that of ``vla-rl robot run`` unless it is told another
DELAYS = (0, 120, 200, 320)  # ms
WAYS = {  # --execution and --real-time
    "open loop": ("open_loop", ""),
    "receding horizon": ("receding_horizon", ""),
    "temporal ensembling": ("temporal_ensembling", ""),
    "real-time chunking, identity": ("receding_horizon", "identity"),
    "real-time chunking, vjp": ("receding_horizon", "vjp"),
}
HEADER = (
    "| delay (ms) | execution | success | acceleration requested (rad/s²) | executed | clipped | steps |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Episode:
    """What one episode was like; accelerations in rad/s², of the joints without the gripper."""

    success: bool
    requested: float
    executed: float
    clipped: int
    steps: int

    @classmethod
    def of(cls, seen: Sequence[ControlStep], dt: float) -> Episode:
        """The measures of the control steps ``seen``."""
        records = [one.record for one in seen]
        asked = np.stack([record.requested for record in records])
        executed = np.stack([record.executed for record in records])
        return cls(
            records[-1].outcome == "success",
            acceleration(asked[np.isfinite(asked).all(axis=1)], dt),
            acceleration(executed, dt),
            sum(bool(record.clipped.any()) for record in records),
            len(records),
        )


def acceleration(positions: np.ndarray, dt: float) -> float:
    """The largest second difference of ``positions`` [T,D] without the last joint."""
    return float(np.abs(np.diff(positions[:, :-1], 2, axis=0)).max(initial=0.0) / dt**2)


def play(policy: str, way: str, delay: int, episodes: int) -> list[Episode]:
    """The episodes of one way of execution with ``delay`` ms from an observation to its chunk."""
    how, real_time = WAYS[way]
    execution, config = drive.execution(how, STEPS, 1.0, delay / 1000), drive.robot_config(drive.SIMULATED)
    settings = drive.EpisodesConfig(policy, episodes, SEED, execution, real_time, "test")
    with closing(open_session(config, execution, waiting(console))) as session:
        decide, dt = drive.build_decider(session, config, settings), session.spec.control_dt
        scenes = enumerate(held_out(TEST, episodes), 1)
        return [Episode.of(list(session.play(decide, number, seed)), dt) for number, seed in scenes]


def line(way: str, delay: int, played: Sequence[Episode]) -> str:
    """A line of the table."""
    success, steps = sum(one.success for one in played), sum(one.steps for one in played)
    low, high = wilson(success, len(played))
    asked, executed = ([getattr(one, name) for one in played] for name in ("requested", "executed"))
    cells = (
        str(delay),
        way,
        f"{success / len(played):.1%} [{low:.1%}, {high:.1%}]",
        *(f"{np.median(one):.0f} ({max(one):.0f})" for one in (asked, executed)),
        f"{sum(one.clipped for one in played) / steps:.0%}",
        f"{steps / len(played):.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main(policy: str, episodes: int, delays: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    print(HEADER)
    for delay in delays:
        for way in WAYS:
            print(line(way, delay, play(policy, way, delay, episodes)), flush=True)


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    main(name, int(numbers[0]) if numbers else 100, tuple(map(int, numbers[1:])) or DELAYS)
