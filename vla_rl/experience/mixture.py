"""Batches from several replay buffers in fixed shares: online decisions, demonstrations, interventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vla_rl.contract.batch import ReplayBuffer, Rollout, Transitions
from vla_rl.contract.errors import ContractError, UserError


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
