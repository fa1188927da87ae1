"""A diffusion policy over action chunks, conditioned on the features of a frozen observation encoder.

Its steps are the Gaussians that the DDIM and DDPM schedulers of diffusers imply.

Convention: ``x_t = sqrt(alpha_t) x_0 + sqrt(1 - alpha_t) eps`` at the integer timesteps of training, ``alpha`` being
diffusers' ``alphas_cumprod``.  Shapes: ``B`` samples, ``N`` dimensions, ``K`` steps, the last ``K'`` of them
fine-tuned.  Betas and timesteps are diffusers'; what they imply for a step from ``t`` to ``s`` is one formula
(:func:`step_table`):

    x_s ~ N( w_0 x0_hat + w_x x_t + w_n network(x_t, t), std^2 ),     x0_hat = clip(c_x x_t + c_n network(x_t, t))

It is equation 12 of DDIM (Song et al. 2021, arXiv 2010.02502), with the noise taken from the *clipped* ``x0_hat``, so
that w_n = 0; with eta = 1 this is DDPM's posterior (Ho et al. 2020, arXiv 2006.11239, eq. 7), clipped or not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from vla_rl.contract.config import DEEPEST, WIDEST, Checked, from_json, to_json, within
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import installed, name_of
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.policies.flow import gaussian_kl, repeated
from vla_rl.policies.heads import ObservationEncoder
from vla_rl.policies.history import ObservationPolicy, history_through
from vla_rl.policies.image_encoder import FilmBlock, fourier_features
from vla_rl.policies.noise import Generators, integers, normal
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import load_weights, save_folder

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
    spacing: Literal["trailing", "leading"] = "trailing"  # starts at the noisiest timestep, which is pure noise

    def options(self) -> dict[str, Any]:
        """Arguments for a scheduler of diffusers."""
        return {
            "num_train_timesteps": self.timesteps,
            "beta_schedule": self.betas,
            "prediction_type": self.prediction,
            "clip_sample": True,
            "clip_sample_range": self.clip,
            "timestep_spacing": self.spacing,
        }


@dataclass(frozen=True)
class Ddim:
    """DDIM: noise ``eta`` in exploration, none in deployment.  Raises UserError unless 0 <= eta <= 1.

    exploring, deployed  multiples of DDPM's posterior std in modes "sample", before the floor, and "eval"
    """

    eta: float = 1.0
    # Whether the noise that a step keeps is that of the clipped x0_hat; False, diffusers' default: the network's.
    use_clipped_model_output: bool = True

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

    use_clipped_model_output = True

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
    return installed("diffusers", "a diffusion policy has no noise schedule", "diffusion")


class StepTable(NamedTuple):
    """One entry per step, float64 [K], noisiest first; see the formula at the top of this file."""

    time: Tensor  # timestep / training timesteps
    from_x: Tensor  # c_x
    from_network: Tensor  # c_n
    on_x0: Tensor  # w_0
    on_x: Tensor  # w_x
    on_network: Tensor  # w_n
    std: Tensor


def step_table(process: Process, reverse: Ddim | Ddpm, steps: int, noise: float, floor: float) -> StepTable:
    """The ``steps`` steps of ``reverse``, with ``noise`` times DDPM's posterior std but at least ``floor``.

    The floor adds noise without changing the mean, as in DPPO; without it the last step is deterministic.
    """
    scheduler = reverse.scheduler(process)
    scheduler.set_timesteps(steps)
    alpha = scheduler.alphas_cumprod.double()[scheduler.timesteps]
    after = torch.cat([alpha[1:], alpha.new_ones(1)])
    std = noise * ((1 - after) / (1 - alpha) * (1 - alpha / after)).sqrt()
    on_noise = (1 - after - std**2).clamp_min(0).sqrt()
    if process.prediction == "epsilon":
        from_x, from_network = alpha.rsqrt(), -((1 - alpha) / alpha).sqrt()
        noise_of_x, noise_of_network = torch.zeros_like(alpha), torch.ones_like(alpha)
    else:
        from_x, from_network = alpha.sqrt(), -(1 - alpha).sqrt()
        noise_of_x, noise_of_network = (1 - alpha).sqrt(), alpha.sqrt()
    if reverse.use_clipped_model_output:
        on_x, on_network = on_noise / (1 - alpha).sqrt(), torch.zeros_like(alpha)
        on_x0 = after.sqrt() - on_x * alpha.sqrt()
    else:
        on_x, on_network, on_x0 = on_noise * noise_of_x, on_noise * noise_of_network, after.sqrt()
    time = scheduler.timesteps.double() / process.timesteps
    return StepTable(time, from_x, from_network, on_x0, on_x, on_network, std.clamp_min(floor))


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
        time, from_x, from_network, on_x0, on_x, on_network, std = coefficients.unbind(0)
        output = network(x, time.squeeze(-1).expand(x.shape[:2])).to(x.dtype)
        x0 = (from_x * x + from_network * output).clamp(-self.process.clip, self.process.clip)
        mean = on_x0 * x0 + on_x * x + on_network * output
        return mean, std.expand_as(mean)

    def _coefficients(self, table: StepTable, like: Tensor) -> Tensor:
        """The columns of ``table`` [7,K] in the dtype and on the device of ``like``; one copy per device."""
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


@dataclass(frozen=True)
class DiffusionConfig(Checked):
    """Sizes of the network and how it samples."""

    horizon: int = within(5, 1, WIDEST)  # H: actions in a chunk
    condition: int = within(192, 1, WIDEST)  # width of what the denoiser is conditioned on
    width: int = within(256, 1, WIDEST)
    blocks: int = within(3, 1, DEEPEST)
    sampler: DiffusionSampler = DiffusionSampler()


class Denoiser(nn.Module):
    """Features [B,P], noisy chunks [B,k,N] and times [B,k] within [0, 1] -> noise or v [B,k,N]."""

    frequencies = 16

    def __init__(self, features: int, dims: int, config: DiffusionConfig) -> None:
        super().__init__()
        width, condition = config.width, config.condition
        self.connector = nn.Sequential(
            nn.Linear(features, 256), nn.SiLU(), nn.Linear(256, condition), nn.LayerNorm(condition)
        )
        self.enter = nn.Linear(dims, width)
        self.time = nn.Sequential(nn.Linear(2 * self.frequencies, 64), nn.SiLU())
        self.blocks = nn.ModuleList(FilmBlock(width, condition, 64) for _ in range(config.blocks))
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, dims))

    def conditioned(self, features: Tensor) -> Network:
        """The network given ``features`` [B,P]; the conditioning is computed once for the whole chain."""
        condition = self.connector(features.to(self.enter.weight))

        def network(x: Tensor, t: Tensor) -> Tensor:
            hidden, time = self.enter(x), self.time(fourier_features(t, self.frequencies))
            for block in self.blocks:
                hidden = block(hidden, condition, time)
            return self.leave(hidden)

        return network


class DenoisingPolicy(ObservationPolicy):
    """A policy whose subclasses have a network that denoises chunks; it implements ``LikelihoodPolicy``.

    The likelihood is that of the fine-tuned steps given their starting point, summed over steps and dimensions; mode
    "eval" is DDIM without noise, or ancestral DDPM.  It has DPPO's ``step_logprob``.
    """

    spec: EnvSpec
    version: int
    action_scale: Affine
    sampler: DiffusionSampler
    scheduler: Any  # of diffusers, which adds the noise in imitation

    @property
    def horizon(self) -> int:
        raise NotImplementedError

    @property
    def denoised(self) -> int:
        """Actions that a chain denoises, of which the first ``horizon`` are executed."""
        return self.horizon

    @property
    def feature_sizes(self) -> dict[str, int]:
        raise NotImplementedError

    def _networks(self, features: Features) -> tuple[Network, Network]:
        """The networks of the first steps and of the fine-tuned steps."""
        late = self._late_network(features)
        return late, late

    def _late_network(self, features: Features) -> Network:
        raise NotImplementedError

    # -- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """``aux["points"]``: the fine-tuned part of the chain [E,K'+1,N], whose last point the sample begins with."""
        early, late = self._networks(features)
        num_envs = len(features[next(iter(self.feature_sizes))])
        shape = (num_envs, self.denoised * self.spec.action_dim)
        noise = normal(shape, generator, like=self.action_low)
        if mode == "eval":
            flat = self.sampler.deployed(early, late, noise, generator)
            return self._action_out(flat, flat.new_zeros(num_envs, dtype=torch.float64), {}), state
        points, mean, std = self.sampler.sample(early, late, noise, generator)
        logprob = step_logprob(points[:, 1:], mean, std).sum(1)
        return self._action_out(points[:, -1], logprob, {"points": points}), state

    def _action_out(self, flat: Tensor, logprob: Tensor, aux: Mapping[str, Tensor]) -> ActionOut:
        sample = flat.unflatten(-1, (self.denoised, self.spec.action_dim))[:, : self.horizon]
        action = self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)
        return ActionOut(action, sample, logprob, aux, self.version)

    # -- learning ---------------------------------------------------------------------------------------------------

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Joint density of the recorded fine-tuned steps, whose last point begins with ``sample``."""
        mean, std = self.sampler.gaussians(self._late_network(features), aux["points"])
        params = {"mean": mean, "std": std}
        return Likelihood(self.step_logprob(aux, params).sum(1), step_entropy(std).sum(1), params)

    def step_logprob(self, aux: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensor:
        """Log-density [B,K'] of every recorded step under the ``params`` of :meth:`log_prob`, noisiest first."""
        return step_logprob(aux["points"][:, 1:], params["mean"], params["std"])

    kl = staticmethod(gaussian_kl)

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """DDPM's loss [B,H] of actions at uniform training timesteps, for noise or v (arXiv 2006.11239, eq. 14)."""
        target, process = chunks.flatten(1).repeat(draws, 1), self.sampler.process
        noise = normal(target.shape, generator, like=target)
        timestep = integers(process.timesteps, (len(target),), generator).to(target.device)
        network = self._late_network(repeated(features, draws))
        errors = denoising_errors(process, network, target, noise, timestep, self.scheduler)
        return errors.unflatten(0, (draws, len(chunks))).unflatten(-1, chunks.shape[1:]).mean((0, -1))


class DiffusionPolicy(DenoisingPolicy):
    """Denoises a chunk of actions given the features of ``encoder``, which stays frozen.

    Diffusion Policy (Chi et al. 2023, arXiv 2303.04137) with an MLP, and DPPO's use of it (Ren et al. 2024, arXiv
    2409.00588): where fewer than all steps are fine-tuned, the first steps keep a frozen copy of the network that
    imitation trained.

    Raises UserError when diffusers is not installed or ``encoder`` has no ``feature_sizes``.
    """

    def __init__(self, encoder: ObservationEncoder, config: DiffusionConfig | None = None) -> None:
        super().__init__()
        if not isinstance(getattr(encoder, "feature_sizes", None), Mapping):
            raise UserError(
                f"{type(encoder).__name__} has no feature_sizes, which names the features that a head may act on, so "
                "it cannot be the encoder of a diffusion policy; give a policy that has them, or add the property."
            )
        self.encoder, self.spec, self.config, self.version = encoder, encoder.spec, config or DiffusionConfig(), 0
        self.sampler, self.final_noise = self.config.sampler, 1.0
        self.history = history_through(encoder, self.config.horizon)
        self.action_scale = Affine.from_bounds(self.spec.action)
        self.scheduler = self.config.sampler.reverse.scheduler(self.config.sampler.process)
        dims = self.config.horizon * self.spec.action_dim
        self.heads = nn.ModuleDict({"late": Denoiser(sum(self.feature_sizes.values()), dims, self.config)})
        self._freeze_early_copy()
        self.set_limits(self.spec)

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @property
    def feature_sizes(self) -> dict[str, int]:
        return dict(self.encoder.feature_sizes)

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        return self.encoder.encode(obs)

    def _networks(self, features: Features) -> tuple[Network, Network]:
        """The networks of the first steps and of the fine-tuned steps."""
        late = self._late_network(features)
        return (
            cast(Denoiser, self.heads["early"]).conditioned(self._condition_inputs(features))
            if "early" in self.heads
            else late
        ), late

    def _late_network(self, features: Features) -> Network:
        return cast(Denoiser, self.heads["late"]).conditioned(self._condition_inputs(features))

    def _condition_inputs(self, features: Features) -> Tensor:
        return torch.cat([features[name] for name in self.feature_sizes], -1)

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """As of every denoising policy.

        Raises UserError once the first steps have a frozen copy of the network, which imitation would not change.
        """
        if "early" in self.heads:
            raise UserError(
                f"only {self.config.sampler.fine_tuned} of {self.config.sampler.steps} steps of this policy are "
                "trainable and the others use a frozen copy, so imitation would not change those; imitate with "
                "fine_tuned = steps and choose fewer afterwards (with_sampler)."
            )
        return super().imitation_losses(features, chunks, draws, generator)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights that imitation and RL train: neither the encoder nor the frozen copy of the first steps."""
        return {name: p for name, p in self.named_parameters() if name.startswith("heads.late.")}

    def with_sampler(self, sampler: DiffusionSampler, final_noise: float = 1.0) -> DiffusionPolicy:
        """Replace the sampler; returns ``self``.  Its noise falls linearly to ``final_noise`` times itself in a run.

        The first sampler that fine-tunes fewer than all steps freezes a copy of the network for the other steps.
        Raises UserError for another diffusion process than the network was trained for, and for other numbers of steps
        once the frozen copy exists.
        """
        current = self.config.sampler
        if sampler.process != current.process:
            raise UserError(
                f"the network was trained for {current.process} but the sampler is for {sampler.process}, so its "
                "outputs would be misread; keep the process, or train the policy by imitation again."
            )
        if "early" in self.heads and (sampler.steps, sampler.fine_tuned) != (current.steps, current.fine_tuned):
            raise UserError(
                f"the last {current.fine_tuned} of {current.steps} steps of this policy have a network of their own, "
                f"so it cannot sample with {sampler.fine_tuned} of {sampler.steps}; keep these numbers, or start from "
                "the imitation checkpoint."
            )
        self.config, self.final_noise = replace(self.config, sampler=sampler), final_noise
        self._freeze_early_copy()
        self.set_progress(0.0)
        return self

    def set_progress(self, progress: float) -> None:
        """Scale the noise of ``config.sampler`` for a run of which the share ``progress`` is done."""
        self.sampler = self.config.sampler.scaled(1.0 + (self.final_noise - 1.0) * progress)

    def _freeze_early_copy(self) -> None:
        """Freeze a copy of the network for the first steps when fewer than all steps are fine-tuned."""
        if self.config.sampler.fine_tuned < self.config.sampler.steps and "early" not in self.heads:
            self.heads["early"] = copy.deepcopy(self.heads["late"]).requires_grad_(False)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` (the heads) and the encoder's checkpoint in ``encoder/``."""
        name = name_of(type(self))
        config = {"policy": name, "spec": self.spec.to_json(), "config": to_json(self.config)}
        save_folder(Path(folder), config, self.heads.state_dict(), inside={"encoder": self.encoder})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> DiffusionPolicy:
        """Load a checkpoint; with ``spec``, first check that the policy was trained for such an environment."""
        saved: dict[str, Any] = read_config(Path(folder))
        encoder = load_policy(Path(folder) / "encoder")
        if spec is not None:
            encoder = type(encoder).from_pretrained(Path(folder) / "encoder", spec)
        policy = cls(encoder, from_json(saved["config"]))
        load_weights(policy.heads, Path(folder))
        return policy.eval()
