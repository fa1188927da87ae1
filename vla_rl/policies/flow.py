"""Flow-matching sampling as a stochastic policy: chains, their exact densities, and the flow-matching loss.

Convention: ``t=1`` is noise and ``t=0`` the action, ``x_t = (1-t) x_0 + t eps``, ``v = E[eps - x_0 | x_t]``.
Shapes: ``B`` samples, ``N`` latent dimensions (chunk and action flattened), ``K`` steps, ``m`` noisy steps per sample.

The chain's density is ``p(x_{t_1..t_K} | x_1) = prod_k N(x_{k+1}; mean_k(x_k), std_k^2)``.  Its log is **summed** over
steps and dimensions: a mean would make the ratio a root of itself, scale the gradient and break ``E_old[ratio] = 1``.
The density of the initial noise does not depend on the weights and is left out: it would only cost precision.

A schedule says how a flow is integrated from noise to an action, and how much noise each step adds: it fills a table.
Every step from ``t`` to ``s < t`` is Gaussian: ``x_s ~ N(w0 x0_hat + w1 x1_hat, std^2 I)`` with the estimates
``x0_hat = x_t - t v`` and ``x1_hat = x_t + (1-t) v``.

What K=4 steps cost (1-D data N(0.3, 0.4^2), a=0.5, relative error of the final variance): ODE -58 %, Flow-SDE -34 %,
Flow-OU -59 %, Flow-CPS -61 %.  The ODE's own error dominates and noise cancels some of it, so closeness to the data at
K <= 10 says nothing about which sampler is right.  At K=50: -6 %, -3 %, -7 %, -21 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import Features
from vla_rl.policies.noise import Generators, integers, normal, normals, sent, uniform


class VelocityField(Protocol):
    """A network conditioned on an observation."""

    def __call__(self, x: Tensor, t: Tensor) -> Field:
        """The field at ``k`` points of every sample's chain: ``x`` [B,k,N], ``t`` [B,k]."""


@dataclass(frozen=True)
class Chain:
    """A recorded sampling chain: everything that a likelihood needs.

    points       float [B,K+1,N]  from ``x_1`` (noise) to ``x_0`` (the sample), never clipped, in the dtype of the noise
    noisy_steps  int64 [B,m]      the steps to which noise was added, ascending
    """

    points: Tensor
    noisy_steps: Tensor

    @property
    def sample(self) -> Tensor:
        """``x_0`` [B,N]."""
        return self.points[:, -1]

    def select(self, index: Tensor | slice) -> Chain:
        return Chain(self.points[index], self.noisy_steps[index])


@dataclass(frozen=True)
class Gaussians:
    """The distributions of a chain's noisy steps.

    mean, std          [B,m,N]        parameters of every step, in the chain's dtype
    logprob, entropy   float64 [B]    summed over steps and dimensions (nats)
    """

    mean: Tensor
    std: Tensor
    logprob: Tensor
    entropy: Tensor


