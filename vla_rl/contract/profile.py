"""How exactly an environment repeats itself, which is how it is checked: ``EnvSpec.profile`` names one of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.contract.env import on_host
from vla_rl.contract.errors import ContractError
from vla_rl.contract.spec import EnvSpec


@dataclass(frozen=True)
class Profile:
    """What is expected of an environment when one episode is played twice.

    tolerance  by how much two plays may differ: numbers relatively and absolutely, a picture on average and as a share
               of its range; indices and flags never
    moves      whether a check may start episodes and execute actions
    """

    tolerance: float
    moves: bool = True

    def alike(self, one: Any, other: Any) -> bool:
        """Whether two arrays [E,...] of two plays agree; raises nothing for different shapes, which do not."""
        a, b = on_host(one), on_host(other)
        if not self.tolerance or a.shape != b.shape or a.dtype.kind in "bi":
            return np.array_equal(a, b)
        if a.dtype == np.uint8:
            apart = np.abs(a.astype(float) - b.astype(float)).reshape(a.shape[0], -1)
            return not a.size or bool((apart.mean(1) <= self.tolerance * 255).all())
        return np.allclose(a, b, rtol=self.tolerance, atol=self.tolerance)

    def __str__(self) -> str:
        return f"within {self.tolerance:g}" if self.tolerance else "bit for bit"


PROFILES = {"bitwise": Profile(0.0), "tolerant": Profile(1e-3), "hardware": Profile(0.0, moves=False)}
"""From the strictest: simulators on a processor; physics on a GPU, whose sums have no fixed order; robots."""


def profile_of(spec: EnvSpec) -> Profile:
    """The profile that ``spec`` names; raises ContractError for an unknown one."""
    if spec.profile not in PROFILES:
        raise ContractError(
            f"the spec of {spec.name!r} names the profile {spec.profile!r}, so nobody knows whether a check may move "
            f"it; choose one of {', '.join(PROFILES)}."
        )
    return PROFILES[spec.profile]


def loosest(specs: Iterable[EnvSpec]) -> str:
    """The name of the least strict profile of ``specs``: that of an environment which consists of theirs."""
    order = list(PROFILES)
    return max((spec.profile for spec in specs), key=order.index)
