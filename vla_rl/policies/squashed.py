"""Squashed Gaussian policies: what SAC, RLPD, IQL, Cal-QL and WSRL train, on what frozen eyes see.

    a = tanh(u),    u ~ N(mean(o), std(o)^2),    log pi(a|o) = sum [log N(u) - log(1 - tanh(u)^2)]

``a`` is a whole chunk in units of the bounds, its ``A = H D`` entries side by side (Haarnoja et al. 2018, arXiv
1801.01290, app. C).  A chunk is one decision, so what it is worth is learnt for the chunk as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, CriticAction, Features, Mode, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.heads import HeadConfig, SquashedHead
from vla_rl.policies.normalization import Affine, action_limits
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import Saveable, load_weights, save_folder


class ObservationEncoder(Saveable, Protocol):
    """What a head sees with: ``encode`` stores, besides other things, the entries ``feature_sizes``, by size."""

    spec: EnvSpec

    @property
    def feature_sizes(self) -> dict[str, int]: ...

    def encode(self, obs: Observation) -> Features: ...


@dataclass(frozen=True)
class SquashedConfig:
    """The length of a decision, how wide it explores, and the network."""

    horizon: int = 1  # H: actions in a chunk
    std: float = 1.0  # of ``u`` at first
    # Of few demonstrations the likelihood is learnt by heart, with a std near 0, unless it is kept from that.
    std_bounds: tuple[float, float] = (math.exp(-5.0), math.exp(2.0))
    head: HeadConfig = HeadConfig()


class SquashedPolicy(nn.Module):
    """``tanh(u)`` over normalised chunks [E,H,D]; mode "eval" is ``tanh(mean)`` (``ReparametrisedPolicy``).

    ``encoder`` are frozen: neither trained nor among :meth:`trainable`; a checkpoint holds them.  Raises UserError when
    the horizon is not one that the environment can execute, or the std outside its bounds.
    """

    action_low: Tensor
    action_high: Tensor

    def __init__(self, encoder: ObservationEncoder, config: SquashedConfig | None = None) -> None:
        super().__init__()
        self.config, self.version, self.spec = config or SquashedConfig(), 0, encoder.spec
        if not 1 <= self.horizon <= self.spec.max_chunk:
            raise UserError(
                f"{self.spec.name!r} executes chunks of 1 to {self.spec.max_chunk} actions, so none of {self.horizon} "
                "can be decided on; choose another horizon."
            )
        # Not registered: what is frozen or not even a module is neither moved, nor saved, nor copied with this one.
        self._frozen = (encoder,)
        self.action_scale = Affine.from_bounds(self.spec.action)
        if not self.config.std_bounds[0] < self.config.std < self.config.std_bounds[1]:
            raise UserError(
                f"a std of {self.config.std:g} is not between its bounds {self.config.std_bounds}, so no policy can "
                "begin with it; change one of them."
            )
        outputs, bounds = self.horizon * self.spec.action_dim, self.config.std_bounds
        self.head = SquashedHead(self.feature_sizes, outputs, self.config.head, self.config.std, bounds)
        low, high = action_limits(self.spec)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    @property
    def encoder(self) -> ObservationEncoder:
        return self._frozen[0]

    @property
    def feature_sizes(self) -> dict[str, int]:
        """What is decided on, by size."""
        return dict(self.encoder.feature_sizes)

    @property
    def horizon(self) -> int:
        """``H``: actions in a chunk."""
        return self.config.horizon

    # -- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """What the eyes store: the entries :attr:`feature_sizes`, and others for critics."""
        return self.encoder.encode(obs)

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: torch.Generator) -> tuple[ActionOut, State]:
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
        """A chunk [B,A] within [-1, 1], through which gradients flow, and its log-density [B]."""
        return CriticAction(*self.head(features, generator))

    def critic_action(self, features: Features, sample: Tensor, executed: Tensor) -> Tensor:
        """What was executed [B,A], normalised: as a person or a supervisor changed it, not as it was drawn."""
        return self.action_scale.normalize(executed).flatten(1)

    def log_prob_of(self, features: Features, action: Tensor) -> Tensor:
        """Log-density [B] of recorded decisions [B,A] in the terms of :meth:`critic_action`, with gradient."""
        return self.head.log_prob(features, action)

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Standardise what is seen; the distribution is the same everywhere before and after."""
        self.head.trunk.inputs.calibrate(features, reducer)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The head's weights, and the statistics of what it sees, which no gradient moves."""
        return dict(self.head.named_parameters())

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and the frozen policy in ``encoder``."""
        kind = f"{type(self).__module__}:{type(self).__qualname__}"
        config = {"policy": kind, "config": to_json(self.config), "spec": self.spec.to_json()}
        save_folder(Path(folder), config, self.state_dict(), {"encoder": self.encoder})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> SquashedPolicy:
        """Load a checkpoint; with ``spec``, the eyes check that they were trained for such a world."""
        saved = read_config(Path(folder))
        policy = cls(load_policy(Path(folder) / "encoder", spec), from_json(saved["config"]))
        load_weights(policy, Path(folder))
        return policy.eval()
