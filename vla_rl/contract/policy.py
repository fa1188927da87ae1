"""What a policy is.  An algorithm asks it for what it needs; how a policy makes its actions is up to the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from vla_rl.contract.batch import Reducer
from vla_rl.contract.env import PRIVILEGED, Array, Observation
from vla_rl.contract.errors import UserError

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
    """Maps observations to action chunks.  A store raises ``version`` whenever it publishes new weights.

    It need not inherit from this class.  Besides, it may have methods of some of these names: ``context``,
    ``recorded``, ``set_progress``, ``set_released``, ``continue_chunk``, ``saved_state``, ``restored_state``; see the
    functions below.
    """

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
class LikelihoodPolicy(Policy, Protocol):
    """A policy whose samples have a density, as PPO and GRPO need.

    For DPPO ``step_logprob(aux, params)`` besides: the log-density [B,K'] of the recorded steps of a chain, noisiest
    first, given the ``params`` of ``log_prob``; their sum is its ``logprob``.
    """

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
    """A policy whose decision is differentiable, as SAC and TD3 need.

    For IQL ``log_prob_of(features, action)`` besides: log-densities [B,A] of the entries of decisions in the space of
    ``critic_action``, with gradient.
    """

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


# -- what a policy may do besides -------------------------------------------------------------------------------------
#
# A policy that has the method is asked; for any other the default holds that is written here.


def with_context(policy: Policy, features: Features, state: State, generator: Any) -> tuple[Features, State]:
    """``policy.context(features, state, generator)``: for decisions that also depend on the policy's own state.

    Such as the plan that it follows.  It adds the entries that depend on ``state`` (``base_action``) to the input of
    ``act`` and of critics, once for every observation before ``act``, and for an episode's last observation as well.
    By default the features stay as they are.
    """
    found: tuple[Features, State] = (features, state)
    return policy.context(features, state, generator) if hasattr(policy, "context") else found


def recorded(policy: Policy, features: Features) -> Features:
    """``policy.recorded(features)``: the entries that rollouts and replay buffers keep; by default all of them.

    For a policy that acts on more than its learner and critics read, such as the pictures that a frozen base sees.
    """
    return policy.recorded(features) if hasattr(policy, "recorded") else features


def set_progress(policy: object, progress: float) -> None:
    """``policy.set_progress(progress)``: adopt the settings for a run of which the share ``progress`` is done.

    Called whenever weights arrive, for what changes besides them, such as exploration noise; by default nothing does.
    """
    if hasattr(policy, "set_progress"):
        policy.set_progress(progress)


def set_released(policy: object, decisions: int) -> None:
    """``policy.set_released(decisions)``: adopt the settings for an actor that was released so many decisions ago.

    0: not, or no more.  For a policy that hands over to what is learnt little by little, as a residual does from its
    base.  The settings are among its parameters, so that they are published and restored with the weights.
    """
    if hasattr(policy, "set_released"):
        policy.set_released(decisions)


def continue_chunk(policy: Policy, state: State, env_ids: Array, consumed: Array, delay: Array) -> State:
    """``policy.continue_chunk(...)``: the next ``act`` continues the chunk that is executed while it computes.

    ``state`` for environments ``env_ids`` [R]; the first chunk of an episode needs no call.

    consumed  int [R]  control steps from the last chunk's observation to the next one's: what the last chunk has
                       for the moment of the new observation is its action number ``consumed``
    delay     int [R]  control steps from that observation until the new chunk is used; its first ``delay`` actions
                       are not executed, for the last chunk's are

    Without a call, and by default, a chunk counts as executed to its end, as environments do.  Raises ContractError
    unless ``delay <= consumed <= H - delay`` for chunks of ``H`` actions; a caller that is late lowers ``delay``.
    """
    found: State = state
    return policy.continue_chunk(state, env_ids, consumed, delay) if hasattr(policy, "continue_chunk") else found


def saved_state(policy: Policy, state: State) -> State:
    """``policy.saved_state(state)``: ``state`` as arrays from which another process can go on; by default it is so.

    For a policy that keeps a part of it elsewhere.
    """
    return policy.saved_state(state) if hasattr(policy, "saved_state") else state


def restored_state(policy: Policy, saved: State) -> State:
    """``policy.restored_state(saved)``: the state of which :func:`saved_state` was told."""
    return policy.restored_state(saved) if hasattr(policy, "restored_state") else saved


def require(policy: object, needed_by: str, methods: Sequence[str], otherwise: str) -> None:
    """Raise UserError unless ``policy`` has ``methods``; ``otherwise`` says the consequence and the cure.

    A policy that cannot be trained at all says so itself, in its attribute ``instead``.
    """
    lacking = [method for method in methods if not hasattr(policy, method)]
    if lacking:
        raise UserError(
            f"{needed_by} needs a policy with {' and '.join(lacking)} but {type(policy).__name__} lacks "
            f"{'them' if len(lacking) > 1 else 'it'}, {getattr(policy, 'instead', otherwise)}"
        )


# -- features ---------------------------------------------------------------------------------------------------------


def encode_observation(policy: Policy, obs: Observation, state: State, generator: Any) -> tuple[Features, State]:
    """The features of ``obs`` that ``policy`` decides on, with its context if it has one; never ``privileged/*``."""
    shown = obs if getattr(policy, "reads_privileged", False) else obs.public()
    return with_context(policy, policy.encode(shown), state, generator)


def public(features: Features) -> Features:
    """``features`` without the ``privileged/*`` entries, which are for critics."""
    if not any(name.startswith(PRIVILEGED) for name in features):
        return features
    return {name: item for name, item in features.items() if not name.startswith(PRIVILEGED)}
