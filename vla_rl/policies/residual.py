"""Residual policies: a small correction, at every step, of a frozen base that may be a black box.

    a = clip(b + s * u),    b: the base's action, u: the residual's choice, s: its scale; all in units of the bounds

The base is asked for a chunk whenever the last one is used up; its queue is state of this policy, so the base sees
exactly what it would see alone (Ankile et al. 2025, ResFiT, arXiv 2509.19301).  ``b`` is part of what is decided on:
``features["base_action"]`` [E,D], normalised.  Deviations: any policy can be the base; its plan is reset after
termination and truncation alike; and what else is in the queue is decided on as well, since what follows depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import ActionOut, ContextPolicy, CriticAction, Features, Likelihood, Mode, Policy, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.flow import gaussian_kl
from vla_rl.policies.heads import DeterministicHead, GaussianHead, Head, HeadConfig
from vla_rl.policies.normalization import Affine, action_limits
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import Saveable, load_weights, save_folder

_BASE = "base/"


class Base(Policy, Saveable, Protocol):
    """Any policy that acts in ``spec`` and can be saved; it is only ever asked to act, in mode "eval"."""

    spec: EnvSpec


class ObservationEncoder(Base, Protocol):
    """What the residual sees with: ``encode`` stores, besides other things, the entries ``feature_sizes``."""

    @property
    def feature_sizes(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class ResidualConfig:
    """How large the correction may be and how it explores, in units of the action's half-range."""

    scale: float = 0.3
    plan: int = 4  # actions of the base beyond the next one that are decided on, 0 where it has not chosen them yet
    noise: float = 0.1  # standard deviation of exploration; of ``u`` itself where the residual is Gaussian
    correlation: float = 0.5  # of the noise of a deterministic residual with that of the step before
    head: HeadConfig = HeadConfig()


