"""The policy protocols.  An algorithm names the one it needs; how a policy makes its actions is up to the policy."""

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
    """One decision in each of ``E`` environments.

    action   [E,H,D] physical units, within the spec's bounds
    sample   [E,H,D] the raw normalised sample, never clipped
    logprob  [E]     log-density of the whole chain that made ``sample``; or [E,G]: of G parts, whose sum that is,
                     equally many for every action and in their order; zeros in mode "eval"
    aux      {name: [E,...]} further inputs of ``log_prob`` (the denoising chain; ``base_action`` in residual mode)
    policy_version  the number of weight publications so far
    """

    action: Array
    sample: Array
    logprob: Array
    aux: Mapping[str, Array] = field(default_factory=dict)
    policy_version: int = 0


@dataclass(frozen=True)
class Likelihood:
    """``logprob`` as :class:`ActionOut` has it, ``entropy`` [B], and the parameters of the distribution.

    ``logprob`` [B] is summed over steps and dimensions; a policy that gives its parts, [B,G], has a ratio for each in
    PPO and GRPO.
    """

    logprob: Array
    entropy: Array
    params: Mapping[str, Array]


@runtime_checkable
class Policy(Protocol):
    """Maps observations to action chunks.  A store raises ``version`` whenever it publishes new weights."""

    version: int

    def encode(self, obs: Observation) -> Features:
        """The part without gradient, {name: [E,...]}; the identity (the inputs) when everything is trainable."""

    def initial_state(self, num_envs: int) -> State:
        """State carried between decisions (recurrence, chunk queues), [num_envs,...]; {} when there is none."""

    def reset_state(self, state: State, env_ids: Array) -> State:
        """Called for every environment that is reset, after termination and truncation alike."""

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        """Choose a chunk: ``mode`` "sample" explores, "eval" is the deployed behaviour.

        ``generator`` is one ``torch.Generator`` for the batch or, in an evaluation, a list with one per environment;
        ``policies/noise.py`` draws from either.
        """


@runtime_checkable
class ScheduledPolicy(Policy, Protocol):
    """A policy of which more than the weights changes during a run, such as its exploration noise."""

    def set_progress(self, progress: float) -> None:
        """Adopt the settings for a run of which the share ``progress`` is done; called whenever weights arrive."""


@runtime_checkable
class GradualPolicy(Policy, Protocol):
    """A policy that hands over to what is learnt little by little, as a residual does from its base."""

    def set_released(self, decisions: int) -> None:
        """Adopt the settings for an actor that its learner released ``decisions`` decisions ago (0: not, or no more).

        They are among the learner's parameters, so that they are published and restored with the weights.
        """


@runtime_checkable
class ContextPolicy(Policy, Protocol):
    """A policy whose decision and critic also depend on its own state, such as the plan that it follows."""

    def context(self, features: Features, state: State, generator: Any) -> tuple[Features, State]:
        """``features`` with the entries that depend on ``state`` (``base_action``); the input of ``act``.

        Called once for every observation before ``act``, and for an episode's last observation as well.
        """


@runtime_checkable
class RealTimePolicy(Policy, Protocol):
    """A policy whose next chunk continues the one that is still executed while it computes (real-time chunking)."""

    def continue_chunk(self, state: State, env_ids: Array, consumed: Array, delay: Array) -> State:
        """``state`` for the next ``act`` in environments ``env_ids`` [R]; the first chunk of an episode needs no call.

        consumed  int [R]  control steps from the last chunk's observation to the next one's: what the last chunk has
                           for the moment of the new observation is its action number ``consumed``
        delay     int [R]  control steps from that observation until the new chunk is used; its first ``delay`` actions
                           are not executed, for the last chunk's are

        Without a call a chunk counts as executed to its end, as environments do.  Raises ContractError unless
        ``delay <= consumed <= H - delay`` for chunks of ``H`` actions; a caller that is late lowers ``delay``.
        """


@runtime_checkable
class SelectivePolicy(Policy, Protocol):
    """A policy that acts on more than its learner and critics read, such as the pictures that a frozen base sees."""

    def recorded(self, features: Features) -> Features:
        """The entries of ``features`` that rollouts and replay buffers keep."""


@runtime_checkable
class LikelihoodPolicy(Policy, Protocol):
    """A policy whose samples have a density, as PPO and GRPO need."""

    def log_prob(self, features: Features, sample: Array, aux: Mapping[str, Array]) -> Likelihood:
        """Log-density of recorded samples under the current weights, with gradient."""

    def kl(self, old: Mapping[str, Array], new: Mapping[str, Array]) -> Array:
        """Exact KL(old || new) [B] between two ``Likelihood.params`` of the same samples."""


@dataclass(frozen=True)
class CriticAction:
    """Decisions in the critics' action space: ``action`` [B,A] and ``logprob`` [B] (zeros if deterministic)."""

    action: Array
    logprob: Array


@runtime_checkable
class ReparametrisedPolicy(Policy, Protocol):
    """A policy whose decision is differentiable, as SAC and TD3 need."""

    def rsample(self, features: Features, generator: Any) -> CriticAction:
        """A decision with gradient, without the exploration noise that ``act`` adds to it."""

    def critic_action(self, features: Features, sample: Array, executed: Array) -> Array:
        """Recorded decisions [B,A] in the same space, from ``sample`` and ``executed``, both [B,H,D]."""


@runtime_checkable
class Observer(Protocol):
    """Policies and critics that keep running statistics of their inputs.

    A learner calls ``observe`` after its update with the decisions it learnt from, so that nothing changes between
    acting and the last ratio.
    """

    def observe(self, features: Mapping[str, Array], reducer: Reducer) -> None:
        """Update the statistics by {name: [B,...]} of all processes that ``reducer`` sums over."""


def encode_observation(policy: Policy, obs: Observation, state: State, generator: Any) -> tuple[Features, State]:
    """The features of ``obs`` that ``policy`` decides on, with its context if it has one; never ``privileged/*``."""
    shown = obs if getattr(policy, "reads_privileged", False) else obs.public()
    features = policy.encode(shown)
    context = getattr(policy, "context", None)  # an isinstance of a protocol takes 20 us, and this is every decision
    return (features, state) if context is None else context(features, state, generator)


def recorded(policy: Policy, features: Features) -> Features:
    """What is kept of the features of a decision: all of them, unless ``policy`` is a ``SelectivePolicy``."""
    select = getattr(policy, "recorded", None)
    return features if select is None else select(features)


def public(features: Features) -> Features:
    """``features`` without the ``privileged/*`` entries, which are for critics."""
    if not any(name.startswith(PRIVILEGED) for name in features):
        return features
    return {name: item for name, item in features.items() if not name.startswith(PRIVILEGED)}
