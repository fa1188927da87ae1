"""Feed-forward policies: from nothing a Gaussian for bounded actions and a categorical one for choices (PPO, GRPO).

On a frozen observation encoder a squashed Gaussian, which SAC, RLPD, IQL, Cal-QL and WSRL train:

    a = tanh(u),    u ~ N(mean(o), std(o)^2),    log pi(a|o) = sum [log N(u) - log(1 - tanh(u)^2)]

``a`` is a whole chunk in units of the bounds, its ``A = H D`` entries side by side (Haarnoja et al. 2018, arXiv
1801.01290, app. C).  A chunk is one decision, so critics learn one value for the whole chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Self, TypeAlias, cast

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import DEEPEST, WIDEST, Checked, above_zero, check_choice, from_json, to_json, within
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import ActionOut, CriticAction, Features, Likelihood, Mode, State
from vla_rl.policies.flow import gaussian_kl
from vla_rl.policies.heads import HeadConfig, HoldsFrozen, ObservationEncoder, SquashedHead
from vla_rl.policies.history import EARLIER, MOST_STEPS, ObservationPolicy, history_of, history_through
from vla_rl.policies.image_encoder import Activation, ImageEncoder, encode_inputs, hidden_layers
from vla_rl.policies.noise import Generators, normal, uniform
from vla_rl.policies.normalization import (
    Affine,
    RunningStatistics,
    build_standardizer,
    check_same_env,
)
from vla_rl.policies.pretrained import read_config
from vla_rl.pretrained import load_weights, save_folder

LogprobPer: TypeAlias = Literal["chunk", "action", "token"]


def sum_per(terms: Tensor, horizon: int, logprob_per: LogprobPer) -> Tensor:
    """The log-prob of every part from those of all entries, ``terms`` [B,H*D].

    float64 [B] per chunk, [B,H] per action and [B,H*D] per token (an entry of the chunk); float64 so that ratios keep
    their precision.
    """
    if logprob_per == "token":
        return terms.double()
    if logprob_per == "action":
        return terms.unflatten(-1, (horizon, -1)).sum(-1, dtype=torch.float64)
    return terms.sum(-1, dtype=torch.float64)


def density(log_probs: Tensor, index: Tensor) -> Tensor:
    """The log-probability [B,N] of every chosen ``index`` [B,...], of N in all, by ``log_probs`` [B,N,K]."""
    return log_probs.gather(-1, index.flatten(1)[..., None]).squeeze(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """float64 [B]: the sum over the N distributions ``log_probs`` [B,N,K]."""
    return -(log_probs.exp() * log_probs).sum((1, 2), dtype=torch.float64)


def categorical_kl(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
    """Exact KL(old || new) [B] of ``log_probs`` [B,N,K]."""
    one, other = old["log_probs"], new["log_probs"]
    return (one.exp() * (one - other)).sum((1, 2))


@dataclass(frozen=True)
class FeedForwardConfig(Checked):
    """Sizes of the network, and the cameras that it reads."""

    horizon: int = within(1, 1, WIDEST)  # H: actions in a chunk
    width: int = within(64, 1, WIDEST)
    depth: int = within(2, 1, DEEPEST)
    cameras: tuple[str, ...] = ()
    logprob_per: LogprobPer = "chunk"  # or "action", "token" (an entry): what has a ratio of its own in PPO and GRPO
    activation: Activation = "tanh"  # or "elu", of the hidden layers
    n_obs_steps: int = within(1, 1, MOST_STEPS)  # states that a decision reads: its own and those of decisions before

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "logprob_per", "chunk", "action", "token")
        check_choice(self, "activation", "tanh", "elu")
        if self.n_obs_steps > 1 and self.cameras:
            raise UserError(
                f"n_obs_steps is {self.n_obs_steps} and {', '.join(self.cameras)} would be read (cameras), but of "
                "earlier observations such a policy reads states only; leave one of them out, or imitate with a "
                "NewTiny, which reads earlier pictures."
            )


class FeedForwardPolicy(ObservationPolicy):
    """One network from proprioception and images to the parameters of a distribution over action chunks.

    Proprioception is standardised by ``proprioception``: the bounds of ``spec.state`` by default, or
    ``RunningStatistics(S)``, the statistics of all training data so far, for states without bounds.  The images of
    ``config.cameras`` go through an :class:`ImageEncoder` that is trained with the rest.  With ``config.n_obs_steps``
    the states of earlier decisions are read as well (``policies/history.py``).  It implements ``Observer``.
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
        size = spec.state.shape[0]
        self.history = history_of(config.n_obs_steps, config.horizon, {"state": size})
        inputs = config.n_obs_steps * size + self.vision.size
        hidden = hidden_layers(inputs, config.width, config.depth, config.activation)
        last = nn.Linear(config.width if config.depth else inputs, self._num_outputs())
        self.network = nn.Sequential(*hidden, last)

    def _num_outputs(self) -> int:
        """``N``: how many parameters of the distribution the network chooses."""
        raise NotImplementedError

    @property
    def last(self) -> nn.Linear:
        return cast(nn.Linear, self.network[-1])

    @property
    def entries(self) -> int:
        """Numbers in a chunk, H*D."""
        return self.config.horizon * self.spec.action_dim

    @property
    def feature_sizes(self) -> dict[str, int]:
        """The states are all that a head may act on; pixels are read through :meth:`new_vision`."""
        size, earlier = self.spec.state.shape[0], self.history.feature_sizes if self.history else {}
        return {"state": size, **earlier} if size else {}

    def new_vision(self) -> ImageEncoder:
        """An untrained encoder of the pictures that this policy reads, for its critic."""
        return ImageEncoder.of(self.spec, self.config.cameras)

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """``{"state": [E,S] physical, "time": [E,1], "image/NAME": uint8 [E,h,w,c]}``; see ``encode_inputs``."""
        return encode_inputs(obs, self.spec, self.config.cameras, self.last.weight.device)

    def outputs(self, features: Features) -> Tensor:
        """What the network chooses, [B,N]: the parameters of the distribution."""
        state = self.standardize(features["state"].to(self.last.weight))
        if self.history:
            earlier = features[EARLIER + "state"].to(state).unflatten(-1, (self.history.n_obs_steps - 1, -1))
            state = torch.cat([self.standardize(earlier).flatten(1), state], -1)
        if self.config.cameras:
            state = torch.cat([state, self.vision(features)], -1)
        return self.network(state)

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


