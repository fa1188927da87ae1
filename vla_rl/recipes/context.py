"""What every trainer is built from: the environment, the policy that the run starts from, the seed, the processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.recipes.env_config import EnvFactory
from vla_rl.training.loop import LoopConfig
from vla_rl.training.sharding import ShardedGroup

CPU = torch.device("cpu")


def generator(seed: int, stream: int) -> torch.Generator:
    """An independent generator per seed and purpose, so that a change in one stage leaves the others alone."""
    return torch.Generator().manual_seed(1_000_003 * stream + seed)


class Trainable(Policy, Protocol):
    """A policy that learns and can be saved, and on which heads can be built (``vla_rl/policies/heads.py``)."""

    spec: EnvSpec

    @property
    def feature_sizes(self) -> dict[str, int]:
        """The entries of ``encode`` that a critic reads, with their flattened sizes; critics add ``time``."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that an algorithm may change, by name."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that names the class, see ``vla_rl/pretrained.py``."""


T = TypeVar("T")


def placed(policy: T, device: torch.device) -> T:
    """``policy`` with its weights on ``device``; what is no network has none."""
    if isinstance(policy, nn.Module):
        policy.to(device)
    return policy


@dataclass(frozen=True)
class RunContext:
    """The surroundings of one training run.

    env             makes the environments, simulated or imagined
    base            the policy that the run starts from; None when the config builds one from nothing
    group           the processes that share the work
    demonstrations  folder of a dataset; "" for none
    device          where policy, critic, learner and replay are
    collector       number of the process that collects, of the ``collectors`` that each learning process has
    """

    env: EnvFactory
    base: Trainable | None
    seed: int
    group: Reducer
    demonstrations: str = ""
    device: torch.device = CPU
    collector: int = 0
    collectors: int = 1

    @property
    def part(self) -> int:
        """The number of this share of the environments, seeds and exploration among ``parts``."""
        return self.group.rank * self.collectors + self.collector

    @property
    def parts(self) -> int:
        """How many processes collect, in all."""
        return self.group.size * self.collectors

    def for_policy(self) -> RunContext:
        """The same, but on the host where processes share the weights, until :meth:`share` has cut them."""
        return replace(self, device=CPU) if isinstance(self.group, ShardedGroup) else self

    def share(self, policy: T, loop: LoopConfig) -> T:
        """``policy``, of which each process keeps a share on its device in a sharded run.

        Raises UserError for a policy that cannot be shared, and where other processes would collect with it.
        """
        if isinstance(self.group, ShardedGroup):
            if loop.collectors > 1 or loop.staleness:
                raise UserError(
                    "a sharded policy acts in the processes that hold its weights, at the time when all of them do, "
                    "so nobody else can collect; leave collectors at 1 and staleness at 0."
                )
            self.group.shard(policy, self.device)
        return policy

    def split(self, collectors: int) -> list[RunContext]:
        """A context for each of this process's ``collectors``; raises UserError for less than one."""
        if collectors < 1:
            raise UserError(f"{collectors} collectors collect nothing; set loop.collectors to at least 1.")
        return [replace(self, collector=i, collectors=collectors) for i in range(collectors)]

    def start(self, needed_by: str) -> Trainable:
        """``base``; raises UserError when there is none or when it lacks what heads and critics read."""
        if self.base is None:
            raise UserError(
                f"{needed_by} is built on another policy and none was given, so it cannot be built; add --policy with "
                "a checkpoint folder or module:Class."
            )
        lacking = [name for name in ("spec", "feature_sizes", "encode") if not hasattr(self.base, name)]
        if lacking:
            raise UserError(
                f"{type(self.base).__name__} has no {lacking[0]}, so {needed_by} cannot be built on it; see "
                "vla_rl.policies.heads.ObservationEncoder."
            )
        return self.base

    def episodes(self, needed_by: str) -> Demonstrations:
        """The demonstrations; raises UserError when there are none."""
        if not self.demonstrations:
            raise UserError(
                f"{needed_by} needs demonstrations and none were given, so it cannot learn; add --demonstrations "
                "FOLDER."
            )
        return load_demonstrations(Path(self.demonstrations))

    def seeds(self) -> SeedStream:
        """The training seeds of this share: every ``parts``-th, from number ``part``."""
        seeds = seed_ranges.training_seeds(self.seed, "reinforcement")
        return SeedStream(seeds.start + self.part, seeds.stop, self.parts)

    def exploration(self) -> torch.Generator:
        """The generator of this share's exploration."""
        return generator(self.seed, 5 + 100 * self.part)
