"""Denoising steps: the Gaussians that the DDIM and DDPM schedulers of diffusers imply, and their density.

Convention: ``x_t = sqrt(alpha_t) x_0 + sqrt(1 - alpha_t) eps`` at the integer timesteps of training, ``alpha`` being
diffusers' ``alphas_cumprod``.  Shapes: ``B`` samples, ``N`` dimensions, ``K`` steps, the last ``K'`` of them
fine-tuned.  Betas and timesteps are diffusers'; what they imply for a step from ``t`` to ``s`` is one formula
(:func:`step_table`):

    x_s ~ N( w_0 x0_hat + w_x x_t, std^2 ),     x0_hat = clip(c_x x_t + c_n network(x_t, t))

It is equation 12 of DDIM (Song et al. 2021, arXiv 2010.02502), with the noise taken from the *clipped* ``x0_hat``; with
eta = 1 this is DDPM's posterior (Ho et al. 2020, arXiv 2006.11239, eq. 7), clipped or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from vla_rl.contract.errors import UserError
from vla_rl.policies.noise import Generators, normal

Network: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A network conditioned on an observation: points [B,k,N] and timesteps / training timesteps [B,k] -> [B,k,N]."""


@dataclass(frozen=True)
class Process:
    """The forward diffusion process; names and values are those of diffusers' schedulers.

    "v_prediction" (Salimans & Ho 2022, arXiv 2202.00512) replaces DPPO's "epsilon": at the noisiest of 20 timesteps
    the cosine schedule multiplies an error in the noise by 400, so nearly every ``x0_hat`` would be clipped there, and
    clipped values have no gradient (lift, 30 demonstrations, the same 800 steps, one seed, 256 validation
    scenes: 58.6 % with v, 42.2 % with epsilon).
    """

    timesteps: int = 20
    betas: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "squaredcos_cap_v2"
    prediction: Literal["epsilon", "v_prediction"] = "v_prediction"
    clip: float = 1.0  # |x0_hat| is at most this; normalised actions are within 1

    def options(self) -> dict[str, Any]:
        """Arguments for a scheduler of diffusers; "trailing" starts at the noisiest timestep, which is pure noise."""
        return {
            "num_train_timesteps": self.timesteps,
            "beta_schedule": self.betas,
            "prediction_type": self.prediction,
            "clip_sample": True,
            "clip_sample_range": self.clip,
            "timestep_spacing": "trailing",
        }


class Reverse(Protocol):
    """A reverse process; its two numbers are multiples of DDPM's posterior std."""

    @property
    def exploring(self) -> float:
        """Noise in mode "sample", before the floor."""

    @property
    def deployed(self) -> float:
        """Noise in mode "eval"."""

    def scaled(self, factor: float) -> Reverse:
        """The same process with its adjustable noise multiplied by ``factor``."""

    def scheduler(self, process: Process) -> Any:
        """The scheduler of diffusers that defines these steps."""


@dataclass(frozen=True)
class Ddim:
    """DDIM: noise ``eta`` in exploration, none in deployment.  Raises UserError unless 0 <= eta <= 1."""

    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise UserError(
                f"eta is {self.eta}, so a step would add more noise than it takes away; choose one from 0 to 1."
            )

    @property
    def exploring(self) -> float:
        return self.eta

    @property
    def deployed(self) -> float:
        return 0.0

    def scaled(self, factor: float) -> Ddim:
        return replace(self, eta=self.eta * factor)

    def scheduler(self, process: Process) -> Any:
        return diffusers().DDIMScheduler(**process.options())


@dataclass(frozen=True)
class Ddpm:
    """Ancestral sampling ("fixed_small"): the posterior's noise, in exploration and deployment alike."""

    @property
    def exploring(self) -> float:
        return 1.0

    @property
    def deployed(self) -> float:
        return 1.0

    def scaled(self, factor: float) -> Ddpm:
        return self

    def scheduler(self, process: Process) -> Any:
        return diffusers().DDPMScheduler(**process.options())