class ResidualPolicy(nn.Module):
    """What every residual shares: the base with its queue, the eyes, checkpoints.  Subclasses choose ``u``.

    ``encoder`` defaults to the base.  Neither is trained, and neither is among :meth:`trainable`.
    """

    delta: Head
    action_low: Tensor
    action_high: Tensor

    def __init__(
        self, base: Base, encoder: ObservationEncoder | None = None, config: ResidualConfig | None = None
    ) -> None:
        super().__init__()
        if encoder is None and (not hasattr(base, "feature_sizes") or isinstance(base, ContextPolicy)):
            raise UserError(
                f"{type(base).__name__} does not say what it perceives, whatever its state, so the residual would act "
                "blindly; give eyes: a policy with `feature_sizes`, such as an imitation checkpoint."
            )
        self.config, self.version, self.spec = config or ResidualConfig(), 0, base.spec
        # Not registered: what is frozen or not even a module is neither moved, nor saved, nor copied with this one.
        self._frozen = (base, encoder)
        self.action_scale = Affine.from_bounds(self.spec.action)
        low, high = action_limits(self.spec)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    @property
    def base(self) -> Base:
        return self._frozen[0]

    @property
    def encoder(self) -> Any:
        return self._frozen[1] or self._frozen[0]

    @property
    def feature_sizes(self) -> dict[str, int]:
        """What the residual decides on, by size."""
        base = {"base_action": self.spec.action_dim, "base_plan": self.config.plan * self.spec.action_dim}
        return {**self.encoder.feature_sizes, **base}

    # -- seeing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """What the eyes store and, with the prefix "base/", what the base does."""
        features = dict(self.encoder.encode(obs))
        given = features if self._frozen[1] is None else self.base.encode(obs)
        return features | {_BASE + name: item for name, item in given.items()}

    def initial_state(self, num_envs: int) -> State:
        """An empty queue [E,max_chunk+plan,D] of normalised base actions, and the base's own state."""
        queue = torch.zeros(num_envs, self.spec.max_chunk + self.config.plan, self.spec.action_dim)
        own = {"queue": queue, "left": torch.zeros(num_envs, dtype=torch.long)}
        return own | {_BASE + name: item for name, item in self.base.initial_state(num_envs).items()}

    def reset_state(self, state: State, env_ids: Array) -> State:
        left = state["left"].clone()
        left[torch.as_tensor(env_ids, dtype=torch.long)] = 0
        theirs = self.base.reset_state(_base_entries(state), env_ids)
        return {**state, "left": left, **{_BASE + name: item for name, item in theirs.items()}}

    @torch.no_grad()
    def context(self, features: Features, state: State, generator: torch.Generator) -> tuple[Features, State]:
        """Adds ``base_action`` [E,D] and ``base_plan`` [E,plan*D]; the base is asked where the queue is empty."""
        empty = (state["left"] == 0).nonzero().flatten()
        if len(empty):
            state = self._refill_queue(features, state, empty, generator)
        queue, left = state["queue"], state["left"]
        seen = {name: item for name, item in features.items() if not name.startswith(_BASE)}
        seen["base_action"] = queue[:, 0].clone()
        ahead = torch.arange(1, 1 + self.config.plan)
        seen["base_plan"] = (queue[:, ahead] * (ahead < left[:, None])[..., None]).flatten(1)
        return seen, {**state, "queue": queue.roll(-1, 1), "left": left - 1}

    def _refill_queue(self, features: Features, state: State, rows: Tensor, generator: torch.Generator) -> State:
        """``state`` with the base's chunk in the queue of ``rows``; raises NonFiniteError when it is no number."""
        given = {name: item[rows] for name, item in _base_entries(features).items()}
        before = {name: item[rows] for name, item in _base_entries(state).items()}
        if isinstance(self.base, ContextPolicy):
            given, before = self.base.context(given, before, generator)
        out, after = self.base.act(given, before, "eval", generator)
        chunk = torch.as_tensor(out.action)
        bad = ~chunk.isfinite().flatten(1).all(1)
        if bad.any():
            raise NonFiniteError(
                f"the base {type(self.base).__name__} chose a non-finite action in row {int(rows[bad][0])}, so nothing "
                "was executed; look at its checkpoint, the residual cannot mend it."
            )
        queue, left = state["queue"].clone(), state["left"].clone()
        queue[rows, : chunk.shape[1]] = self.action_scale.normalize(chunk).to(queue)
        left[rows] = chunk.shape[1]
        theirs = {name: item.clone() for name, item in _base_entries(state).items()}
        for name, item in after.items():
            theirs[name][rows] = item
        return {**state, "queue": queue, "left": left, **{_BASE + name: item for name, item in theirs.items()}}

    # -- acting -----------------------------------------------------------------------------------------------------

    def corrected(self, features: Features, u: Tensor) -> Tensor:
        """``b + s u`` [B,D], not yet clipped."""
        return features["base_action"].to(u) + self.config.scale * u

    def _action_out(self, total: Tensor, sample: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        action = self.action_scale.unnormalize(total[:, None]).clamp(self.action_low, self.action_high)
        return action, sample[:, None], logprob

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Standardise what the residual sees; its first correction is 0 before and after."""
        self.delta.trunk.inputs.calibrate(features, reducer)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The residual's weights."""
        return dict(self.delta.named_parameters())

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and the frozen policies in ``base`` and ``encoder``."""
        base, encoder = self._frozen
        inside: dict[str, Saveable] = {"base": base, "encoder": encoder} if encoder else {"base": base}
        kind = f"{type(self).__module__}:{type(self).__qualname__}"
        config = {"policy": kind, "config": to_json(self.config), "spec": self.spec.to_json(), "inside": sorted(inside)}
        save_folder(Path(folder), config, self.state_dict(), inside)

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> ResidualPolicy:
        """Load a checkpoint; with ``spec``, the base and the eyes check that they were trained for such a world."""
        saved = read_config(Path(folder))
        parts = {name: load_policy(Path(folder) / name, spec) for name in saved["inside"]}
        policy = cls(parts["base"], parts.get("encoder"), from_json(saved["config"]))
        load_weights(policy, Path(folder))
        return policy.eval()


class DeterministicResidual(ResidualPolicy):
    """``u = tanh(f(o, b))`` and Gaussian noise on top while exploring: what TD3 trains (``ReparametrisedPolicy``).

    The noise is an Ornstein-Uhlenbeck process, 0 at first, as in DDPG (Lillicrap et al. 2015, arXiv 1509.02971): one
    independent step hardly moves the outcome of an episode, so a critic could not tell good corrections from bad ones.
    """

    def __init__(
        self, base: Base, encoder: ObservationEncoder | None = None, config: ResidualConfig | None = None
    ) -> None:
        super().__init__(base, encoder, config)
        self.delta = DeterministicHead(self.feature_sizes, self.spec.action_dim, self.config.head)

    def initial_state(self, num_envs: int) -> State:
        """The queue, the base's own state and the noise [E,D]."""
        return {**super().initial_state(num_envs), "noise": torch.zeros(num_envs, self.spec.action_dim)}

    def reset_state(self, state: State, env_ids: Array) -> State:
        noise = state["noise"].clone()
        noise[torch.as_tensor(env_ids, dtype=torch.long)] = 0.0
        return {**super().reset_state(state, env_ids), "noise": noise}

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: torch.Generator) -> tuple[ActionOut, State]:
        u = self.delta(features)
        total = self.corrected(features, u)
        if mode == "sample":
            fresh = torch.randn(total.shape, generator=generator)
            kept, new = self.config.correlation, (1.0 - self.config.correlation**2) ** 0.5
            noise = kept * state["noise"] + self.config.noise * new * fresh
            total, state = total + noise, {**state, "noise": noise}
        out = self._action_out(total, u, torch.zeros(len(u)))
        return ActionOut(*out, {}, self.version), state

    def rsample(self, features: Features, generator: torch.Generator) -> CriticAction:
        """The correction [B,D] as far as the bounds let it through, without noise."""
        total = self.corrected(features, self.delta(features)).clamp(-1.0, 1.0)
        return CriticAction(self._correction(features, total), torch.zeros(len(total)))

    def critic_action(self, features: Features, sample: Tensor, executed: Tensor) -> Tensor:
        """The correction [B,D] that would have led to what was executed.

        Deviation from ResFiT, whose critics judge the whole action: b and a are nearly equal, so a critic lays the
        value of b at the door of a, and its gradient drives the actor off before it knows anything.
        """
        return self._correction(features, self.action_scale.normalize(executed[:, 0]))

    def _correction(self, features: Features, total: Tensor) -> Tensor:
        return (total - features["base_action"].to(total)) / self.config.scale


