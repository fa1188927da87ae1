"""Real-time chunking: a flow policy whose next chunk continues the one that is executed while it computes.

Black, Galliker, Levine 2025 (arXiv 2506.07339).  A robot does not wait for its policy: when a chunk arrives, ``d``
actions of the last one have been executed since the observation that it was made from.  Every step of the flow is
therefore guided, so that the new chunk agrees with the rest of the last one, firmly in its first ``d`` actions and less
and less after them.  In the paper's time ``tau`` (0 noise, 1 action), with its velocity ``v`` and equations 2 to 5:

    A_hat = x + (1 - tau) v                                          the chunk that the flow would end in
    v'    = v + min(beta, (1 - tau) / (tau r^2)) J^T W (Y - A_hat)   r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2)

``Y`` is the rest of the last chunk, ``W`` are :func:`prefix_weights` and ``J = d A_hat / dx``.  Our time runs the other
way, ``t = 1 - tau``, and so does our velocity (``policies/flow.py``): ``A_hat = x - t v`` and the correction is taken
away.  Chunks are compared in normalised units and before clipping, as the network makes them.

Where the policy's actions are relative to the state (``ORIGIN``), the last chunk is kept as absolute, and its rest is
expressed relative to the state of the new observation: the commands that will be executed are what is continued.

Deviations: rows and columns that pad a model's chunk (pi0, SmolVLA) are not guided, since nothing of them is executed;
and the guidance "identity" takes J for the identity, as LeRobot's implementation does (``policies/rtc``), whose weight
is linear by default and clipped at 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.contract.config import check_choice, check_limits
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State
from vla_rl.policies.flow import Field, VelocityField
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.heads import HoldsFrozen
from vla_rl.policies.noise import Generators
from vla_rl.policies.normalization import ORIGIN, Affine, origin_of


@dataclass(frozen=True)
class RealTimeConfig:
    """How chunks are guided.

    guidance  "vjp": the paper's, with a pass back through the network in each step of the flow; or "identity": without
              that pass, so as cheap as no guidance
    beta      bound of the guidance's weight; a flow of K steps overshoots where it is far above K (the paper has 5 for
              its 5 steps)
    """

    guidance: str = "vjp"
    beta: float = 5.0

    def __post_init__(self) -> None:
        check_choice(self, "guidance", "vjp", "identity")
        check_limits(self, beta=(0, math.inf))


def prefix_weights(horizon: int, left: Tensor, delay: Tensor) -> Tensor:
    """``W`` [E,H] of equation 5, for ``left = H - s`` [E] actions of the last chunk and the delay ``d`` [E].

    1 for ``i < d``; then ``c (e^c - 1) / (e - 1)`` with ``c = (H - s - i) / (H - s - d + 1)``; 0 for ``i >= H - s``.
    """
    index, left, delay = torch.arange(horizon, device=left.device), left[:, None], delay[:, None]
    c = (left - index) / (left - delay + 1).clamp_min(1)
    decaying = c * torch.expm1(c) / math.expm1(1.0)
    return torch.where(index < delay, 1.0, decaying) * (index < left)


def guidance_weight(t: Tensor, beta: float) -> Tensor:
    """``min(beta, (1 - tau) / (tau r^2))`` with ``tau = 1 - t``; it is ``beta`` at pure noise."""
    return ((t.square() + (1.0 - t).square()) / (t * (1.0 - t))).clamp_max(beta)


@dataclass(frozen=True)
class Guided:
    """A velocity field that is drawn to ``target`` [E,N] where ``weights`` [E,N] are above 0."""

    target: Tensor
    weights: Tensor
    beta: float

    def velocity(self, field: VelocityField, x: Tensor, t: Tensor, pull: Callable[..., Tensor]) -> Field:
        """``v'`` [E,1,N] at ``x`` [E,1,N] and ``t`` [E,1]; ``pull(error, a_hat, x)`` is ``J^T error``."""
        time = t.unsqueeze(-1)
        velocity = field(x, t).velocity.to(x.dtype)
        a_hat = x - time * velocity
        error = self.weights.unsqueeze(1) * (self.target.unsqueeze(1) - a_hat.detach())
        return Field(velocity.detach() - guidance_weight(time, self.beta) * pull(error, a_hat, x))

    def vjp(self, field: VelocityField) -> VelocityField:

        def guided(x: Tensor, t: Tensor) -> Field:
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                return self.velocity(field, point, t, lambda error, end, at: torch.autograd.grad(end, at, error)[0])

        return guided

    def identity(self, field: VelocityField) -> VelocityField:
        """Without the pass back through the network."""
        return lambda x, t: self.velocity(field, x, t, lambda error, end, at: error)