def diffusers() -> Any:
    """The package; raises UserError, naming the extra, when it is not installed."""
    try:
        import diffusers as package
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed, so a diffusion policy has no noise schedule; "
            "pip install 'vla-rl[diffusion]'."
        ) from error
    return package


class StepTable(NamedTuple):
    """One entry per step, float64 [K], noisiest first; see the formula at the top of this file."""

    time: Tensor  # timestep / training timesteps
    from_x: Tensor  # c_x
    from_network: Tensor  # c_n
    on_x0: Tensor  # w_0
    on_x: Tensor  # w_x
    std: Tensor


def step_table(process: Process, reverse: Reverse, steps: int, noise: float, floor: float) -> StepTable:
    """The ``steps`` steps of ``reverse``, with ``noise`` times DDPM's posterior std but at least ``floor``.

    The floor adds noise without changing the mean, as in DPPO; without it the last step is deterministic.
    """
    scheduler = reverse.scheduler(process)
    scheduler.set_timesteps(steps)
    alpha = scheduler.alphas_cumprod.double()[scheduler.timesteps]
    after = torch.cat([alpha[1:], alpha.new_ones(1)])
    std = noise * ((1 - after) / (1 - alpha) * (1 - alpha / after)).sqrt()
    on_x = (1 - after - std**2).clamp_min(0).sqrt() / (1 - alpha).sqrt()
    on_x0 = after.sqrt() - on_x * alpha.sqrt()
    if process.prediction == "epsilon":
        from_x, from_network = alpha.rsqrt(), -((1 - alpha) / alpha).sqrt()
    else:
        from_x, from_network = alpha.sqrt(), -(1 - alpha).sqrt()
    time = scheduler.timesteps.double() / process.timesteps
    return StepTable(time, from_x, from_network, on_x0, on_x, std.clamp_min(floor))


