"""Experience as self-contained arrays, and the protocols of sources, learners, replay buffers and weight stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from vla_rl.contract.env import Array

TRUNCATION_RETURN = "privileged/truncation_return"  # in ``Rollout.final_features``


@dataclass(frozen=True)
class Rollout:
    """``T`` consecutive decisions of ``E`` environments.

    features      {name: [T+1,E,...]}  encoded observations; entry ``T`` follows the last decision; ``privileged/*``
                                       entries are for critics
    sample        [T,E,H,D]            raw normalised samples; aux {name: [T,E,...]}
    executed      [T,E,H,D]            executed actions in physical units, after clipping, safety and interventions;
                                       the chosen actions where ``valid`` is False
    logprob       float [T,E]          of ``sample``, computed by the policy that acted; [T,E,G] of its G parts
    reward, valid, intervened  [T,E,H] valid is False for actions that were not executed (in an idle environment: all)
    terminated, truncated, success  bool [T,E]  True only at the decision in which the episode ended
    version       int [T,E]            version of the policy that acted
    final_index   int [F,2]            (t,e) of the decisions at which an episode was truncated
    final_features  {name: [F,...]}    the encoded last observations of those episodes; a source that knows the rest of
                                       the return adds ``TRUNCATION_RETURN`` float64 [F]
    seeds         int [T,E]            seed of the decision's episode
    task          int [T,E]            index into the environment's ``tasks``; None where unknown
    robot         the robot or environment that acted (``EnvSpec.name``)
    stream        who collected it: consecutive rollouts of one stream continue its episodes, others never do
    info          counters and seconds of the collection, with prefixes (``rollout/``, ``env/``, ``time/``)
    spans         {lane: float64 [S,3]}  what each process did from when to when (``experience/driver.py``); the lane ""
                                       is that of the process that asked; {} where nobody recorded it
    """

    features: Mapping[str, Array]
    sample: Array
    executed: Array
    aux: Mapping[str, Array]
    logprob: Array
    reward: Array
    valid: Array
    intervened: Array
    terminated: Array
    truncated: Array
    success: Array
    version: Array
    final_index: Array
    final_features: Mapping[str, Array]
    seeds: Array
    info: Mapping[str, float] = field(default_factory=dict)
    task: Array | None = None
    robot: str = ""
    stream: str = ""
    spans: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Transitions:
    """``B`` recorded decisions of any age, each with its ``n``-step return (shorter at the end of an episode).

    features       {name: [B,...]}  encoded observation of the decision
    sample         [B,H,D]          raw normalised samples; ``executed`` [B,H,D] executed actions in physical units
    count          int [B]          how many actions of the chunk were executed: the first ones
    reward         [B]              discounted sum of rewards until ``next_features``
    discount       [B]              gamma^(actions until ``next_features``), 0 where the episode terminated before it
    next_features  {name: [B,...]}  encoded observation after those rewards (the last one of a truncated episode)
    returns        [B]              discounted return until the episode's end; -inf (unknown) where it was truncated
    intervened     bool [B]         whether a person acted in the decision
    version        int [B]          version of the policy that acted, -1 where none did (demonstrations)
    task           int [B]          index into the environment's ``tasks``
    robot          int [B]          index into the replay buffer's ``robots``
    """

    features: dict[str, Array]
    sample: Array
    executed: Array
    count: Array
    reward: Array
    discount: Array
    next_features: dict[str, Array]
    returns: Array
    intervened: Array
    version: Array
    task: Array
    robot: Array


class ReplayBuffer(Protocol):
    """Recorded decisions that can be sampled many times.

    One whose next samples depend on the losses of the latest one has ``read_losses(losses)``: the learner's losses [B],
    without gradient, of the ``B`` decisions that ``sample`` returned last.  A learner may have drawn another number of
    them since, to fit the normalization of its inputs.
    """

    def __len__(self) -> int: ...

    def add(self, rollout: Rollout) -> int:
        """Store the decisions of ``rollout``; returns by how many the number of decisions that can be sampled grew."""

    def sample(self, size: int, generator: Any) -> Transitions:
        """``size`` decisions, drawn with replacement."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ExperienceSource(Protocol):
    """Anything that produces experience: a simulator, a world model, a fleet."""

    def next(self) -> Rollout:
        """The next rollout."""


class Learner(Protocol):
    """Anything that turns experience into better weights."""

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learn from one rollout; returns metrics."""


@runtime_checkable
class Resumable(Protocol):
    """Sources, learners and stores whose state can be saved between two iterations, so that a run can be resumed."""

    def state_dict(self) -> dict[str, Any]:
        """Everything later results depend on: nested dicts and lists of arrays, tensors and JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned: later results are the same bit for bit."""


class Reducer(Protocol):
    """Sums over the processes that share one batch, so that results do not depend on their number.

    There are ``size`` processes and this one has number ``rank``; all of them call the same methods in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: Any) -> Any:
        """Element-wise sum of a float64 tensor over all processes; the identity for one process."""

    def sum_gradients(self, parameters: Iterable[Any]) -> None:
        """Replace every gradient by its sum over all processes; a missing gradient counts as zero."""

    def passes(self, own: int) -> int:
        """How often this process runs the policy to learn, ``own`` times on data and the others on none.

        All run it equally often where each holds a share of the weights, which they gather for one another.
        """


class OneProcess:
    """The reducer of a single process."""

    rank, size = 0, 1

    def sum(self, values: Any) -> Any:
        return values

    def sum_gradients(self, parameters: Iterable[Any]) -> None:
        pass

    def passes(self, own: int) -> int:
        return own