class GaussianChunks(ObservationPolicy):
    """``N(mean(o), diag(std^2))`` over normalised chunks, ``std`` learned and the same everywhere.

    The sample is never clipped, so its density is exact; the action is the sample in physical units, clipped to the
    bounds.  Mode "eval" takes the mean.  Subclasses have ``mean``, and how log-probs are summed.
    """

    version: int
    action_scale: Affine
    log_std: nn.Parameter  # [H*D]

    def chunked(self, flat: Tensor) -> Tensor:
        """[...,H*D] as [...,H,D]."""
        raise NotImplementedError

    def logprob(self, terms: Tensor) -> Tensor:
        """The log-prob of the chunk or of its parts from that of every entry [B,H*D]."""
        raise NotImplementedError

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Mode "eval" draws nothing, so it needs no generator."""
        sample = mean = self.mean(features)
        if mode == "sample":
            std = self.log_std.exp()
            sample = mean + std * normal(mean.shape, generator, like=mean)
            terms = self._log_density(mean, std, sample)
        else:
            terms = torch.zeros_like(mean)
        logprob, sample = self.logprob(terms), self.chunked(sample)
        action = self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)
        return ActionOut(action, sample, logprob, {}, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Density of the raw samples, summed in float64 over the chunk, or over each of its parts."""
        mean, std = self.mean(features), self.log_std.exp()
        logprob = self.logprob(self._log_density(mean, std, sample.reshape(mean.shape)))
        entropy = (self.log_std + 0.5 * math.log(2.0 * math.pi * math.e)).sum(dtype=torch.float64)
        params = {"mean": mean[:, None], "std": std.expand_as(mean)[:, None]}
        return Likelihood(logprob, entropy.expand(len(mean)), params)

    kl = staticmethod(gaussian_kl)

    def mean(self, features: Features) -> Tensor:
        """The mean of the distribution, [B,H*D] normalised, with gradient."""
        raise NotImplementedError

    def _log_density(self, mean: Tensor, std: Tensor, sample: Tensor) -> Tensor:
        """The log-density of every entry of ``sample``, all [B,H*D] but ``std`` [H*D], that of ``log_std``."""
        terms = -0.5 * ((sample - mean) / std).square() - self.log_std
        return terms - 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class GaussianConfig(FeedForwardConfig):
    """And how much it explores at first."""

    std: float = above_zero(0.5)  # initial, of normalised actions


class GaussianPolicy(FeedForwardPolicy, GaussianChunks):
    """A Gaussian over chunks; see ``FeedForwardPolicy`` for what its mean depends on.

    It implements ``LikelihoodPolicy`` and ``Observer``.
    """

    config: GaussianConfig

    def __init__(
        self,
        spec: EnvSpec,
        proprioception: Affine | RunningStatistics | None = None,
        config: GaussianConfig | None = None,
    ) -> None:
        super().__init__(spec, proprioception, config or GaussianConfig())
        self.action_scale = Affine.from_bounds(spec.action)
        nn.init.orthogonal_(self.last.weight, 0.01)  # the initial mean is near the middle of the bounds in every state
        nn.init.zeros_(self.last.bias)
        self.log_std = nn.Parameter(torch.full_like(self.last.bias, math.log(self.config.std)))
        self.set_limits(spec)

    def _num_outputs(self) -> int:
        return self.entries

    def mean(self, features: Features) -> Tensor:
        return self.outputs(features)


_IMPOSSIBLE = -1e9  # logit of an index that an entry does not have; finite, as 0 * -inf would be NaN


@dataclass(frozen=True)
class CategoricalConfig(FeedForwardConfig):
    """There is no more to choose."""


