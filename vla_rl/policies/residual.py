"""Residual policies: a small correction of every action of a frozen base policy, which may be a black box.

    a = clip(b + s * u),    b: the base's action, u: the residual's output, s: its scale; all in units of the bounds

The base acts whenever its chunk queue is empty; the queue is state of this policy, so the base gets exactly the
observations that it would get alone (Ankile et al. 2025, ResFiT, arXiv 2509.19301).  The residual's input includes
``features["base_action"]`` [E,H*D], normalised: the next H actions of the base, all of which one decision corrects.
Deviations: any policy can be the base; its queue is cleared after termination and truncation alike; the rest of the
queue is an input as well, since the next states depend on it; and H may be more than 1, up to the base's whole chunk.

How much of a correction is executed while exploring, and how large it may be: little at first, everything later.

    corrected with probability  p = start + (1 - start) min(n / H, 1),    |u| <= g = size + (1 - size) min(n / H, 1)

``n`` counts the decisions since the actor was released.  Of steps, this is Policy Decorator's schedule (Yuan et al.
2024, arXiv 2412.13630), whose probability starts at 0 and whose scale is constant; of episodes, whoever compares them
knows what the correction is worth beside the base.  ``delay`` is PLD's (Xiao et al. 2025, arXiv 2511.00091): the base
alone plays a random number of an episode's first steps, so that the correction meets states from all of it.  What is
not corrected has no exploration noise either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import Checked, above_zero, at_least, within
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import (
    ActionOut,
    CriticAction,
    Features,
    Likelihood,
    Mode,
    State,
    restored_state,
    saved_state,
    with_context,
)
from vla_rl.policies.flow import gaussian_kl
from vla_rl.policies.heads import DeterministicHead, GaussianHead, Head, HeadConfig, HoldsFrozen, ObservationEncoder
from vla_rl.policies.noise import Generators, generators_of, normal, uniform
from vla_rl.policies.normalization import Affine

_BASE, _ENCODER = "base/", "encoder/"


@dataclass(frozen=True)
class ResidualConfig(Checked):
    """Size of the correction and its exploration, in units of the action's half-range.

    ``horizon`` divides the base's chunk: 1 observes and corrects at every step, 0 as rarely as the base.  An episode of
    few decisions tells sooner which of them was good.  Raises UserError for a horizon below 0.
    """

    scale: float = above_zero(0.3)
    horizon: int = at_least(1, 0)  # H: actions of the base that a decision corrects, each by its own ``u``; 0: a chunk
    plan: int = at_least(4, 0)  # queued base actions after those that the residual reads, 0 where the queue is shorter
    noise: float = at_least(0.1, 0.0)  # standard deviation of exploration; that of ``u`` for a Gaussian residual
    correlation: float = within(0.5, 0.0, 1.0)  # between the noise of successive decisions of a deterministic residual
    head: HeadConfig = HeadConfig()
    blend: BlendConfig | None = None  # of a deterministic residual: little correction at first; None: all of it


class ResidualPolicy(HoldsFrozen):
    """The common part of residual policies: base with queue, encoder, checkpoints.  Subclasses define ``u``.

    ``base``: any ``Policy`` for ``base.spec`` that can be saved; it is only asked in mode "eval".  ``encoder`` defaults
    to it.  Neither is trained, and neither is in :meth:`trainable`.
    """

    parts = ("base", "encoder")
    delta: Head

    def __init__(
        self, base: Any, encoder: ObservationEncoder | None = None, config: ResidualConfig | None = None
    ) -> None:
        super().__init__()
        if encoder is None and (not hasattr(base, "feature_sizes") or isinstance(base, ResidualPolicy)):
            raise UserError(
                f"{type(base).__name__} has no feature_sizes, or is a residual itself, so the residual "
                "would have no input; give an encoder: a policy with feature_sizes, such as an imitation checkpoint."
            )
        config = config or ResidualConfig()
        # A base that does not say how many actions it chooses is corrected one by one.
        self.config = config if config.horizon else replace(config, horizon=getattr(base, "horizon", 1))
        self.version, self.spec = 0, base.spec
        if self.horizon > self.spec.max_chunk:
            raise UserError(
                f"a residual that corrects {self.horizon} actions at once would choose chunks that {self.spec.name!r} "
                f"does not execute; give ResidualConfig a horizon of at most {self.spec.max_chunk}."
            )
        self._frozen = (base, encoder)
        self.action_scale = Affine.from_bounds(self.spec.action)
        self.set_limits(self.spec)

    @property
    def base(self) -> Any:
        return self._frozen[0]

    @property
    def encoder(self) -> ObservationEncoder:
        return self._frozen[0] if self._frozen[1] is None else self._frozen[1]

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @property
    def corrections(self) -> int:
        """Entries of one decision: ``horizon`` actions of the spec's dimension."""
        return self.horizon * self.spec.action_dim

    @property
    def feature_sizes(self) -> dict[str, int]:
        base = {"base_action": self.corrections, "base_plan": self.config.plan * self.spec.action_dim}
        return {**self.encoder.feature_sizes, **base}

    # -- observations and the base's queue --------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """The encoder's features and, with the prefix "base/", those of the base."""
        features = dict(self.encoder.encode(obs))
        base_features = features if self._frozen[1] is None else self.base.encode(obs)
        return features | {_BASE + name: item for name, item in base_features.items()}

    def initial_state(self, num_envs: int) -> State:
        """An empty queue [E,max_chunk+plan,D] of normalised base actions, and the base's own state."""
        device, length = self.action_low.device, self.spec.max_chunk + self.config.plan
        queue = torch.zeros(num_envs, length, self.spec.action_dim, device=device)
        own = {"queue": queue, "left": torch.zeros(num_envs, dtype=torch.long, device=device)}
        return _with(_with(own, _BASE, self.base.initial_state(num_envs)), _ENCODER, self._encoder_state(num_envs))

    def _encoder_state(self, num_envs: int) -> State:
        """A history is kept twice: the base's observations are a chunk apart, and a correction's a correction."""
        encoder: Any = self.encoder
        return encoder.initial_state(num_envs) if hasattr(encoder, "context") else {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        left = state["left"].clone()
        left[torch.as_tensor(env_ids, dtype=torch.long)] = 0
        state = _with({**state, "left": left}, _BASE, self.base.reset_state(_entries(state, _BASE), env_ids))
        if encoder := _entries(state, _ENCODER):
            seeing: Any = self.encoder
            state = _with(state, _ENCODER, seeing.reset_state(encoder, env_ids))
        return state

    def saved_state(self, state: State) -> State:
        """The base's as it says, and the queue."""
        return _with(state, _BASE, saved_state(self.base, _entries(state, _BASE)))

    def restored_state(self, saved: State) -> State:
        return _with(saved, _BASE, restored_state(self.base, _entries(saved, _BASE)))

    @torch.no_grad()
    def context(self, features: Features, state: State, generator: Generators) -> tuple[Features, State]:
        """Adds ``base_action`` [E,H*D] and ``base_plan`` [E,plan*D]; the base acts where the queue is empty."""
        empty = (state["left"] == 0).nonzero().flatten()
        if len(empty):
            state = self._refill_queue(features, state, empty, generator)
        queue, left = state["queue"], state["left"]
        if encoder := _entries(state, _ENCODER):
            seeing: Any = self.encoder
            features, encoder = with_context(seeing, features, encoder, generator)
            state = _with(state, _ENCODER, encoder)
        # Not the rest of what an encoder returns: a replay buffer would hold a VLA's prefix for every step.
        inputs = {name: features[name] for name in (*self.encoder.feature_sizes, "time") if name in features}
        inputs["base_action"] = queue[:, : self.horizon].flatten(1)
        position = torch.arange(self.horizon, self.horizon + self.config.plan, device=left.device)
        inputs["base_plan"] = (queue[:, position] * (position < left[:, None])[..., None]).flatten(1)
        return inputs, {**state, "queue": queue.roll(-self.horizon, 1), "left": left - self.horizon}

    def _refill_queue(self, features: Features, state: State, env_ids: Tensor, generator: Generators) -> State:
        """``state`` with a new chunk of the base in the queues of ``env_ids``; raises NonFiniteError for a NaN."""
        own, base_state = generators_of(generator, env_ids), _entries(state, _BASE)
        inputs = {name: item[env_ids.to(item.device)] for name, item in _entries(features, _BASE).items()}
        before = {name: item[env_ids.to(item.device)] for name, item in base_state.items()}
        inputs, before = with_context(self.base, inputs, before, own)
        out, after = self.base.act(inputs, before, "eval", own)
        chunk = torch.as_tensor(out.action, device=env_ids.device)
        bad = ~chunk.isfinite().flatten(1).all(1)
        if bad.any():
            raise NonFiniteError(
                f"the base {type(self.base).__name__} chose a non-finite action in environment {int(env_ids[bad][0])}, "
                "so nothing was executed; check the base's checkpoint, the residual cannot correct it."
            )
        if chunk.shape[1] % self.horizon:
            raise UserError(
                f"the base {type(self.base).__name__} chose {chunk.shape[1]} actions, of which a residual cannot "
                f"correct {self.horizon} at a time, so nothing was executed; give ResidualConfig a horizon that "
                f"divides {chunk.shape[1]}."
            )
        queue, left = state["queue"].clone(), state["left"].clone()
        queue[env_ids, : chunk.shape[1]] = self.action_scale.normalize(chunk).to(queue)
        left[env_ids] = chunk.shape[1]
        merged = {name: item.clone() for name, item in base_state.items()}
        for name, item in after.items():
            merged[name][env_ids.to(item.device)] = item
        return _with({**state, "queue": queue, "left": left}, _BASE, merged)

    # -- acting -----------------------------------------------------------------------------------------------------

    def corrected(self, features: Features, u: Tensor) -> Tensor:
        """``b + s u`` [B,H*D] before clipping."""
        return features["base_action"].to(u) + self.config.scale * u

    def _action_out(self, total: Tensor, sample: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chunk = (self.horizon, self.spec.action_dim)
        action = self.action_scale.unnormalize(total.unflatten(-1, chunk)).clamp(self.action_low, self.action_high)
        return action, sample.unflatten(-1, chunk), logprob

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Standardise the residual's inputs; the initial correction is 0 for every input, so it does not change."""
        self.delta.trunk.inputs.calibrate(features, reducer)

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.delta.named_parameters())


class DeterministicResidual(ResidualPolicy):
    """``u = tanh(f(o, b))``, plus Gaussian noise in mode "sample"; trained by TD3 (``ReparametrisedPolicy``).

    The noise is an Ornstein-Uhlenbeck process that starts at 0, as in DDPG (Lillicrap et al. 2015, arXiv 1509.02971):
    independent noise of one step hardly changes an episode's outcome, so a critic could not rank corrections.
    """

    def __init__(
        self, base: Any, encoder: ObservationEncoder | None = None, config: ResidualConfig | None = None
    ) -> None:
        super().__init__(base, encoder, config)
        self.delta = DeterministicHead(self.feature_sizes, self.corrections, self.config.head)
        self.blend = Blend(self.config.blend, self.spec.time_limit, self.horizon) if self.config.blend else None
        if self.blend:
            # Probability and size of the correction: parameters, so that they are published and kept with the weights.
            self.released = nn.Parameter(torch.zeros(2), requires_grad=False)
            self.set_released(0)

    @torch.no_grad()
    def set_released(self, decisions: int) -> None:
        """Adopt the schedule's settings, see ``vla_rl/contract/policy.py``."""
        if self.blend:
            config = self.blend.config
            self.released.copy_(torch.tensor([config.grown(first, decisions) for first in (config.start, config.size)]))

    def trainable(self) -> dict[str, nn.Parameter]:
        """The residual's weights, and how much of it is released (without gradient)."""
        return super().trainable() | ({"released": self.released} if self.blend else {})

    def initial_state(self, num_envs: int) -> State:
        """The queue, the base's own state, the noise [E,H*D] and where the correction acts."""
        noise = torch.zeros(num_envs, self.corrections, device=self.action_low.device)
        blend = self.blend.initial_state(num_envs, noise.device) if self.blend else {}
        return {**super().initial_state(num_envs), "noise": noise, **blend}

    def reset_state(self, state: State, env_ids: Array) -> State:
        noise, index = state["noise"].clone(), torch.as_tensor(env_ids, dtype=torch.long)
        noise[index] = 0.0
        state = {**super().reset_state(state, env_ids), "noise": noise}
        return self.blend.reset_state(state, index) if self.blend else state

    def correction(self, features: Features) -> Tensor:
        """``u`` [B,H*D], as large as it may be by now."""
        u = self.delta(features)
        return u * self.released[1] if self.blend else u

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        u = self.correction(features)
        total, aux = self.corrected(features, u), dict[str, Tensor]()
        if mode == "sample":
            correlation = self.config.correlation
            innovation = self.config.noise * (1.0 - correlation**2) ** 0.5 * normal(total.shape, generator, like=total)
            noise = correlation * state["noise"] + innovation
            total, state = total + noise, {**state, "noise": noise}
            if self.blend:
                acts, state = self.blend.draw(state, float(self.released[0]), generator)
                total = torch.where(acts[:, None], total, features["base_action"].to(total))
                aux = {"corrected": acts}
        out = self._action_out(total, u, u.new_zeros(len(u)))
        return ActionOut(*out, aux, self.version), state

    def rsample(self, features: Features, generator: torch.Generator) -> CriticAction:
        """The correction [B,H*D] after clipping to the bounds, without noise."""
        total = self.corrected(features, self.correction(features)).clamp(-1.0, 1.0)
        return CriticAction(self._correction(features, total), total.new_zeros(len(total)))

    def critic_action(self, features: Features, sample: Tensor, executed: Tensor) -> Tensor:
        """The correction [B,H*D] that explains the executed actions.

        Deviation from ResFiT, whose critics take the whole action: b and a are nearly equal, so such a critic
        attributes the value of b to a, and its gradient moves the actor before the critic has learnt anything.
        """
        return self._correction(features, self.action_scale.normalize(executed).flatten(1))

    def _correction(self, features: Features, total: Tensor) -> Tensor:
        return (total - features["base_action"].to(total)) / self.config.scale


class GaussianResidual(ResidualPolicy):
    """``u ~ N(f(o, b), std^2)``, never clipped, with a learned ``std``; trained by PPO (``LikelihoodPolicy``)."""

    delta: GaussianHead

    def __init__(
        self, base: Any, encoder: ObservationEncoder | None = None, config: ResidualConfig | None = None
    ) -> None:
        super().__init__(base, encoder, config)
        if self.config.blend:
            raise UserError(
                "a Gaussian residual's likelihood is that of a correction that always acts, so it cannot be blended "
                "with the base; leave ResidualConfig.blend out, or train a deterministic residual."
            )
        self.delta = GaussianHead(self.feature_sizes, self.corrections, self.config.head, self.config.noise)

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        u, logprob = self.delta.choose(features, mode, generator)
        out = self._action_out(self.corrected(features, u), u, logprob)
        return ActionOut(*out, {}, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        return self.delta.likelihood(features, sample)

    kl = staticmethod(gaussian_kl)


def _entries(items: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Those of a policy inside, ``_BASE`` or ``_ENCODER``, under their own names."""
    return {name.removeprefix(part): item for name, item in items.items() if name.startswith(part)}


def _with(state: State, part: str, inside: State) -> State:
    """``state`` with ``inside`` as the entries of ``part``."""
    own = {name: item for name, item in state.items() if not name.startswith(part)}
    return own | {part + name: item for name, item in inside.items()}


@dataclass(frozen=True)
class BlendConfig(Checked):
    """Schedule of the correction while collecting.  Raises UserError for shares outside [0, 1]."""

    decisions: int = at_least(20_000, 1)  # H: of the free actor, until the correction is whole
    start: float = within(0.0, 0, 1)  # probability of the correction at first
    per: Literal["step", "episode"] = "step"  # what the probability is of: a decision, or a whole episode
    size: float = within(1.0, 0, 1)  # largest |u| at first, deployed too
    delay: float = within(0.0, 0, 1)  # of the time limit: the most, drawn uniformly, that the base plays alone

    def grown(self, first: float, released: int) -> float:
        """A share that starts at ``first`` and is 1 after ``decisions`` released ones."""
        return first + (1.0 - first) * min(released / self.decisions, 1.0)


class Blend:
    """Draws where the correction acts; its state is the policy's: ``blend_*``, one entry an environment."""

    def __init__(self, config: BlendConfig, time_limit: int, horizon: int = 1) -> None:
        """``time_limit`` of an episode in control steps, of which a decision takes ``horizon``."""
        self.config, self.time_limit, self.horizon = config, time_limit, horizon

    def initial_state(self, num_envs: int, device: torch.device) -> State:
        """Steps so far, the step at which the correction may begin (-1: not drawn), whether the episode is its."""
        steps = torch.zeros(num_envs, dtype=torch.long, device=device)
        return {"blend_steps": steps, "blend_begin": steps - 1, "blend_mine": torch.zeros_like(steps, dtype=torch.bool)}

    def reset_state(self, state: State, env_ids: Tensor) -> State:
        """New episodes in ``env_ids`` [R]."""
        steps, begin = state["blend_steps"].clone(), state["blend_begin"].clone()
        steps[env_ids], begin[env_ids] = 0, -1
        return {**state, "blend_steps": steps, "blend_begin": begin}

    def draw(self, state: State, probability: float, generator: Generators) -> tuple[Tensor, State]:
        """Where the correction acts in this step, bool [E], and the state after it.

        Three numbers are drawn for every environment and step, used or not: an episode then draws the same whatever
        happens beside it.
        """
        steps, begin, mine = state["blend_steps"], state["blend_begin"], state["blend_mine"]
        drawn = uniform((len(steps), 3), generator, like=torch.empty(0, device=steps.device))
        new = begin < 0
        waits = drawn[:, 0] * (self.config.delay * self.time_limit)
        begin = torch.where(new, waits.long(), begin)
        mine = torch.where(new, drawn[:, 1] < probability, mine)
        acts = mine if self.config.per == "episode" else drawn[:, 2] < probability
        after = {**state, "blend_steps": steps + self.horizon, "blend_begin": begin, "blend_mine": mine}
        return acts & (steps >= begin), after
