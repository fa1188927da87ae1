"""The policy protocol.  An algorithm names the protocol it needs; how actions are made is the policy's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from vla_rl.contract.batch import Reducer
from vla_rl.contract.env import PRIVILEGED, Array, Observation

Mode: TypeAlias = Literal["sample", "eval"]
State: TypeAlias = dict[str, Array]
Features: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class ActionOut:
    """One decision for ``E`` rows.

    action   [E,H,D] physical units, within the spec's bounds
    sample   [E,H,D] the raw normalised sample, never clipped
    logprob  [E]     of the whole chain that made ``sample``; zeros in mode "eval"
    aux      {name: [E,...]} what ``log_prob`` needs besides (the denoising chain; ``base_action`` in residual mode)
    policy_version  counts weight publications
    """

    action: Array
    sample: Array
    logprob: Array
    aux: Mapping[str, Array] = field(default_factory=dict)
    policy_version: int = 0


@dataclass(frozen=True)
class Likelihood:
    """``logprob`` [B] (summed over steps and dimensions), ``entropy`` [B], and the parameters of the distribution."""

    logprob: Array
    entropy: Array
    params: Mapping[str, Array]


@runtime_checkable
class Policy(Protocol):
    """Maps observations to action chunks.  ``version`` is raised by whoever publishes new weights into it."""

    version: int

    def encode(self, obs: Observation) -> Features:
        """The part that no gradient reaches, as {name: [E,...]}; identity (the inputs) when everything is trainable."""

    def initial_state(self, rows: int) -> State:
        """State carried between decisions (recurrence, chunk queues), leading axis ``rows``; {} when there is none."""

    def reset_state(self, state: State, rows: Array) -> State:
        """Called for every row that is reset, after termination and truncation alike."""

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        """Choose a chunk: ``mode`` "sample" explores, "eval" is what would be deployed."""


@runtime_checkable
class ContextPolicy(Policy, Protocol):
    """A policy whose decision, and its critic's estimate, depend on its own state as well: a plan that it follows."""

    def context(self, features: Features, state: State, generator: Any) -> tuple[Features, State]:
        """What to decide on: ``features`` and what follows from ``state`` at this moment (``base_action``).

        Called once for every observation, also for an episode's last one, before ``act``, which receives the result.
        """


@runtime_checkable
class LikelihoodPolicy(Policy, Protocol):
    """A policy whose samples have a density: PPO and GRPO need this."""

    def log_prob(self, features: Features, sample: Array, aux: Mapping[str, Array]) -> Likelihood:
        """Density of recorded samples under the present weights, with gradient."""

    def kl(self, old: Mapping[str, Array], new: Mapping[str, Array]) -> Array:
        """Exact KL(old || new) [B] between two ``Likelihood.params`` of the same samples."""


@dataclass(frozen=True)
class CriticAction:
    """Decisions as critics judge them: ``action`` [B,A] and their ``logprob`` [B] (zeros if deterministic)."""

    action: Array
    logprob: Array


@runtime_checkable
class ReparametrisedPolicy(Policy, Protocol):
    """A policy whose decision is differentiable: SAC and TD3 need this."""

    def rsample(self, features: Features, generator: Any) -> CriticAction:
        """A decision through which gradients flow, without exploration that ``act`` adds on top of it."""

    def critic_action(self, features: Features, sample: Array, executed: Array) -> Array:
        """Recorded decisions [B,A] in the same terms, from ``sample`` [B,H,D] and what was ``executed`` [B,H,D]."""


@runtime_checkable
class Observer(Protocol):
    """Policies and critics that keep statistics of what they see.

    A learner calls ``observe`` after its update with the decisions that it has learnt from, so that nothing changes
    between acting and the last ratio.
    """

    def observe(self, features: Features, reducer: Reducer) -> None:
        """Take in {name: [B,...]} of this process and of those that ``reducer`` joins it with."""


def encode_observation(policy: Policy, obs: Observation, state: State, generator: Any) -> tuple[Features, State]:
    """What ``policy`` decides on at ``obs``: what it stores and, if it has one, its context; never ``privileged/*``."""
    features = policy.encode(obs.public())
    return policy.context(features, state, generator) if isinstance(policy, ContextPolicy) else (features, state)


def public(features: Features) -> Features:
    """What the policy itself stored, without what was kept beside it for critics."""
    if not any(name.startswith(PRIVILEGED) for name in features):
        return features
    return {name: item for name, item in features.items() if not name.startswith(PRIVILEGED)}