class CategoricalPolicy(FeedForwardPolicy):
    """An independent categorical distribution for every entry of the chunk, given the observation.

    See ``FeedForwardPolicy`` for what it depends on.  A sample is indices that count from 0; the action counts from the
    lowest index of the spec.  All indices are equally likely at initialisation.  Mode "eval" takes the most likely
    indices.  It implements ``LikelihoodPolicy`` and ``Observer``.
    """

    config: CategoricalConfig
    first: Tensor
    impossible: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        proprioception: Affine | RunningStatistics | None = None,
        config: CategoricalConfig | None = None,
    ) -> None:
        """Raises ContractError for an environment whose actions are not discrete."""
        if not spec.discrete:
            raise ContractError(
                f"the actions of {spec.name!r} are physical quantities, so a categorical policy cannot choose them; "
                "use vla_rl.policies.feed_forward:GaussianPolicy."
            )
        super().__init__(spec, proprioception, config or CategoricalConfig())
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        first, counts = _indices(spec)
        impossible = torch.arange(int(counts.max())) >= counts[:, None]
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("impossible", impossible.repeat(self.config.horizon, 1), persistent=False)

    def _num_outputs(self) -> int:
        return self.entries * int(_indices(self.spec)[1].max())

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Mode "eval" draws nothing, so it needs no generator."""
        log_probs = self.log_probs(features)
        index = log_probs.argmax(-1)
        logprob = self.logprob(torch.zeros_like(log_probs[..., 0]))
        if mode == "sample":
            # The largest of log-probabilities plus Gumbel noise is a sample of the distribution.
            drawn = uniform(log_probs.shape, generator, like=log_probs).clamp_min(1e-20)
            index = (log_probs - (-drawn.log()).log()).argmax(-1)
            logprob = self.logprob(density(log_probs, index))
        sample = self.chunked(index)
        return ActionOut(sample + self.first, sample, logprob, {}, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Log-probability of recorded indices, summed over the chunk in float64, or over each of its parts."""
        log_probs = self.log_probs(features)
        return Likelihood(self.logprob(density(log_probs, sample)), entropy(log_probs), {"log_probs": log_probs})

    kl = staticmethod(categorical_kl)

    def log_probs(self, features: Features) -> Tensor:
        """The logarithm of the probability of every index of every entry, [B,H*D,N]."""
        logits = self.outputs(features).unflatten(-1, (self.entries, -1))
        return logits.masked_fill(self.impossible, _IMPOSSIBLE).log_softmax(-1)


def _indices(spec: EnvSpec) -> tuple[Tensor, Tensor]:
    """Lowest index and number of indices of every entry of an action, both int64 [D]."""
    low, high = (torch.as_tensor(bound, dtype=torch.int64) for bound in (spec.action.low, spec.action.high))
    return low.expand(spec.action_dim), (high - low + 1).expand(spec.action_dim)


@dataclass(frozen=True)
class ActorConfig(GaussianConfig):
    """A Gaussian policy where actions are continuous, a categorical one, without ``std``, where they are discrete."""

    def build(self, spec: EnvSpec, proprioception: Affine | RunningStatistics) -> GaussianPolicy | CategoricalPolicy:
        shared = {item.name: getattr(self, item.name) for item in fields(FeedForwardConfig)}
        if spec.discrete:
            return CategoricalPolicy(spec, proprioception, CategoricalConfig(**shared))
        return GaussianPolicy(spec, proprioception, GaussianConfig(**shared, std=self.std))


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

    parts = ("encoder",)

    def __init__(self, encoder: ObservationEncoder, config: SquashedConfig | None = None) -> None:
        super().__init__()
        self.config, self.version, self.spec = config or SquashedConfig(), 0, encoder.spec
        if not 1 <= self.horizon <= self.spec.max_chunk:
            raise UserError(
                f"{self.spec.name!r} executes chunks of 1 to {self.spec.max_chunk} actions, so it cannot execute "
                f"{self.horizon}; choose another horizon."
            )
        self._frozen, self.history = (encoder,), history_through(encoder, self.horizon)
        self.action_scale = Affine.from_bounds(self.spec.action)
        if not self.config.std_bounds[0] < self.config.std < self.config.std_bounds[1]:
            raise UserError(
                f"the initial std {self.config.std:g} is not between its bounds {self.config.std_bounds}, so the "
                "network cannot be initialised with it; change one of them."
            )
        outputs, bounds = self.horizon * self.spec.action_dim, self.config.std_bounds
        self.head = SquashedHead(self.feature_sizes, outputs, self.config.head, self.config.std, bounds)
        self.set_limits(self.spec)

    @property
    def encoder(self) -> ObservationEncoder:
        return self._frozen[0]

    @property
    def feature_sizes(self) -> dict[str, int]:
        return dict(self.encoder.feature_sizes)

    @property
    def horizon(self) -> int:
        return self.config.horizon

    # -- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """The encoder's features: those of :attr:`feature_sizes`, and others for critics."""
        return self.encoder.encode(obs)

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