def gaussian_kl(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
    """Exact ``KL(old || new)`` float64 [B] of Gaussians with ``mean`` and ``std`` [B,m,N], in every step of a chain.

    At the same points of chains; an upper bound of that of the actions (data processing), in nats.
    """
    ratio = old["std"] / new["std"]
    shift = (old["mean"] - new["mean"]) / new["std"]
    terms = 0.5 * (ratio - 1.0) * (ratio + 1.0) - ratio.log() + 0.5 * shift**2
    return terms.sum(dim=(1, 2), dtype=torch.float64)


def flow_matching_errors(field: VelocityField, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """``(v - (eps - x_0))^2`` [B,N]; ``x0`` and ``noise`` [B,N], ``t`` [B] (Lipman, arXiv 2210.02747)."""
    time = t.unsqueeze(-1)
    point = (1.0 - time) * x0 + time * noise
    velocity = field(point.unsqueeze(1), time).velocity.squeeze(1)
    return (velocity.to(x0.dtype) - (noise - x0)).square()


def imitation_losses(
    field_of: Callable[[Features], VelocityField],
    features: Features,
    chunks: Tensor,
    draws: int,
    generator: torch.Generator,
) -> Tensor:
    """The flow matching loss of every action of ``chunks`` [B,H,D], [B,H]: means over ``draws`` noises and times."""
    target = chunks.flatten(1).repeat(draws, 1)
    noise = normal(target.shape, generator, like=target)
    time = uniform((len(target),), generator, like=target)
    errors = flow_matching_errors(field_of(repeated(features, draws)), target, noise, time)
    return errors.unflatten(0, (draws, len(chunks))).unflatten(-1, chunks.shape[1:]).mean((0, -1))


def repeated(features: Features, times: int) -> Features:
    """Every array [B,...] repeated ``times`` times, [times*B,...]."""
    return {name: value.repeat(times, *(1 for _ in value.shape[1:])) for name, value in features.items()}


Integrate = Callable[[Tensor, int], Tensor]


class NoisePlacement:
    """Which steps of a chain get noise; the others follow the ODE."""

    def draw(self, table: StepTable, batch: int, generator: Generators) -> Tensor:
        """The noisy steps, int64 [B,m] on the host."""
        raise NotImplementedError

    def starts(self, chain: Chain, integrate: Integrate) -> Tensor:
        """The points [B,m,N] at which the likelihood evaluates the noisy steps; by default those that were recorded.

        ``integrate(x [B,N], steps)`` follows the ODE for the first ``steps`` steps, with gradient.
        """
        return _gather(chain.points, chain.noisy_steps)


def _gather(points: Tensor, index: Tensor) -> Tensor:
    """[B,L,N] at ``index`` [B,m] -> [B,m,N]."""
    return points.gather(1, index.unsqueeze(-1).expand(-1, -1, points.shape[-1]))


@dataclass(frozen=True)
class AllSteps(NoisePlacement):
    """Noise in every step whose std is not 0.

    The score is exact for the chain and for the action's marginal policy, provided the last step has noise too (see
    ``last_std`` of the schedules); without it the gradient misses the last step (cosine .96-.99, norm .5-.9).
    """

    def draw(self, table: StepTable, batch: int, generator: Generators) -> Tensor:
        return torch.tensor(table.noisy, dtype=torch.int64).repeat(batch, 1)


@dataclass(frozen=True)
class OneRandomStep(NoisePlacement):
    """Noise in one step, drawn uniformly **per sample** (pi_RL's mixed ODE-SDE, arXiv 2510.25889, draws per batch).

    A surrogate: the gradient passes through the drawn step only; the other steps count as part of the environment.
    The expected gradient is about 1/K of the executed policy's (six toy networks at K=4, a=0.5: norm .26-.30, cosine
    > .998; exactly 1/K as a -> 0).  Drawn per batch, its variance would not fall with the batch.
    """

    def draw(self, table: StepTable, batch: int, generator: Generators) -> Tensor:
        if not table.noisy:
            raise UserError("the schedule adds no noise, so no step can be drawn; choose one with std > 0.")
        choice = integers(len(table.noisy), (batch, 1), generator)
        return torch.tensor(table.noisy, dtype=torch.int64)[choice]


@dataclass(frozen=True)
class LastStep(NoisePlacement):
    """Noise in the last step only, evaluated at the recorded ``x_{K-1}``.

    A surrogate: the first steps count as part of the environment (against the executed policy's gradient, six toy
    networks at K=4, a=0.5: norm .2-.6, cosine .72-.97).  :class:`LastStepFromNoise` is exact.
    """

    def draw(self, table: StepTable, batch: int, generator: Generators) -> Tensor:
        """The last step for every sample."""
        last = table.steps - 1
        if last not in table.noisy:
            raise UserError("the schedule's last step has std 0, so the action has no density; set last_std above 0.")
        return torch.full((batch, 1), last, dtype=torch.int64)


@dataclass(frozen=True)
class LastStepFromNoise(LastStep):
    """Noise in the last step only, with the ODE prefix re-run from the recorded noise.

    The density of the action given ``x_1`` is exact, and so is its gradient; the likelihood back-propagates through K
    network calls.
    """

    def starts(self, chain: Chain, integrate: Integrate) -> Tensor:
        """``F(x_1)`` under the present weights."""
        return integrate(chain.points[:, 0], chain.points.shape[1] - 2).unsqueeze(1)


@dataclass(frozen=True)
class FlowSampler:
    """Draws chains and gives their density, both through one formula (:meth:`_transition`).

    ``schedule``: how much noise each step adds; ``placement``: which steps are noisy; ``steps``: K (4 for pi0, 5 for
    pi0.5).  See each schedule for its bias at K=4 and each placement for whether its gradient is exact.
    ``temperature``: std of the noise that :meth:`deterministic` starts from, in evaluation and deployment (Glow,
    Kingma and Dhariwal 2018, arXiv 1807.03039, section 6).  Below 1 the actions keep near the middle of what was
    imitated.  Chains that are sampled to explore start from N(0, 1) all the same, on which the field was trained.
    """

    schedule: Schedule
    placement: NoisePlacement
    steps: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Raises UserError for less than one step, which would leave the noise as it is, or less noise than none."""
        check_limits(self, steps=(1, math.inf), temperature=(0, math.inf))

    @cached_property
    def table(self) -> StepTable:
        """The schedule's coefficients at K steps."""
        return self.schedule.table(self.steps)

    def scaled(self, factor: float) -> FlowSampler:
        """The same sampler with ``factor`` times the noise.

        All fields of a schedule that are declared ``float`` are magnitudes of noise, also when they hold an int.
        """
        magnitudes = [item.name for item in fields(self.schedule) if item.type in (float, "float")]
        scaled = {name: factor * getattr(self.schedule, name) for name in magnitudes}
        return replace(self, schedule=replace(self.schedule, **scaled))

    def sample(self, field: VelocityField, noise: Tensor, generator: Generators) -> tuple[Chain, Gaussians]:
        """Chains from ``noise`` [B,N] and their density; with grad mode on, the samples are reparameterised."""
        return self.chain(field, noise, *self.draw(noise, generator))

    def draw(self, noise: Tensor, generator: Generators) -> tuple[Tensor, Tensor]:
        """What :meth:`chain` is told: noisy steps int64 [B,m], and N(0, 1) [K,B,N] for chains from ``noise`` [B,N]."""
        noisy_steps = sent(self.placement.draw(self.table, len(noise), generator), noise.device)
        return noisy_steps, normals(self.steps, noise.shape, generator, like=noise)

    def chain(self, field: VelocityField, noise: Tensor, noisy_steps: Tensor, xi: Tensor) -> tuple[Chain, Gaussians]:
        """The chains of what :meth:`draw` gave; nothing is drawn here, so that a graph can record it."""
        points, means, stds = [noise], [], []
        for k in range(self.steps):
            index = torch.where((noisy_steps == k).any(1, keepdim=True), k, self.steps + k)
            mean, std = self._transition(field, points[-1].unsqueeze(1), index)
            points.append((mean + std * xi[k].unsqueeze(1)).squeeze(1))
            means.append(mean)
            stds.append(std)
        chain = Chain(torch.stack(points, 1), noisy_steps)
        return chain, _gaussians(
            chain, _gather(torch.cat(means, 1), noisy_steps), _gather(torch.cat(stds, 1), noisy_steps)
        )

    def deterministic(self, field: VelocityField, noise: Tensor) -> Tensor:
        """``x_0`` [B,N] by the ODE from ``noise`` [B,N], as in evaluation and deployment."""
        return self._integrate(field, noise, self.steps)

    def log_prob(self, field: VelocityField, chain: Chain) -> Gaussians:
        """The density of recorded chains under ``field``, with gradient; one network call for all noisy steps."""
        if chain.noisy_steps.shape[1] == 0:
            raise UserError("no step of these chains has noise, so they have no density; sample with a noise schedule.")
        starts = self.placement.starts(chain, lambda x, steps: self._integrate(field, x, steps))
        return _gaussians(chain, *self._transition(field, starts, chain.noisy_steps))

    def _integrate(self, field: VelocityField, x: Tensor, steps: int) -> Tensor:
        """The first ``steps`` ODE steps from ``x`` [B,N]."""
        for k in range(steps):
            index = torch.full((x.shape[0], 1), self.steps + k, device=x.device)
            x = self._transition(field, x.unsqueeze(1), index)[0].squeeze(1)
        return x

    def _transition(self, field: VelocityField, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std [B,k,N] of steps ``index`` [B,k] from ``x`` [B,k,N]; K..2K-1 are the ODE's steps 0..K-1."""
        t, w0, w1, table_std = self._coefficients(x)[:, index].unsqueeze(-1).unbind(0)
        out = field(x, t.squeeze(-1))
        velocity = out.velocity.to(x.dtype)
        mean = w0 * (x - t * velocity) + w1 * (x + (1.0 - t) * velocity)
        return mean, self.schedule.std(table_std, out).expand_as(mean)

    def _coefficients(self, like: Tensor) -> Tensor:
        """``t, w0, w1, std`` of the schedule's K steps followed by those of the ODE, [4,2K]; one copy per device."""
        key = (like.dtype, like.device)
        if key not in self._copies or like.device.type == "meta":  # those belong to one estimate of memory
            pairs = zip(self.table.columns(), Ode().table(self.steps).columns(), strict=True)
            self._copies[key] = torch.tensor([noisy + ode for noisy, ode in pairs], dtype=like.dtype).to(like.device)
        return self._copies[key]

    @cached_property
    def _copies(self) -> dict[tuple[torch.dtype, torch.device], Tensor]:
        return {}


def _gaussians(chain: Chain, mean: Tensor, std: Tensor) -> Gaussians:
    """Density of the recorded end points of the noisy steps; summed in float64 to keep the precision of ratios."""
    log_std = std.log()
    z = (_gather(chain.points, chain.noisy_steps + 1) - mean) / std
    logprob = -0.5 * z.square() - log_std - 0.5 * math.log(2.0 * math.pi)
    entropy = log_std + 0.5 * math.log(2.0 * math.pi * math.e)
    return Gaussians(mean, std, logprob.sum((1, 2), dtype=torch.float64), entropy.sum((1, 2), dtype=torch.float64))


@dataclass(frozen=True)
class Field:
    """The output of a network for ``B`` samples at ``k`` points of their chains.

    velocity  [B,k,N]          ``v = E[eps - x_0 | x_t]``, with ``x_t = (1-t) x_0 + t eps``
    log_std   [B,k,N] or None  raw output of the noise head; :class:`FlowNoise` bounds it, the others ignore it
    """

    velocity: Tensor
    log_std: Tensor | None = None


@dataclass(frozen=True)
class StepTable:
    """Coefficients of the ``K`` steps: ``times`` [K+1] from 1 to 0; ``w0``, ``w1`` and ``std`` [K]."""

    times: tuple[float, ...]
    w0: tuple[float, ...]
    w1: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def steps(self) -> int:
        """``K``."""
        return len(self.std)

    @property
    def noisy(self) -> tuple[int, ...]:
        """Steps that add noise; the others have no density."""
        return tuple(k for k, std in enumerate(self.std) if std > 0)

    def columns(self) -> list[list[float]]:
        """``[t, w0, w1, std]``, each [K], to be made a tensor."""
        return [list(self.times[:-1]), list(self.w0), list(self.w1), list(self.std)]


class Schedule:
    """What a sampler needs to know about the noise; a frozen dataclass whose float fields are magnitudes of noise."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def table(self, steps: int) -> StepTable:
        raise NotImplementedError

    def std(self, table_std: Tensor, field: Field) -> Tensor:
        """Standard deviation, broadcastable to [B,k,N], from the table's [B,k,1] and the network's output.

        By default the table's own.
        """
        return table_std


def time_grid(steps: int) -> tuple[float, ...]:
    """``t_k = 1 - k/K`` for k = 0..K: the one grid of sampling and likelihood alike."""
    if steps < 1:
        raise UserError(f"a flow cannot be integrated in {steps} steps; set steps to 1 or more.")
    return tuple(1.0 - k / steps for k in range(steps + 1))


def bounded_log_std(raw: Tensor, std_min: float, std_max: float) -> Tensor:
    """Squash ``raw`` (any shape) into ``[ln std_min, ln std_max]``, linear in ``tanh(raw)`` (pi_RL, Flow-Noise)."""
    low, high = math.log(std_min), math.log(std_max)
    return low + (high - low) * (torch.tanh(raw) + 1.0) / 2.0


def _table(times: tuple[float, ...], w1: Sequence[float], std: Sequence[float]) -> StepTable:
    """A table whose ``w0`` is ``1 - s``, as in every sampler here."""
    return StepTable(times, tuple(1.0 - s for s in times[1:]), tuple(w1), tuple(std))


def _with_last_std(std: list[float], last_std: float) -> list[float]:
    """Put noise into the last step, which would otherwise have no density; the means stay as they are."""
    return [*std[:-1], last_std]


def _check(name: str, value: float, high: float = math.inf) -> None:
    if not 0.0 <= value <= high:
        raise UserError(f"{name} is {value}, so the noise schedule is undefined; choose it within [0, {high:g}].")


@dataclass(frozen=True)
class Ode(Schedule):
    """``dx = v dt`` by Euler steps, without noise or density; used in evaluation and deployment."""

    def table(self, steps: int) -> StepTable:
        """``w1 = s``, ``std = 0``."""
        times = time_grid(steps)
        return _table(times, times[1:], [0.0] * steps)


@dataclass(frozen=True)
class FlowSde(Schedule):
    """Flow-SDE (pi_RL, arXiv 2510.25889; Flow-GRPO, arXiv 2505.05470): Euler-Maruyama on the marginal-preserving SDE
    ``dx = [v + sigma^2/(2t) x1_hat] dt + sigma dW`` with ``sigma = a sqrt(t/(1-t))``.

    At t=1 the singular denominator ``1-t`` is replaced by that of the next time, as in the published code (clipping t
    to .99 instead would more than triple the variance at K=4).  At K=4, a=0.5 the final variance is 34 % below the
    data's (the ODE's 58 %), and the last step adds std .144 (``a/(K sqrt(1-1/K))``) straight to the action.
    """

    a: float = 0.5

    def table(self, steps: int) -> StepTable:
        """``w1 = s - sigma^2 d/(2t)``, ``std = sigma sqrt(d)`` with ``d = t - s``."""
        _check("FlowSde.a", self.a)
        times = time_grid(steps)
        w1, std = [], []
        for t, s in pairwise(times):
            sigma = self.a * math.sqrt(t / (1.0 - min(t, times[1])))
            w1.append(s - sigma**2 * (t - s) / (2.0 * t))
            std.append(sigma * math.sqrt(t - s))
        return _table(times, w1, std)


def _decay(t: float, s: float) -> float:
    """``(1-t) s / (t (1-s))``: the factor by which noise correlation decays; 0 from pure noise and into the action."""
    return (1.0 - t) * s / (t * (1.0 - s))


@dataclass(frozen=True)
class FlowOu(Schedule):
    """Exact solution of Flow-SDE's equation for a frozen ``x0_hat`` (an Ornstein-Uhlenbeck process in ``x1_hat``).

    Ours, not published.  It has no singularity at t=1 (pure noise is replaced by fresh noise) and, at K=4, a=0.5 on a
    2-D mixture, a sliced-W1 distance of .004 to the deployed ODE where Flow-SDE has .045, for the same exploration; its
    variance is 59 % below the data's, the ODE's 58 %.  ``last_std`` > 0 gives the last step, which would be
    deterministic, a density; without it the policy whose gradient is taken has a frozen last step.
    """

    a: float = 0.5
    last_std: float = 0.0

    def table(self, steps: int) -> StepTable:
        """``w1 = s rho``, ``std = s sqrt(1-rho^2)`` with ``rho = decay^(a^2/2)``."""
        _check("FlowOu.a", self.a)
        _check("FlowOu.last_std", self.last_std)
        times = time_grid(steps)
        pairs = list(pairwise(times))
        rho = [_decay(t, s) ** (self.a**2 / 2.0) for t, s in pairs]
        w1 = [s * r for (_, s), r in zip(pairs, rho, strict=True)]
        std = [s * math.sqrt(1.0 - r**2) for (_, s), r in zip(pairs, rho, strict=True)]
        return _table(times, w1, _with_last_std(std, self.last_std))


@dataclass(frozen=True)
class FlowDdim(Schedule):
    """DDIM with noise (Song et al., arXiv 2010.02502, eq. 16) on the flow's path; a = sqrt(2) is ancestral sampling.

    ``eta = a/sqrt(2)``, so that ``a`` agrees with Flow-SDE's for many steps.  Distance to the deployed ODE at K=4, a=1
    (as for :class:`FlowOu`): .006.  ``last_std`` as in :class:`FlowOu`.
    """

    a: float = 0.5
    last_std: float = 0.0

    def table(self, steps: int) -> StepTable:
        """``w1 = sqrt(s^2 - std^2)``, ``std = eta s sqrt(1 - decay^2)``."""
        _check("FlowDdim.a", self.a, math.sqrt(2.0))
        _check("FlowDdim.last_std", self.last_std)
        times = time_grid(steps)
        eta = self.a / math.sqrt(2.0)
        pairs = list(pairwise(times))
        std = [eta * s * math.sqrt(1.0 - _decay(t, s) ** 2) for t, s in pairs]
        w1 = [math.sqrt(max(s**2 - d**2, 0.0)) for (_, s), d in zip(pairs, std, strict=True)]
        return _table(times, w1, _with_last_std(std, self.last_std))


@dataclass(frozen=True)
class FlowCps(Schedule):
    """Coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952): ``x1_hat`` is rotated towards noise by ``pi a/2``.

    **Not marginal-preserving**: for many steps the variance falls short by (1-cos(pi a/2))/2, 15 % at a=0.5.  At K=4 it
    stays close to the ODE (distance .007), so it is a fine exploration sampler.  ``last_std`` as in :class:`FlowOu`.
    """

    a: float = 0.5
    last_std: float = 0.0

    def table(self, steps: int) -> StepTable:
        """``w1 = s cos(pi a/2)``, ``std = s sin(pi a/2)``."""
        _check("FlowCps.a", self.a, 1.0)
        _check("FlowCps.last_std", self.last_std)
        times = time_grid(steps)
        angle = math.pi * self.a / 2.0
        w1 = [s * math.cos(angle) for s in times[1:]]
        std = [s * math.sin(angle) for s in times[1:]]
        return _table(times, w1, _with_last_std(std, self.last_std))


@dataclass(frozen=True)
class FlowNoise(Schedule):
    """Flow-Noise (pi_RL, arXiv 2510.25889; ReinFlow, arXiv 2505.22094): ODE steps plus noise of a learned std.

    ``std = exp(bounded_log_std(Field.log_std))`` lies in [std_min, std_max]; the same bound serves sampling and
    likelihood (ReinFlow's code clamps in one of them only).  Evaluation has no noise.  Not marginal-preserving: at K=4
    the variance exceeds the ODE's by 6 % (std .08) to 23 % (.16).  Unlike ReinFlow's, nothing is clipped or averaged.
    """

    std_min: float = 0.08
    std_max: float = 0.16

    def table(self, steps: int) -> StepTable:
        """The ODE's, with std 1: a factor of the learned one."""
        if not 0.0 < self.std_min < self.std_max:
            raise UserError(
                f"FlowNoise bounds std by [{self.std_min}, {self.std_max}], which leaves nothing to learn; "
                "choose 0 < std_min < std_max."
            )
        times = time_grid(steps)
        return _table(times, times[1:], [1.0] * steps)

    def std(self, table_std: Tensor, field: Field) -> Tensor:
        """The learned std where the table is 1, none where it is 0."""
        if field.log_std is None:
            raise ContractError(
                "FlowNoise found no Field.log_std, so there is no density; give the network a noise head."
            )
        return table_std * bounded_log_std(field.log_std.to(table_std.dtype), self.std_min, self.std_max).exp()
