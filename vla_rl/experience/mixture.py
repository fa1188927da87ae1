"""Batches from several replay buffers in fixed shares: online decisions, demonstrations, interventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.batch import ReplayBuffer, Rollout, Transitions
from vla_rl.contract.env import on_host
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.replay import Replay


class Mixture:
    """A ``ReplayBuffer`` of ``parts``, each with its share of every batch; new rollouts are added to "online".

    While a part is empty, the others take its share in proportion to their own.
    """

    def __init__(self, parts: Mapping[str, ReplayBuffer], shares: Mapping[str, float]) -> None:
        if parts.keys() != shares.keys() or any(share < 0 for share in shares.values()) or not sum(shares.values()):
            raise UserError(
                f"shares {dict(shares)} do not fit the buffers {sorted(parts)}, so no batch could be drawn; give each "
                "a share of at least 0, not all of them 0."
            )
        if "online" not in parts:
            raise UserError(
                f"none of the replay buffers {sorted(parts)} is 'online', so nothing could be added; name one so."
            )
        self.parts, self.shares = dict(parts), dict(shares)

    def __len__(self) -> int:
        """Decisions in all parts that have a share."""
        return sum(len(part) for name, part in self.parts.items() if self.shares[name])

    def add(self, rollout: Rollout) -> int:
        return self.parts["online"].add(rollout)

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        counts = self.counts(size)
        return concatenate([self.parts[name].sample(count, generator) for name, count in counts.items() if count])

    def counts(self, size: int) -> dict[str, int]:
        """How many of ``size`` decisions come from each part; rounded so that they add up."""
        shares = {name: share if len(self.parts[name]) else 0.0 for name, share in self.shares.items()}
        total = sum(shares.values())
        if not total:
            raise UserError(
                f"none of the replay buffers {sorted(self.parts)} that have a share holds a decision yet, so none can "
                "be drawn; add a rollout first."
            )
        counts, drawn, cumulative = {}, 0, 0.0
        for name, share in shares.items():
            cumulative += share
            counts[name] = round(size * cumulative / total) - drawn
            drawn += counts[name]
        return counts

    def keep_only(self, name: str) -> None:
        """Drop all parts but ``name``, which then fills every batch."""
        if name not in self.parts:
            raise UserError(
                f"there is no replay buffer {name!r} among {sorted(self.parts)}, so nothing would be left to learn "
                "from; name one of them."
            )
        self.parts, self.shares = {name: self.parts[name]}, {name: 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() < self.parts.keys():
            self.keep_only(*state)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def concatenate(batches: list[Transitions]) -> Transitions:
    """``batches`` concatenated; raises ContractError when their features differ."""

    def along(name: str) -> Any:
        items = [getattr(batch, name) for batch in batches]
        if isinstance(items[0], Mapping):
            if len({frozenset(item) for item in items}) > 1:
                names = " and ".join(str(sorted(item)) for item in items)
                raise ContractError(
                    f"the replay buffers hold different features of a decision, {names}, so they cannot share a "
                    "batch; fill all of them with one policy and the same privileged extras."
                )
            return {key: torch.cat([item[key] for item in items]) for key in items[0]}
        return torch.cat(items)

    return Transitions(**{name: along(name) for name in Transitions.__dataclass_fields__})


_AUTONOMOUS, _CORRECTED, _RECORDED = range(3)  # columns of counts


class Strata:
    """A ``ReplayBuffer`` of ``online`` decisions, where rollouts are added, and ``recorded`` ones (which reads losses).

    Of the online decisions of each task, those in which a person acted are a stratum of their own and have no age; the
    others are drawn while they are at most ``max_age`` versions older than the learner's, which ``version`` tells.

    ``sampler``, such as ``vla_rl.fleet.sampler.AdaptiveSampler``, chooses (task, stratum) pairs int [size,2] with
    ``draw(counts, size, generator)``, from the :meth:`counts` int [M,3], and learns from the losses [B] of what was
    drawn [B,2] with ``record(drawn, losses)``; it is ``Resumable``.
    """

    def __init__(
        self, online: Replay, recorded: Replay, sampler: Any, version: Callable[[], int], max_age: int
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
        drawn = self.sampler.draw(_counts(strata), size, np.random.default_rng(seed))
        drawn = drawn[np.lexsort((drawn[:, 0], drawn[:, 1] == _RECORDED))]  # by replay buffer
        parts = []
        masks = (drawn[:, 1] != _RECORDED, drawn[:, 1] == _RECORDED)
        for replay, (slots, keys), mask in zip((self.online, self.recorded), strata, masks, strict=True):
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
        return _counts([self._online(), self._recorded()])

    def _online(self) -> tuple[Tensor, np.ndarray]:
        """Slots and their keys, 3 * task + stratum."""
        slots = self.online.decisions()
        if not len(slots):
            return slots, np.zeros(0, np.int64)
        columns = self.online.columns
        person = columns["intervened"][slots]
        slots = slots[person | (self.version() - columns["version"][slots] <= self.max_age)]
        kind = np.where(on_host(columns["intervened"][slots]), _CORRECTED, _AUTONOMOUS)
        return slots, 3 * on_host(columns["task"][slots]) + kind

    def _recorded(self) -> tuple[Tensor, np.ndarray]:
        slots = self.recorded.decisions()
        task = on_host(self.recorded.columns["task"][slots]) if len(slots) else np.zeros(0, np.int64)
        return slots, 3 * task + _RECORDED

    def state_dict(self) -> dict[str, Any]:
        state = {"online": self.online.state_dict(), "recorded": self.recorded.state_dict()}
        return {**state, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.online.load_state_dict(state["online"])
        self.recorded.load_state_dict(state["recorded"])
        self.sampler.load_state_dict(state["sampler"])


def _counts(strata: list[tuple[Tensor, np.ndarray]]) -> np.ndarray:
    keys = np.concatenate([keys for _, keys in strata])
    tasks = int(keys.max(initial=-1)) // 3 + 1
    return np.bincount(keys, minlength=3 * tasks).reshape(tasks, 3)


def key_of(pairs: np.ndarray) -> np.ndarray:
    """One number [B] for (task, stratum) ``pairs`` [B,2]."""
    return pairs[:, 0] * 3 + pairs[:, 1]


def choose(slots: Tensor, keys: np.ndarray, wanted: np.ndarray, generator: torch.Generator) -> Tensor:
    """For each of the ``wanted`` keys one of the ``slots`` that have it, with replacement."""
    order = np.argsort(keys, kind="stable")
    first, last = (np.searchsorted(keys[order], wanted, side) for side in ("left", "right"))
    share = torch.rand(len(wanted), generator=generator, dtype=torch.float64).numpy()
    return slots[torch.from_numpy(order[first + np.floor(share * (last - first)).astype(np.int64)]).to(slots.device)]
