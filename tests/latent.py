"""A flow policy for the bandit, as the base of latent-noise policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.toys import FlowToy, ToyEncoder, imitated


class ToyBase(FlowToy):
    """``FlowToy`` with the attributes of a base."""

    spec, feature_sizes = ToyEncoder.spec, {"state": 1}

    @property
    def config(self) -> Any:
        return SimpleNamespace(horizon=1, sampler=self.sampler)

    def save_pretrained(self, folder: Any) -> None:
        raise NotImplementedError


def toy_base(std: float = 0.5) -> ToyBase:
    """Imitates actions of N(0, std^2) in all states."""
    base = ToyBase()
    base.load_state_dict(imitated(std))
    return base