class RealTimeChunking(HoldsFrozen):
    """A flow policy for robots that move while it computes (``continue_chunk``).

    Its state holds the last chunk [E,H,D], normalised and absolute, and what :meth:`continue_chunk` said.  It decides
    exactly as ``base`` where there is nothing to continue: after a reset, and where the last chunk was executed to its
    end.  It acts in mode "eval" only: guided chains have no density, so an algorithm learns with ``base`` itself.
    Chains and guidance are in the dtype of the base's noise, which is float32 also where its network computes in
    bfloat16; so is the kept chunk.
    """

    action_low: Tensor

    def __init__(self, base: FlowPolicy, config: RealTimeConfig | None = None) -> None:
        """Raises UserError for a policy without a velocity field."""
        super().__init__()
        if not isinstance(base, FlowPolicy):
            raise UserError(
                f"{type(base).__name__} has no velocity field, so its chunks cannot be guided; give a flow policy (an "
                "imitation checkpoint, SmolVLA, pi0), or merge its chunks by temporal ensembling."
            )
        if base.history:
            raise UserError(
                f"{type(base).__name__} reads observations that are a chunk apart (n_obs_steps), and with real-time "
                "chunking it would be asked sooner; execute its chunks to their ends, without --real-time."
            )
        self.config, self.version, self.spec = config or RealTimeConfig(), base.version, base.spec
        self._frozen = (base,)
        self.register_buffer("action_low", base.action_low.clone(), persistent=False)

    @property
    def base(self) -> FlowPolicy:
        return self._frozen[0]

    @property
    def horizon(self) -> int:
        return self.base.horizon

    def trainable(self) -> dict[str, nn.Parameter]:
        """Raises UserError: see the class."""
        raise _no_likelihood()

    # -- what the runtime says ----------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> State:
        """No chunk yet: ``length`` and ``delay`` are 0."""
        chunk = self.base.action_low.new_zeros(num_envs, self.horizon, self.spec.action_dim)
        counts = ("length", "left", "delay")
        return {"chunk": chunk, **{name: torch.zeros(num_envs).to(chunk.device, torch.long) for name in counts}}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return self._with(state, env_ids, left=0, length=0, delay=0)

    def continue_chunk(self, state: State, env_ids: Array, consumed: Array, delay: Array) -> State:
        """See ``vla_rl/contract/policy.py``."""
        rows, steps, late = (
            torch.as_tensor(item, dtype=torch.long, device=self.action_low.device)
            for item in (env_ids, consumed, delay)
        )
        bad = ~((late >= 0) & (late <= steps) & (steps <= self.horizon - late))
        if bad.any():
            raise ContractError(
                f"{int(steps[bad][0])} actions of the last chunk are consumed and the next is delayed by "
                f"{int(late[bad][0])}, which chunks of {self.horizon} cannot bridge; keep delay <= consumed <= "
                f"{self.horizon} - delay, by asking earlier or by longer chunks."
            )
        left = (state["length"][rows] - steps).clamp_min(0)
        return self._with(state, rows, left=left, delay=late)

    def continue_actions(self, state: State, env_ids: Array, rest: Array, delay: Array) -> State:
        """As :meth:`continue_chunk`, for a caller who holds the last chunk itself.

        rest   [R,n,D]  in the spec's units: what is left of the last chunk at the observation's moment
        delay  int [R]  how many of them are executed before the new chunk is used

        Raises ContractError unless ``delay <= n <= H``.
        """
        rows, late = (
            torch.as_tensor(item, dtype=torch.long, device=self.action_low.device) for item in (env_ids, delay)
        )
        actions = torch.as_tensor(rest).to(self.action_low)
        count = actions.shape[1]
        if actions.shape[2:] != self.action_low.shape or not 0 <= int(late.min()) <= int(late.max()) <= count:
            raise ContractError(
                f"the rest of a chunk is {list(actions.shape[1:])} and the next is delayed by {late.tolist()}, so it "
                f"cannot be continued; give [n,{len(self.action_low)}] and a delay of at most n."
            )
        if count > self.horizon:
            raise ContractError(
                f"the rest of a chunk has {count} actions, but chunks of this policy have {self.horizon}, so it cannot "
                "be continued; give what is left of its own last chunk."
            )
        chunk = state["chunk"].clone()
        chunk[rows, self.horizon - count :] = self.base.action_scale.normalize(actions).to(chunk)
        return self._with({**state, "chunk": chunk}, rows, length=self.horizon, left=count, delay=late)

    def _with(self, state: State, env_ids: Array, **values: Any) -> State:
        rows, changed = torch.as_tensor(env_ids, dtype=torch.long, device=self.action_low.device), {**state}
        for name, value in values.items():
            changed[name] = state[name].clone()
            changed[name][rows] = value
        return changed

    # -- acting -----------------------------------------------------------------------------------------------------

    def encode(self, obs: Observation) -> Features:
        return self.base.encode(obs)

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Raises UserError in mode "sample"."""
        if mode != "eval":
            raise _no_likelihood()
        noise = self.base.initial_noise(len(state["left"]), generator)
        origin = self._origin(features)
        found = self._ended(self.guided({**state, "chunk": state["chunk"] - origin}), features, noise)
        out = ActionOut(found["action"], found["sample"], noise.new_zeros(len(noise)), {}, self.version)
        fresh = {"length": self.horizon, "left": 0, "delay": 0}
        counts = {name: torch.full_like(state[name], value) for name, value in fresh.items()}
        return out, {"chunk": out.sample + origin, **counts}

    def _origin(self, features: Features) -> Tensor | float:
        """What turns normalised absolute actions into those of the network: [E,1,D] in units of the scale; or 0."""
        zero = Affine((0.0,) * self.spec.action_dim, self.base.action_scale.scale)
        return zero.normalize(features[ORIGIN])[:, None] if ORIGIN in features else 0.0

    def _ended(self, guided: Guided, features: Features, noise: Tensor) -> Features:
        base, beta = self.base, self.config.beta
        if self.config.guidance == "vjp":  # as it learns: what was compiled or recorded for acting has no gradient
            return base.ended(guided.vjp(base.field(features)), {"noise": noise, **origin_of(features)})
        drawn = {"noise": noise, "target": guided.target, "weights": guided.weights, **origin_of(features)}

        def compute(field: VelocityField, given: Features) -> Features:
            return base.ended(Guided(given["target"], given["weights"], beta).identity(field), given)

        return base.decided(("guided", base.sampler, beta), compute, features, drawn)

    def guided(self, state: State) -> Guided:
        """Target and weights over the chains' padded chunks, from the rest of the last chunk."""
        left, horizon = state["left"], self.horizon
        source = torch.arange(horizon, device=left.device) + (horizon - left)[:, None]
        rest = state["chunk"].gather(1, source.clamp_max(horizon - 1)[..., None].expand_as(state["chunk"]))
        weights = prefix_weights(horizon, left, state["delay"])[..., None].expand_as(rest)
        rows, columns = self.base.latent_shape
        padding = (0, columns - rest.shape[2], 0, rows - horizon)
        target, guided = (nn.functional.pad(item, padding).flatten(1).to(rest) for item in (rest, weights))
        return Guided(target, guided, self.config.beta)


def in_real_time(policy: Policy, guidance: str, name: str) -> Policy:
    """``policy`` with real-time chunking by ``guidance``, itself for "".

    Raises UserError, which calls it ``name``, for one that cannot be guided.
    """
    if not guidance:
        return policy
    if not isinstance(policy, FlowPolicy):
        raise UserError(
            f"{name} is a {type(policy).__name__} without a velocity field, so real-time chunking cannot guide it; "
            "leave --real-time out."
        )
    return RealTimeChunking(policy, RealTimeConfig(guidance))


def _no_likelihood() -> UserError:
    return UserError(
        "RealTimeChunking has no likelihood, since guidance changes what the flow draws, so nothing can be learnt with "
        "it; train the flow policy inside it (the folder 'base' of its checkpoint)."
    )
