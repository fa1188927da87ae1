"""Which decisions RECAP imitates next: SOP's adaptive sampler over task and kind of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.chunks import DEMONSTRATED, Chunks
from vla_rl.experience.strata import choose, key_of
from vla_rl.fleet.sampler import CORRECTIONS, OFFLINE, ONLINE, STRATA, AdaptiveSampler, SamplerConfig


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
