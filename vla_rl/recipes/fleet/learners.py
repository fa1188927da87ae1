"""The learners of a fleet in virtual time, as configs build them from a policy and its demonstrations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from vla_rl.algorithms.chunks import FamiliesEqually
from vla_rl.algorithms.hg_dagger import HGDagger, HGDaggerConfig
from vla_rl.algorithms.recap import Recap, RecapConfig
from vla_rl.contract.batch import Resumable, Rollout
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Mode, Policy
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.fleet.episodes import FleetEpisode
from vla_rl.fleet.sampler import SamplerConfig
from vla_rl.policies.advantage_conditioned import AdvantageConditioned, ConditionedFlow
from vla_rl.policies.distributional_value import DistributionalValue
from vla_rl.recipes.context import Trainable, generator
from vla_rl.recipes.fleet.balance import balanced
from vla_rl.recipes.fleet.recorded import fleet_rollout, recorded_rollout
from vla_rl.recipes.imitation import ImitatingPolicy, demonstrated_chunks, encode_episodes

_STREAM = 4  # of the learner's generator


class FleetLearner(Resumable, Protocol):
    """A learner that says separately what it has to learn from, and how often it learns."""

    @property
    def policy(self) -> Policy:
        """What it changes."""

    def add(self, rollout: Rollout) -> int:
        """Keep ``rollout``; returns how many of its decisions."""

    def learn(self, steps: int) -> dict[str, float]:
        """So many gradient steps; returns metrics, none when there is nothing to learn from."""


class FleetMethod(Protocol):
    """The frozen dataclass of one way to learn from a fleet."""

    @property
    def mode(self) -> Mode:
        """How robots act in virtual time: "eval" as they would be deployed, "sample" with exploration."""

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> FleetLearner:
        """The learner of ``base``, which it changes, with the ``episodes`` that ``base`` has imitated."""

    def rollout(self, policy: Any, episode: FleetEpisode, known: Collection[int]) -> Rollout:
        """What a robot sent, for the learner's ``add``; ``policy`` is the learner's.

        ``known``: the versions of the fleet's policy; a robot that ran another policy counts as one of version 0.
        Raises ContractError for an episode of a task that the policy does not have.
        """


class LearnsChunks:
    """The part that learners of chunks share: robots act as deployed, and every control step begins a chunk."""

    @property
    def mode(self) -> Mode:
        """See ``FleetMethod``."""
        return "eval"

    def rollout(self, policy: Any, episode: FleetEpisode, known: Collection[int]) -> Rollout:
        """See ``FleetMethod``."""
        return fleet_rollout(policy, episode, known)


@dataclass(frozen=True)
class LearnByCorrections(LearnsChunks):
    """HG-DAgger: what a person did is imitated, beside the demonstrations; families of tasks are equally likely."""

    algorithm: HGDaggerConfig = field(default_factory=HGDaggerConfig)

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> HGDagger:
        """Raises UserError for a policy without a loss for every action."""
        flow = cast(ImitatingPolicy, base)
        recorded = demonstrated_chunks(flow, episodes, encode_episodes(base, episodes), flow.horizon)
        spec = flow.spec
        equally = FamiliesEqually([spec.family(task) for task in range(len(spec.tasks))])
        return HGDagger(base, base.trainable(), recorded, self.algorithm, generator(seed, _STREAM), equally)


@dataclass(frozen=True)
class LearnByAdvantage(LearnsChunks):
    """RECAP: everything is imitated, told how good it was; the policy acts as if the next decision were good."""

    algorithm: RecapConfig = field(default_factory=RecapConfig)
    balance: SamplerConfig = field(default_factory=SamplerConfig)  # of tasks and kinds of data, in the policy's batches
    guidance: float = 1.0  # see AdvantageConfig

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> Recap:
        """Raises UserError for a policy without one vector that conditions its field."""
        if not isinstance(base, ConditionedFlow):
            raise UserError(
                f"{type(base).__name__} has no condition and conditioned_field, so RECAP cannot tell it how good a "
                "decision was; use a TinyVLA, or add them."
            )
        policy = AdvantageConditioned(base)
        policy.config = replace(policy.config, guidance=self.guidance)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            value = DistributionalValue({**base.feature_sizes, "time": 1})
        rng = generator(seed, _STREAM)
        spec = base.spec
        sampler = balanced(self.balance, [spec.family(task) for task in range(len(spec.tasks))])
        learner = Recap(policy, policy.trainable(), value, spec.time_limit, self.algorithm, rng, sampler)
        learner.add(recorded_rollout(policy, episodes))
        return learner
