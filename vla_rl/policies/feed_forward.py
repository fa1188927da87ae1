"""What policies that are trained from nothing share, whatever distribution their network parametrises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self, cast

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import Features, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.image_encoder import ImageEncoder
from vla_rl.policies.likelihood_parts import LogprobPer, sum_per
from vla_rl.policies.normalization import Affine, check_same_env
from vla_rl.policies.observations import Activation, encode_inputs, hidden_layers
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.statistics import RunningStatistics, build_standardizer
from vla_rl.pretrained import load_weights, save_folder


class FeedForwardConfig(Protocol):
    """Sizes of the network, and the cameras that it reads."""

    @property
    def horizon(self) -> int:
        """``H``: actions in a chunk."""

    @property
    def width(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def cameras(self) -> tuple[str, ...]: ...

    @property
    def activation(self) -> Activation: ...

    @property
    def logprob_per(self) -> LogprobPer:
        """Whether the likelihood is given per chunk, action or token (an entry of the chunk)."""


class FeedForwardPolicy(nn.Module):
    """One network from proprioception and images to the parameters of a distribution over action chunks.

    Proprioception is standardised by ``proprioception``: the bounds of ``spec.state`` by default, or
    ``RunningStatistics(S)``, the statistics of all training data so far, for states without bounds.  The images of
    ``config.cameras`` go through an :class:`ImageEncoder` that is trained with the rest.  It implements ``Observer``.
    """

    config: FeedForwardConfig

    def __init__(
        self, spec: EnvSpec, proprioception: Affine | RunningStatistics | None, config: FeedForwardConfig
    ) -> None:
        super().__init__()
        self.spec, self.config, self.version = spec, config, 0
        self.proprioception = proprioception or Affine.from_bounds(spec.state)
        self.standardize = build_standardizer(self.proprioception)
        self.vision = ImageEncoder.of(spec, config.cameras)
        inputs = spec.state.shape[0] + self.vision.size
        hidden = hidden_layers(inputs, config.width, config.depth, config.activation)
        last = nn.Linear(config.width if config.depth else inputs, self._num_outputs())
        self.network = nn.Sequential(*hidden, last)

    def _num_outputs(self) -> int:
        """``N``: how many parameters of the distribution the network chooses."""
        raise NotImplementedError

    @property
    def last(self) -> nn.Linear:
        """The last layer."""
        return cast(nn.Linear, self.network[-1])

    @property
    def entries(self) -> int:
        """Numbers in a chunk, H*D."""
        return self.config.horizon * self.spec.action_dim

    @property
    def feature_sizes(self) -> dict[str, int]:
        """The state is all that a head may act on; pixels are read through :meth:`new_vision`."""
        size = self.spec.state.shape[0]
        return {"state": size} if size else {}

    def new_vision(self) -> ImageEncoder:
        """An untrained encoder of the pictures that this policy reads, for its critic."""
        return ImageEncoder.of(self.spec, self.config.cameras)

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """``{"state": [E,S] physical, "time": [E,1], "image/NAME": uint8 [E,h,w,c]}``; see ``encode_inputs``."""
        return encode_inputs(obs, self.spec, self.config.cameras, self.last.weight.device)

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    def outputs(self, features: Features) -> Tensor:
        """What the network chooses, [B,N]: the parameters of the distribution."""
        state = self.standardize(features["state"].to(self.last.weight))
        found: Tensor = self.network(torch.cat([state, self.vision(features)], -1))
        return found

    def chunked(self, flat: Tensor) -> Tensor:
        """[...,H*D] as [...,H,D]."""
        return flat.unflatten(-1, (self.config.horizon, self.spec.action_dim))

    def logprob(self, terms: Tensor) -> Tensor:
        """The log-prob of the chunk or of its parts, as the config says, from that of every entry [B,H*D]."""
        return sum_per(terms, self.config.horizon, self.config.logprob_per)

    def observe(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Merge the states [B,S] of the last update into the running statistics, if there are any."""
        self.standardize.observe(features["state"], reducer)

    def trainable(self) -> dict[str, nn.Parameter]:
        """All weights, and the running statistics (without gradient)."""
        return dict(self.named_parameters())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        name = name_of(type(self))
        parts = {"config": to_json(self.config), "proprioception": to_json(self.proprioception)}
        save_folder(Path(folder), {"policy": name, "spec": self.spec.to_json(), **parts}, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> Self:
        """Load a checkpoint; with ``spec``, first check that the policy was trained for such an environment."""
        saved = read_config(Path(folder))
        trained = EnvSpec.from_json(saved["spec"])
        check_same_env(trained, spec or trained)
        policy = cls(spec or trained, from_json(saved["proprioception"]), from_json(saved["config"]))
        load_weights(policy, Path(folder))
        return policy.eval()