class GaussianResidual(ResidualPolicy):
    """``u ~ N(f(o, b), std^2)``, never clipped, ``std`` learned: what PPO trains (``LikelihoodPolicy``)."""

    def __init__(
        self, base: Base, encoder: ObservationEncoder | None = None, config: ResidualConfig | None = None
    ) -> None:
        super().__init__(base, encoder, config)
        self.delta = GaussianHead(self.feature_sizes, self.spec.action_dim, self.config.head, self.config.noise)

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: torch.Generator) -> tuple[ActionOut, State]:
        u, std = self.delta(features)
        logprob = torch.zeros(len(u), dtype=torch.float64)
        if mode == "sample":
            u = u + std * torch.randn(u.shape, generator=generator, dtype=u.dtype)
            logprob = self.log_prob(features, u[:, None], {}).logprob
        out = self._action_out(self.corrected(features, u), u, logprob)
        return ActionOut(*out, {}, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Density of the raw corrections ``u``; the sum is float64 so that ratios keep their precision."""
        mean, std = self.delta(features)
        terms = -0.5 * ((sample[:, 0] - mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)
        entropy = (std.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1, dtype=torch.float64)
        params = {"mean": mean[:, None], "std": std[:, None]}
        return Likelihood(terms.sum(-1, dtype=torch.float64), entropy, params)

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        """Exact KL(old || new) [B]."""
        return gaussian_kl(old["mean"], old["std"], new["mean"], new["std"])


def _base_entries(items: Mapping[str, Any]) -> dict[str, Any]:
    """The base's own entries, under their own names."""
    return {name.removeprefix(_BASE): item for name, item in items.items() if name.startswith(_BASE)}
