"""Batches by task and kind of data: what robots did, what people corrected, what was recorded; none of it too old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout, Transitions
from vla_rl.contract.env import on_host
from vla_rl.experience.mixture import concatenate
from vla_rl.experience.replay import Replay

_AUTONOMOUS, _CORRECTED, _RECORDED = range(3)  # columns of counts
_KINDS = 3


class StratumSampler(Protocol):
    """Chooses (task, stratum) pairs, such as ``vla_rl.fleet.sampler.AdaptiveSampler``."""

    def draw(self, counts: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
        """int [size,2] from ``counts`` int [M,3]: autonomous, corrected and recorded decisions of each task."""

    def record(self, drawn: np.ndarray, losses: np.ndarray) -> None:
        """The losses [B] of what was ``drawn`` [B,2]."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Strata:
    """A ``ReplayBuffer`` of ``online`` decisions, where rollouts are added, and ``recorded`` ones (a ``LossReader``).

    Of the online decisions of each task, those in which a person acted are a stratum of their own and have no age; the
    others are drawn while they are at most ``max_age`` versions older than the learner's, which ``version`` tells.
    """

    def __init__(
        self,
        online: Replay,
        recorded: Replay,
        sampler: StratumSampler,
        version: Callable[[], int],
        max_age: int,
    ) -> None:
        self.online, self.recorded, self.sampler = online, recorded, sampler
        self.version, self.max_age = version, max_age
        self._drawn: dict[int, np.ndarray] = {}  # the latest draws by their number

    def __len__(self) -> int:
        """Decisions that can be drawn."""
        return len(self._online()[0]) + len(self.recorded)

    def add(self, rollout: Rollout) -> int:
        return self.online.add(rollout)

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """``size`` decisions by the sampler's weights, with replacement; those of a stratum follow each other.

        Raises UserError when there is nothing to draw.
        """
        seed = int(torch.randint(2**62, (1,), generator=generator))
        strata = [self._online(), self._recorded()]
        counts = self._counts(strata)
        drawn = self.sampler.draw(counts, size, np.random.default_rng(seed))
        drawn = drawn[np.lexsort((drawn[:, 0], drawn[:, 1] == _RECORDED))]  # by replay buffer
        parts = []
        for replay, (slots, keys), mask in zip(
            (self.online, self.recorded), strata, (drawn[:, 1] != _RECORDED, drawn[:, 1] == _RECORDED), strict=True
        ):
            if mask.any():
                parts.append(replay.transitions(choose(slots, keys, key_of(drawn[mask]), generator)))
        self._drawn[size] = drawn
        return concatenate(parts)

    def read_losses(self, losses: Tensor) -> None:
        """The learner's losses [B] of the latest sample of B, which decide what is drawn from now on."""
        if len(losses) in self._drawn:
            self.sampler.record(self._drawn[len(losses)], on_host(losses).astype(np.float64))

    def counts(self) -> np.ndarray:
        """int [M,3]: the decisions of each task that can be drawn: autonomous, corrected, recorded."""
        return self._counts([self._online(), self._recorded()])

    def _counts(self, strata: list[tuple[Tensor, np.ndarray]]) -> np.ndarray:
        keys = np.concatenate([keys for _, keys in strata])
        tasks = int(keys.max(initial=-1)) // _KINDS + 1
        return np.bincount(keys, minlength=_KINDS * tasks).reshape(tasks, _KINDS)

    def _online(self) -> tuple[Tensor, np.ndarray]:
        """Slots and their keys."""
        slots = self.online.decisions()
        if not len(slots):
            return slots, np.zeros(0, np.int64)
        columns = self.online.columns
        person = columns["intervened"][slots]
        slots = slots[person | (self.version() - columns["version"][slots] <= self.max_age)]
        kind = np.where(on_host(columns["intervened"][slots]), _CORRECTED, _AUTONOMOUS)
        return slots, key_of(np.stack([on_host(columns["task"][slots]), kind], 1))

    def _recorded(self) -> tuple[Tensor, np.ndarray]:
        slots = self.recorded.decisions()
        if not len(slots):
            return slots, np.zeros(0, np.int64)
        task = on_host(self.recorded.columns["task"][slots])
        return slots, key_of(np.stack([task, np.full_like(task, _RECORDED)], 1))

    def state_dict(self) -> dict[str, Any]:
        """Both buffers and the sampler (see ``Resumable``)."""
        state = {"online": self.online.state_dict(), "recorded": self.recorded.state_dict()}
        return {**state, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.online.load_state_dict(state["online"])
        self.recorded.load_state_dict(state["recorded"])
        self.sampler.load_state_dict(state["sampler"])


def key_of(pairs: np.ndarray) -> np.ndarray:
    """One number [B] for (task, stratum) ``pairs`` [B,2]."""
    found: np.ndarray = pairs[:, 0] * _KINDS + pairs[:, 1]
    return found


def choose(slots: Tensor, keys: np.ndarray, wanted: np.ndarray, generator: torch.Generator) -> Tensor:
    """For each of the ``wanted`` keys one of the ``slots`` that have it, with replacement."""
    order = np.argsort(keys, kind="stable")
    first, last = (np.searchsorted(keys[order], wanted, side) for side in ("left", "right"))
    share = torch.rand(len(wanted), generator=generator, dtype=torch.float64).numpy()
    return slots[torch.from_numpy(order[first + np.floor(share * (last - first)).astype(np.int64)]).to(slots.device)]
