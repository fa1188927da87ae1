"""The learners of a fleet, as configs build them from a policy, its demonstrations and the ledger's records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.chunks import DEMONSTRATED, Chunks, FamiliesEqually, HGDagger, HGDaggerConfig, ImitationPolicy
from vla_rl.algorithms.recap import Recap, RecapConfig
from vla_rl.contract.batch import Resumable, Rollout
from vla_rl.contract.policy import Mode, Policy
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.mixture import choose, key_of
from vla_rl.experience.rollout import side_by_side
from vla_rl.fleet.episodes import FleetEpisode
from vla_rl.fleet.sampler import CORRECTIONS, OFFLINE, ONLINE, STRATA, AdaptiveSampler, SamplerConfig
from vla_rl.policies.advantage_conditioned import AdvantageConditioned
from vla_rl.policies.critics import DistributionalValue
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.recipes.fleet.export import demonstrations_of
from vla_rl.recipes.imitate import demonstrated_chunks, encode_episodes
from vla_rl.recipes.trainers import Trainable, generator

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
        flow = cast(ImitationPolicy, base)
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


@dataclass
class BalancedChunks:
    """A ``ChunkSampler`` by ``sampler``: what robots did alone, what a person corrected, what was recorded.

    Its tasks are the ``families`` [M] of the instructions, or else those of which there are many instructions would
    have most of every batch.
    """

    sampler: AdaptiveSampler
    families: Sequence[str]

    def __post_init__(self) -> None:
        names = sorted(set(self.families))
        self._family = torch.tensor([names.index(name) for name in self.families])
        self._drawn = np.zeros((0, 2), np.int64)

    def draw(self, chunks: Chunks, human: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Positions, those of a task and kind one after the other; demonstrations are nobody's correction."""
        recorded = chunks.version == DEMONSTRATED
        kind = torch.where(recorded, OFFLINE, torch.where(human, CORRECTIONS, ONLINE))
        keys = key_of(torch.stack([self._family.to(kind.device)[chunks.task], kind], 1).cpu().numpy())
        tasks = int(keys.max()) // len(STRATA) + 1
        counts = np.bincount(keys, minlength=len(STRATA) * tasks).reshape(tasks, len(STRATA))
        seed = int(torch.randint(2**62, (1,), generator=generator))
        self._drawn = self.sampler.draw(counts, size, np.random.default_rng(seed))
        slots = torch.arange(len(chunks), device=chunks.task.device)
        return choose(slots, keys, key_of(self._drawn), generator)

    def record(self, losses: Tensor) -> None:
        """They decide what is drawn from now on."""
        self.sampler.record(self._drawn, losses.cpu().double().numpy())

    def state_dict(self) -> dict[str, Any]:
        """The sampler's (see ``Resumable``)."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


def balanced(config: SamplerConfig, families: Sequence[str]) -> BalancedChunks:
    """A new one with these numbers."""
    return BalancedChunks(AdaptiveSampler(config), families)


@dataclass(frozen=True)
class _Labels:
    """Of each of ``N`` control steps: whether a person acted, by which version the robot did, and the outcome."""

    intervened: np.ndarray  # bool [N]
    version: np.ndarray  # int [N]
    success: bool
    robot: str


def recorded_rollout(policy: FlowPolicy, episodes: Demonstrations) -> Rollout:
    """The successful ``episodes`` as columns: each ``H`` times, with chunks that begin at its step 0, 1, ... ``H - 1``.

    So every control step begins a decision, as in imitation, and the decisions of a column follow each other.
    """
    count = len(episodes.state)
    nobody = np.zeros(count, bool)
    return _columns(policy, episodes, _Labels(nobody, nobody + DEMONSTRATED, True, "demonstrations"))


def fleet_rollout(policy: FlowPolicy, episode: FleetEpisode, known: Collection[int]) -> Rollout:
    """What a robot and its person did, in columns as those of :func:`recorded_rollout`.

    ``known``: the versions of the fleet's policy; a robot that ran another policy counts as one of version 0.  Raises
    ContractError for a task that the policy does not have.
    """
    steps = demonstrations_of(episode).with_tasks(policy.spec.tasks)
    version = np.array([one if one in known else 0 for one in episode.versions])
    person = np.array(episode.intervened)
    return _columns(policy, steps, _Labels(person, version, episode.end.success, episode.sender.robot))


def _columns(policy: FlowPolicy, episodes: Demonstrations, labels: _Labels) -> Rollout:
    features = encode_episodes(policy, episodes)
    chunks, columns = episodes.chunks(policy.horizon), list[Rollout]()
    for begin, end in episodes.spans():
        for first in range(begin, min(begin + policy.horizon, end)):
            index = np.arange(first, end, policy.horizon)
            columns.append(_column(features, chunks, labels, index, int(episodes.task[begin])))
    return side_by_side(columns)


def _column(
    features: dict[str, Tensor], chunks: tuple[np.ndarray, np.ndarray], labels: _Labels, index: np.ndarray, task: int
) -> Rollout:
    length, (executed, within) = len(index), (item[index] for item in chunks)
    last = torch.zeros(length, 1, dtype=torch.bool)
    last[-1] = True
    ahead = np.minimum(index[:, None] + np.arange(within.shape[1]), len(labels.intervened) - 1)
    valid = torch.as_tensor(within)[:, None]
    person = torch.as_tensor(labels.intervened[ahead])[:, None] & valid
    actions = torch.as_tensor(executed)[:, None]
    kept = {name: item[[*index.tolist(), int(index[-1])]][:, None] for name, item in features.items()}
    whole = torch.zeros(length, 1, dtype=torch.long)
    return Rollout(
        features=kept,
        sample=actions,
        executed=actions,
        aux={},
        logprob=torch.zeros(length, 1),
        reward=torch.zeros(valid.shape),
        valid=valid,
        intervened=person,
        terminated=last,
        truncated=torch.zeros_like(last),
        success=last & labels.success,
        version=torch.as_tensor(labels.version[index])[:, None],
        final_index=torch.zeros(0, 2, dtype=torch.long),
        final_features={name: item[:0, 0] for name, item in kept.items()},
        seeds=whole - 1,
        task=whole + task,
        robot=labels.robot,
    )
