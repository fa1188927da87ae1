"""A categorical policy over discrete actions, from proprioception, images or both, trained from nothing by PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.image_encoder import ImageEncoder
from vla_rl.policies.noise import Generators, uniform
from vla_rl.policies.normalization import Affine, check_same_env
from vla_rl.policies.observations import encode_inputs, hidden_layers
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.statistics import RunningStatistics, build_standardizer
from vla_rl.pretrained import load_weights, save_folder

_IMPOSSIBLE = -1e9  # logit of an index that an entry does not have; finite, as 0 * -inf would be NaN


@dataclass(frozen=True)
class CategoricalConfig:
    """Sizes of the network, and the cameras that it reads."""

    horizon: int = 1  # H: actions in a chunk
    width: int = 64
    depth: int = 2
    cameras: tuple[str, ...] = ()


class CategoricalPolicy(nn.Module):
    """An independent categorical distribution for every entry of the chunk, given the observation.

    The inputs are proprioception, standardised by ``proprioception`` (see ``GaussianPolicy``), and the images of
    ``config.cameras`` through an :class:`ImageEncoder` that is trained with the rest.  A sample is indices that count
    from 0; the action counts from the lowest index of the spec.  All indices are equally likely at initialisation.
    Mode "eval" takes the most likely indices.  It implements ``LikelihoodPolicy`` and ``Observer``.
    """

    first: Tensor
    impossible: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        proprioception: Affine | RunningStatistics | None = None,
        config: CategoricalConfig | None = None,
    ) -> None:
        """Raises ContractError for an environment whose actions are not discrete."""
        super().__init__()
        if not spec.discrete:
            raise ContractError(
                f"the actions of {spec.name!r} are physical quantities, so a categorical policy cannot choose them; "
                "use vla_rl.policies.gaussian:GaussianPolicy."
            )
        self.spec, self.config, self.version = spec, config or CategoricalConfig(), 0
        self.proprioception = proprioception or Affine.from_bounds(spec.state)
        self.standardize = build_standardizer(self.proprioception)
        self.vision = ImageEncoder.of(spec, self.config.cameras)
        low, high = (torch.as_tensor(bound, dtype=torch.int64) for bound in (spec.action.low, spec.action.high))
        first, counts = low.expand(spec.action_dim), (high - low + 1).expand(spec.action_dim)
        size = spec.state.shape[0] + self.vision.size
        hidden = hidden_layers(size, self.config.width, self.config.depth)
        last = nn.Linear(self.config.width if self.config.depth else size, self._entries * int(counts.max()))
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(*hidden, last)
        impossible = torch.arange(int(counts.max())) >= counts[:, None]
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("impossible", impossible.repeat(self.config.horizon, 1), persistent=False)

    @property
    def _entries(self) -> int:
        """Independent choices in a chunk, H*D."""
        return self.config.horizon * self.spec.action_dim

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """``{"state": [E,S], "time": [E,1], "image/NAME": uint8 [E,h,w,c]}``; see ``encode_inputs``."""
        return encode_inputs(obs, self.spec, self.config.cameras, self.first.device)

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Mode "eval" draws nothing, so it needs no generator."""
        logits = self.log_probs(features)
        index, logprob = logits.argmax(-1), logits.new_zeros(len(logits), dtype=torch.float64)
        if mode == "sample":
            # The largest of logits plus Gumbel noise is a sample of the distribution.
            index = (logits - (-uniform(logits.shape, generator, like=logits).clamp_min(1e-20).log()).log()).argmax(-1)
            logprob = _log_density(logits, index)
        sample = index.unflatten(-1, (self.config.horizon, self.spec.action_dim))
        return ActionOut(sample + self.first, sample, logprob, {}, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Log-probability of recorded indices, summed over the chunk in float64."""
        logits = self.log_probs(features)
        entropy = -(logits.exp() * logits).sum((1, 2), dtype=torch.float64)
        return Likelihood(_log_density(logits, sample.flatten(1)), entropy, {"log_probs": logits})

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        """Exact KL(old || new) [B]."""
        one, other = old["log_probs"], new["log_probs"]
        return (one.exp() * (one - other)).sum((1, 2))

    def log_probs(self, features: Features) -> Tensor:
        """The logarithm of the probability of every index of every entry, [B,H*D,N]."""
        state = self.standardize(features["state"].to(self.network[-1].weight))
        logits = self.network(torch.cat([state, self.vision(features)], -1)).unflatten(-1, (self._entries, -1))
        return logits.masked_fill(self.impossible, _IMPOSSIBLE).log_softmax(-1)

    def observe(self, features: Features, reducer: Reducer) -> None:
        """Merge the states [B,S] of the last update into the running statistics, if there are any."""
        self.standardize.observe(features["state"], reducer)

    def trainable(self) -> dict[str, nn.Parameter]:
        """All weights, and the running statistics (without gradient)."""
        return dict(self.named_parameters())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        parts = {"config": to_json(self.config), "proprioception": to_json(self.proprioception)}
        save_folder(Path(folder), {"policy": name, "spec": self.spec.to_json(), **parts}, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> CategoricalPolicy:
        """Load a checkpoint; with ``spec``, first check that the policy was trained for such an environment."""
        saved = read_config(Path(folder))
        trained = EnvSpec.from_json(saved["spec"])
        check_same_env(trained, spec or trained)
        policy = cls(spec or trained, from_json(saved["proprioception"]), from_json(saved["config"]))
        load_weights(policy, Path(folder))
        return policy.eval()


def _log_density(log_probs: Tensor, index: Tensor) -> Tensor:
    """float64 [B] of the chosen ``index`` [B,H*D]."""
    return log_probs.gather(-1, index[..., None]).squeeze(-1).sum(-1, dtype=torch.float64)
