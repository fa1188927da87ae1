"""Squashed Gaussian policies on a frozen observation encoder: trained by SAC, RLPD, IQL, Cal-QL and WSRL.

    a = tanh(u),    u ~ N(mean(o), std(o)^2),    log pi(a|o) = sum [log N(u) - log(1 - tanh(u)^2)]

``a`` is a whole chunk in units of the bounds, its ``A = H D`` entries side by side (Haarnoja et al. 2018, arXiv
1801.01290, app. C).  A chunk is one decision, so critics learn one value for the whole chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array, EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import ActionOut, CriticAction, Features, Mode, State
from vla_rl.policies.encoder import ObservationEncoder
from vla_rl.policies.frozen import HoldsFrozen
from vla_rl.policies.heads import HeadConfig, SquashedHead
from vla_rl.policies.noise import Generators
from vla_rl.policies.normalization import Affine, action_limits
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import load_weights, save_folder


@dataclass(frozen=True)
class SquashedConfig:
    """Length of a decision, width of exploration, and the network."""

    horizon: int = 1  # H: actions in a chunk
    std: float = 1.0  # initial, of ``u``
    # Maximum likelihood on few demonstrations overfits with a std near 0; the lower bound prevents that.
    std_bounds: tuple[float, float] = (math.exp(-5.0), math.exp(2.0))
    head: HeadConfig = HeadConfig()


class SquashedPolicy(HoldsFrozen):
    """``tanh(u)`` over normalised chunks [E,H,D]; mode "eval" is ``tanh(mean)`` (``ReparametrisedPolicy``).

    ``encoder`` is frozen: not trained, not in :meth:`trainable`, but part of the checkpoint.  Raises UserError for a
    horizon that the environment cannot execute, and for a std outside its bounds.
    """

    action_low: Tensor
    action_high: Tensor

    def __init__(self, encoder: ObservationEncoder, config: SquashedConfig | None = None) -> None:
        super().__init__()
        self.config, self.version, self.spec = config or SquashedConfig(), 0, encoder.spec
        if not 1 <= self.horizon <= self.spec.max_chunk:
            raise UserError(
                f"{self.spec.name!r} executes chunks of 1 to {self.spec.max_chunk} actions, so it cannot execute "
                f"{self.horizon}; choose another horizon."
            )
        self._frozen = (encoder,)
        self.action_scale = Affine.from_bounds(self.spec.action)
        if not self.config.std_bounds[0] < self.config.std < self.config.std_bounds[1]:
            raise UserError(
                f"the initial std {self.config.std:g} is not between its bounds {self.config.std_bounds}, so the "
                "network cannot be initialised with it; change one of them."
            )
        outputs, bounds = self.horizon * self.spec.action_dim, self.config.std_bounds
        self.head = SquashedHead(self.feature_sizes, outputs, self.config.head, self.config.std, bounds)
        low, high = action_limits(self.spec)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    @property
    def encoder(self) -> ObservationEncoder:
        encoder: ObservationEncoder = self._frozen[0]
        return encoder

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Sizes of the encoder's features, by name."""
        return dict(self.encoder.feature_sizes)

    @property
    def horizon(self) -> int:
        """``H``: actions in a chunk."""
        return self.config.horizon

    # -- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """The encoder's features: those of :attr:`feature_sizes`, and others for critics."""
        return self.encoder.encode(obs)

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        if mode == "eval":
            flat = self.head.mode(features)
            logprob = flat.new_zeros(len(flat))
        else:
            flat, logprob = self.head(features, generator)
        sample = flat.unflatten(-1, (self.horizon, self.spec.action_dim))
        action = self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)
        return ActionOut(action, sample, logprob, {}, self.version), state

    # -- learning ---------------------------------------------------------------------------------------------------

    def rsample(self, features: Features, generator: torch.Generator) -> CriticAction:
        """A reparameterised chunk [B,A] within [-1, 1] and its log-density [B]."""
        return CriticAction(*self.head(features, generator))

    def critic_action(self, features: Features, sample: Tensor, executed: Tensor) -> Tensor:
        """The executed chunk [B,A], normalised: after changes by a person or a safety supervisor."""
        return self.action_scale.normalize(executed).flatten(1)

    def log_prob_of(self, features: Features, action: Tensor) -> Tensor:
        """Log-densities [B,A] of the entries of recorded decisions [B,A] (see :meth:`critic_action`), with gradient."""
        return self.head.log_prob(features, action)

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Standardise the features; the initial distribution does not depend on them, so it does not change."""
        self.head.trunk.inputs.calibrate(features, reducer)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The head's weights, and the statistics of its inputs (without gradient)."""
        return dict(self.head.named_parameters())

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and the frozen policy in ``encoder``."""
        kind = name_of(type(self))
        config = {"policy": kind, "config": to_json(self.config), "spec": self.spec.to_json()}
        save_folder(Path(folder), config, self.state_dict(), {"encoder": self.encoder})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> SquashedPolicy:
        """Load a checkpoint; with ``spec``, the encoder checks that it was trained for such an environment."""
        saved = read_config(Path(folder))
        policy = cls(load_policy(Path(folder) / "encoder", spec), from_json(saved["config"]))
        load_weights(policy, Path(folder))
        return policy.eval()
