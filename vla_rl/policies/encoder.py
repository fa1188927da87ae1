"""What a trainable head may read of a frozen policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.policy import Features
from vla_rl.pretrained import Saveable


class ObservationEncoder(Saveable, Protocol):
    """A frozen policy, of which a head (residual, latent noise, squashed Gaussian, diffusion) uses the encoder only.

    spec           the environment that the policy was trained for
    feature_sizes  {name: size} of the entries of ``encode`` that a head may act on, flattened; critics add ``time``
    encode         {name: [E,...]}: the entries of ``feature_sizes``, ``time`` [E,1] as a share of the time limit, and
                   whatever else the policy itself needs.  They are normalised by the policy's own statistics as far as
                   it normalises anything; a head standardises them again (``calibrate``), so no scale is assumed.
    """

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def feature_sizes(self) -> Mapping[str, int]: ...

    def encode(self, obs: Observation) -> Features: ...
