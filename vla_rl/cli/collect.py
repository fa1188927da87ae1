"""``vla-rl collect [--world.env NAME] [--count N] [--seed S] [--out FILE.npz]``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vla_rl.cli import stages
from vla_rl.cli.configs import override
from vla_rl.cli.progress import console
from vla_rl.cli.world import World


@dataclass(frozen=True)
class Collect:
    """Record demonstrations of the scripted expert; failures are left out."""

    world: World = field(default_factory=World)
    count: int = 30
    seed: int = 1  # of the training run that they are for
    out: str = "runs/demonstrations.npz"


def collect(arguments: Sequence[str]) -> None:
    """Record and save."""
    config: Collect = override(Collect(), arguments, "vla-rl collect")
    episodes = stages.collect(config.world, config.count, config.seed)
    episodes.save(Path(config.out))
    console.print(f"{episodes.count} episodes, {len(episodes.state)} control steps: {config.out}")
