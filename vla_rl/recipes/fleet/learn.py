"""The learner behind a fleet's server: what it learns from, how often, and when robots get what it has learnt."""

from __future__ import annotations

import math
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from vla_rl.contract.config import check_limits, check_positive, to_json
from vla_rl.fleet.canary import CanaryRule
from vla_rl.recipes.config_files import keep_file, read_config
from vla_rl.recipes.fleet.learners import FleetMethod
from vla_rl.training.tracking import RunFolder

LEARNER = "learner"  # its run, in a fleet's folder


@dataclass(frozen=True)
class Learn:
    """What ``vla-rl serve FOLDER --learn FILE.py:function`` runs beside the server.

    Every update is a gradient step.  A version that was learnt is first tried by the share of robots that ``canary``
    says, and promoted when its success does not lie below that of the version in use.

    updates_per_second  at most; the same as of ``vla-rl fleet simulate``, which foretells what it does
    turn                updates between two looks at what robots have sent (SOP: 25)
    publish_every       updates between two versions
    rest_after          seconds without a new episode after which it waits for the next one
    patience            seconds for a trial; one that takes longer gives way to a newer version
    """

    method: FleetMethod
    policy: str  # the checkpoint that the fleet begins with
    demonstrations: str  # the dataset that it has imitated
    updates_per_second: float = 8.0
    turn: int = 25
    publish_every: int = 200
    rest_after: float = 60.0
    patience: float = 600.0
    canary: CanaryRule = field(default_factory=CanaryRule)
    seed: int = 1
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        check_limits(self, turn=(1, math.inf), publish_every=(1, math.inf))
        check_positive(self, "updates_per_second", "rest_after", "patience")


def prepare(config: Learn, fleet: Path, source: Path | None) -> Path | None:
    """Have the run of ``config`` in the folder ``fleet``; returns where an earlier one of another config is now.

    One of the same config goes on.
    """
    path = fleet / LEARNER
    if (path / "config.json").exists() and to_json(read_config(path)) == to_json(config):
        return None
    with closing(RunFolder(path, config)) as run:
        if source is not None:
            keep_file(source, path)
        return run.moved_to


def command(fleet: Path, key: Path) -> tuple[str, ...]:
    """The program of the learner that was prepared, which signs with the key in the file ``key``."""
    return sys.executable, "-m", "vla_rl.recipes.fleet.learning", str(fleet), str(key)