@dataclass(frozen=True)
class DiffusionSampler:
    """Draws chains and gives their density, both through one formula (:meth:`_transition`).

    ``fine_tuned`` is K': the last K' steps are trained and have a density; the first steps use a frozen network, so
    the density is exact for the policy (x_{K-K'}, action) and its score gradient is that of the executed policy.
    ``floor`` is the minimum std of exploration, the same in sampling and likelihood (.1 for both in DPPO, arXiv
    2409.00588).  The deployed policy has no floor.

    Raises UserError for numbers that define no such chain.
    """

    process: Process = Process()
    reverse: Ddim | Ddpm = Ddim()
    steps: int = 5
    fine_tuned: int = 5
    floor: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.fine_tuned <= self.steps:
            raise UserError(
                f"{self.fine_tuned} of {self.steps} denoising steps are to be fine-tuned, so no chain has such a "
                "density; set fine_tuned from 1 to steps."
            )
        if self.steps > self.process.timesteps or self.process.timesteps % self.steps:
            raise UserError(
                f"{self.steps} steps do not divide the {self.process.timesteps} timesteps of training, so they would "
                "not end at the action; choose a divisor."
            )
        if not self.floor > 0:
            raise UserError(
                f"the floor of the noise is {self.floor}, so the last step, and with it the action, would have no "
                "density; set it above 0."
            )

    @cached_property
    def table(self) -> StepTable:
        """The steps of exploration and of the likelihood."""
        return step_table(self.process, self.reverse, self.steps, self.reverse.exploring, self.floor)

    @cached_property
    def deployed_table(self) -> StepTable:
        """The steps of deployment."""
        return step_table(self.process, self.reverse, self.steps, self.reverse.deployed, 0.0)

    def scaled(self, factor: float) -> DiffusionSampler:
        """The same sampler with ``factor`` times the noise, floor included; the noise of DDPM itself is not scaled."""
        return replace(self, reverse=self.reverse.scaled(factor), floor=self.floor * factor)

    def sample(
        self, early: Network, late: Network, noise: Tensor, generator: Generators
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Chains from ``noise`` [B,N] by ``early`` and, in the last K' steps, ``late``; with gradient: reparameterised.

        Returns the points [B,K'+1,N] of the fine-tuned steps, never clipped, and mean and std [B,K',N].
        """
        points, means, stds = self._denoise(self.table, early, late, noise, generator)
        first = self.steps - self.fine_tuned
        return torch.stack(points[first:], 1), torch.cat(means[first:], 1), torch.cat(stds[first:], 1)

    def deployed(self, early: Network, late: Network, noise: Tensor, generator: Generators) -> Tensor:
        """The sample [B,N] from ``noise`` [B,N] in mode "eval"; DDPM draws its noise from ``generator``."""
        return self._denoise(self.deployed_table, early, late, noise, generator)[0][-1]

    def gaussians(self, late: Network, points: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std [B,K',N] of recorded ``points`` [B,K'+1,N] under ``late``, with gradient; one network call."""
        return self._transition(self.table, late, points[:, :-1], slice(self.steps - self.fine_tuned, self.steps))

    def _denoise(
        self, table: StepTable, early: Network, late: Network, x: Tensor, generator: Generators
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        points, means, stds = [x], [], []
        for k in range(self.steps):
            network = late if k >= self.steps - self.fine_tuned else early
            mean, std = self._transition(table, network, points[-1].unsqueeze(1), slice(k, k + 1))
            xi = normal(x.shape, generator, like=x)
            points.append((mean + std * xi.unsqueeze(1)).squeeze(1))
            means.append(mean)
            stds.append(std)
        return points, means, stds

    def _transition(self, table: StepTable, network: Network, x: Tensor, steps: slice) -> tuple[Tensor, Tensor]:
        """Mean and std [B,k,N] of ``steps`` from ``x`` [B,k,N]."""
        coefficients = self._coefficients(table, x)[:, steps].unsqueeze(-1)
        time, from_x, from_network, on_x0, on_x, std = coefficients.unbind(0)
        output = network(x, time.squeeze(-1).expand(x.shape[:2])).to(x.dtype)
        x0 = (from_x * x + from_network * output).clamp(-self.process.clip, self.process.clip)
        mean = on_x0 * x0 + on_x * x
        return mean, std.expand_as(mean)

    def _coefficients(self, table: StepTable, like: Tensor) -> Tensor:
        """The columns of ``table`` [6,K] in the dtype and on the device of ``like``; one copy per device."""
        key = (table is self.table, like.dtype, like.device)
        if key not in self._copies:
            self._copies[key] = torch.stack(tuple(table)).to(like)
        return self._copies[key]

    @cached_property
    def _copies(self) -> dict[tuple[bool, torch.dtype, torch.device], Tensor]:
        return {}


def step_logprob(ends: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density float64 [B,m] of ``ends`` [B,m,N] under the steps' Gaussians, summed over N (nats)."""
    z = (ends - mean) / std
    return (-0.5 * z.square() - std.log() - 0.5 * math.log(2.0 * math.pi)).sum(-1, dtype=torch.float64)


def step_entropy(std: Tensor) -> Tensor:
    """Entropy float64 [B,m] of the steps' Gaussians with ``std`` [B,m,N], summed over N (nats)."""
    return (std.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1, dtype=torch.float64)


def denoising_errors(
    process: Process, network: Network, x0: Tensor, noise: Tensor, timestep: Tensor, scheduler: Any
) -> Tensor:
    """Squared errors [B,N] of the network's prediction (noise or v) at ``timestep`` int64 [B].

    ``x0`` and ``noise`` are [B,N]; the unweighted loss of DDPM (eq. 14), by ``scheduler`` of diffusers.
    """
    point = scheduler.add_noise(x0, noise, timestep)
    target = noise if process.prediction == "epsilon" else scheduler.get_velocity(x0, noise, timestep)
    time = (timestep.to(x0) / process.timesteps).unsqueeze(1)
    return (network(point.unsqueeze(1), time).squeeze(1) - target).square()
