"""Experience as self-contained arrays, and the seams between who makes it, who learns from it and who holds weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from vla_rl.contract.env import Array

TRUNCATION_RETURN = "privileged/beyond"  # in ``Rollout.final_features``


@dataclass(frozen=True)
class Rollout:
    """``T`` decisions of ``E`` rows.

    features        {name: [T+1,E,...]}  what the policy kept of every observation; entry ``T`` follows the last;
                                       ``privileged/*`` beside it, for critics
    sample        [T,E,H,D]            raw normalised samples; aux {name: [T,E,...]}
    executed      [T,E,H,D]            what was done, in physical units, after clipping, safety and interventions;
                                       what had been chosen where ``valid`` is False
    logprob       float [T,E]
    reward, valid, intervened  [T,E,H] valid is False for actions that were not executed (idle rows: all of them)
    terminated, truncated, success  bool [T,E]  True only at the decision in which the row ended
    version       int [T,E]            policy version that acted
    final_index   int [F,2]            (t,e) of decisions that ended by truncation
    final_features  {name: [F,...]}      what was kept of the last observation of those episodes; with it, from sources
                                       that know, ``TRUNCATION_RETURN`` float64 [F]: what each would still have earned
    seeds         int [T,E]            seed of the episode a decision belongs to
    info          counters and seconds of the collection
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


@dataclass(frozen=True)
class Transitions:
    """``B`` recorded decisions of any age, each with what followed it within ``n`` decisions or its episode's end.

    features       {name: [B,...]}  what was decided on
    sample       [B,H,D]          raw normalised samples; ``executed`` [B,H,D] what was done, in physical units
    reward       [B]              discounted sum until ``next_features``
    discount     [B]              gamma^(actions until ``next_features``), 0 where the episode terminated before it
    next_features    {name: [B,...]}  what was stored of the observation then (the last one of a truncated episode)
    returns      [B]              discounted sum until the episode's end; -inf where it was truncated, hence unknown
    intervened   bool [B]         whether a person acted in the decision
    """

    features: dict[str, Array]
    sample: Array
    executed: Array
    reward: Array
    discount: Array
    next_features: dict[str, Array]
    returns: Array
    intervened: Array


class ReplayBuffer(Protocol):
    """Recorded decisions to learn from again and again."""

    def __len__(self) -> int: ...

    def add(self, rollout: Rollout) -> int:
        """Keep the decisions of ``rollout``; returns how many can be sampled now that could not be before."""

    def sample(self, size: int, generator: Any) -> Transitions:
        """``size`` decisions, drawn with replacement."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ExperienceSource(Protocol):
    """Whatever produces experience: a simulator loop, a world model, a fleet."""

    def next(self) -> Rollout:
        """The next rollout."""


class Learner(Protocol):
    """Whatever turns experience into better weights."""

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learn from one rollout; returns metrics."""


class PolicyStore(Protocol):
    """Holds the newest weights for those who act."""

    def publish(self, weights: Mapping[str, Array]) -> int:
        """Make ``weights`` the newest; returns their version."""

    def latest(self) -> tuple[int, Mapping[str, Array]]:
        """The newest version and its weights."""


@runtime_checkable
class Resumable(Protocol):
    """Sources, learners and stores whose state can be saved between two iterations, so that a run can go on later."""

    def state_dict(self) -> dict[str, Any]:
        """All that the future depends on: nested dicts and lists of arrays, tensors and JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state_dict` described: what follows is the same, bit for bit."""


class Reducer(Protocol):
    """Joins the processes that share one batch, so that results do not depend on how many there are.

    ``size`` processes, of which this is number ``rank``; all of them call the same methods in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: Any) -> Any:
        """Element-wise sum of a float64 tensor over all processes; the identity when there is one."""

    def sum_gradients(self, parameters: Iterable[Any]) -> None:
        """Give every parameter the sum of its gradients in all processes; a missing one counts as zero."""


class OneProcess:
    """The reducer of a single process."""

    rank, size = 0, 1

    def sum(self, values: Any) -> Any:
        return values

    def sum_gradients(self, parameters: Iterable[Any]) -> None:
        pass
