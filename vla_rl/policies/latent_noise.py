"""Latent-noise policies: they choose the initial noise ``w`` of an imitation policy's flow.

    a = clip(g(o, w), -1, 1),    g: the base's ODE from t=1 to t=0, w [B,N], in the place of N(0, I)

So every typical ``w`` gives an action that the base might have chosen (Wagenmaker et al. 2025, DSRL, arXiv
2506.15799).  No gradient passes through ``g``.  Only ``w`` is random, so its density is that of the decision, and its
ratios are exact as long as ``g`` does not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import Checked, above_zero, check_limits
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, CriticAction, Features, Likelihood, Mode, Policy, State
from vla_rl.policies.flow import VelocityField, gaussian_kl
from vla_rl.policies.heads import GaussianHead, Head, HeadConfig, HoldsFrozen, SquashedHead
from vla_rl.policies.noise import Generators
from vla_rl.policies.normalization import ORIGIN, Affine
from vla_rl.pretrained import Saveable


class FlowBase(Policy, Saveable, Protocol):
    """A flow policy without state of its own over chunks [B,H,D], normalised by the bounds of the action.

    One over longer chunks and larger actions than are executed, as those of pi0 and SmolVLA, has ``latent_shape``, rows
    and columns ``(C, A)`` of the noise that a chain starts from, and ``bounded(end, features)``: the executed part of a
    chain's end [B,CA], normalised by the bounds of the action, [B,HD] in [-1, 1].
    """

    spec: EnvSpec

    @property
    def config(self) -> Any:
        """With ``horizon``, actions in a chunk, and ``sampler``, whose ODE decodes."""

    @property
    def feature_sizes(self) -> dict[str, int]: ...

    def field(self, features: Features) -> VelocityField: ...

    def trainable(self) -> dict[str, nn.Parameter]: ...


def is_padded(base: FlowBase) -> bool:
    """Whether ``base`` makes longer chunks or larger actions than are executed."""
    return hasattr(base, "bounded")


@dataclass(frozen=True)
class LatentConfig(Checked):
    """The network that outputs the noise.

    Of a flow over padded chunks only the first ``rows`` rows of noise are chosen, and the last one is repeated for the
    others, as in DSRL's public code for pi0 (0: all rows are chosen).  With repeated rows the untrained policy is not
    the base's: its noise is the same in all rows.
    """

    head: HeadConfig = HeadConfig()
    rows: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, rows=(0, math.inf))


@dataclass(frozen=True)
class SquashedLatentConfig(LatentConfig):
    """``magnitude`` m bounds the noise; it excludes 31.7 % (m=1), 13.4 % (1.5) or 4.6 % (2) of N(0, 1)."""

    magnitude: float = above_zero(1.5)
    std: float = above_zero(1.0)  # initial, of ``u``


class LatentPolicy(HoldsFrozen):
    """The common part of latent-noise policies: base, decoding, checkpoints.  Subclasses define ``w``.

    The base is not in :meth:`trainable`.  Mode "eval" takes the mean of ``w`` (of ``u`` where it is squashed), so the
    deployed policy is deterministic, while the base alone draws its noise.
    """

    actor: Head

    def __init__(self, base: FlowBase, config: LatentConfig) -> None:
        super().__init__()
        if not hasattr(base, "field") or not hasattr(base.config, "sampler"):
            otherwise = "so there is no noise to choose; give a flow policy such as an imitation checkpoint."
            raise UserError(
                f"{type(base).__name__} is not a flow policy (it lacks field or config.sampler), "
                f"{getattr(base, 'instead', otherwise)}"
            )
        self.config, self.version, self.spec = config, 0, base.spec
        self._frozen, self.history = (base,), getattr(base, "history", None)
        self.action_scale = Affine.from_bounds(self.spec.action)
        self.set_limits(self.spec)

    @property
    def base(self) -> Any:
        return self._frozen[0]

    @property
    def horizon(self) -> int:
        return self.base.config.horizon

    @property
    def latent_shape(self) -> tuple[int, int]:
        """Rows and columns of the noise that is chosen: ``(H, D)``, or the first rows of a padded flow's."""
        if not is_padded(self.base):
            return self.horizon, self.spec.action_dim
        rows, columns = self.base.latent_shape
        return min(self.config.rows or rows, rows), columns

    @property
    def latent(self) -> int:
        """``N``: entries of the noise that is chosen."""
        return math.prod(self.latent_shape)

    @property
    def feature_sizes(self) -> dict[str, int]:
        return self.base.feature_sizes

    # -- acting -----------------------------------------------------------------------------------------------------

    def encode(self, obs: Observation) -> Features:
        return self.base.encode(obs)

    def recorded(self, features: Features) -> Features:
        """Without what only the decoder of a padded flow reads; others are refitted or decode while learning."""
        read = (*self.feature_sizes, "time") if is_padded(self.base) else tuple(features)
        return {name: features[name] for name in read}

    @torch.no_grad()
    def decode(self, features: Features, w: Tensor) -> Tensor:
        """``clip(g(o, w), -1, 1)`` [B,HD]: the normalised chunk, flattened, for noise ``w`` [B,N]."""
        field, sampler = self.base.field(features), self.base.config.sampler
        if not is_padded(self.base):
            end = sampler.deterministic(field, w)
            own = getattr(self.base, "action_scale", self.action_scale)  # by data, or of relative actions
            if own == self.action_scale and ORIGIN not in features:
                return end.clamp(-1.0, 1.0)
            return self.normalized(self.base.executed(end, features)["action"])
        rows = w.unflatten(-1, self.latent_shape)
        last = rows[:, -1:].expand(-1, self.base.latent_shape[0] - rows.shape[1], -1)
        return self.base.bounded(sampler.deterministic(field, torch.cat([rows, last], 1).flatten(1)), features)

    def normalized(self, executed: Tensor) -> Tensor:
        """Executed chunks [B,H,D] in the form of :meth:`decode`, [B,HD]."""
        return self.action_scale.normalize(executed).flatten(1)

    def _action_out(self, features: Features, w: Tensor, logprob: Tensor) -> ActionOut:
        shape = (self.horizon, self.spec.action_dim)
        chunk = self.action_scale.unnormalize(self.decode(features, w).unflatten(-1, shape))
        action = chunk.clamp(self.action_low, self.action_high)  # rounding
        return ActionOut(action, w.unflatten(-1, self.latent_shape), logprob, {}, self.version)

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Standardise the features; the initial noise does not depend on them, so it does not change."""
        self.actor.trunk.inputs.calibrate(features, reducer)

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.actor.named_parameters())


class SquashedLatent(LatentPolicy):
    """``w = m tanh(u)``, ``u ~ N(mean(o), std(o)^2)``: trained by SAC (``ReparametrisedPolicy``).

    Critics take ``w / m`` within [-1, 1], and the density is that of ``w / m``: it lacks the constant ``-N log m``, so
    the target entropy needs no shift.
    """

    config: SquashedLatentConfig
    actor: SquashedHead

    def __init__(self, base: FlowBase, config: SquashedLatentConfig | None = None) -> None:
        super().__init__(base, config := config or SquashedLatentConfig())
        self.actor = SquashedHead(self.feature_sizes, self.latent, config.head, config.std)

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        if mode == "eval":
            choice = self.actor.mode(features)
            logprob = choice.new_zeros(len(choice))
        else:
            choice, logprob = self.actor(features, generator)
        return self._action_out(features, self.config.magnitude * choice, logprob), state

    def rsample(self, features: Features, generator: torch.Generator) -> CriticAction:
        """``w / m`` [B,N] and its log-density [B]."""
        return CriticAction(*self.actor(features, generator))

    def critic_action(self, features: Features, sample: Tensor, executed: Tensor) -> Tensor:
        """``w / m`` [B,N] of the recorded sample; the executed action does not determine it."""
        return sample.flatten(1) / self.config.magnitude


class GaussianLatent(LatentPolicy):
    """``w ~ N(mean(o), std^2)``, never clipped: trained by PPO (``LikelihoodPolicy``).

    Initially mean 0 and std 1: in mode "sample" it starts as the imitation policy.  Deviation from GoRL (arXiv
    2512.02581): the learned ``std`` does not depend on the observation, as in the other Gaussian policies here.
    """

    actor: GaussianHead

    def __init__(self, base: FlowBase, config: LatentConfig | None = None) -> None:
        super().__init__(base, config := config or LatentConfig())
        self.actor = GaussianHead(self.feature_sizes, self.latent, config.head, std=1.0)

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        return self._action_out(features, *self.actor.choose(features, mode, generator)), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        return self.actor.likelihood(features, sample)

    kl = staticmethod(gaussian_kl)

    @torch.no_grad()
    def restart(self) -> None:
        """Reset to ``w ~ N(0, I)`` for every observation; the hidden layers keep their weights."""
        for parameter in (self.actor.last.weight, self.actor.last.bias, self.actor.log_std):
            parameter.zero_()
