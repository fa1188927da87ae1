"""A diffusion policy over action chunks, conditioned on the features of a frozen observation encoder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vla_rl.contract.config import check_sizes, from_json, to_json
from vla_rl.contract.env import Array, EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.policies.backbone import FilmBlock, fourier_features
from vla_rl.policies.diffusion_steps import DiffusionSampler, Network, denoising_errors, step_entropy, step_logprob
from vla_rl.policies.encoder import ObservationEncoder
from vla_rl.policies.flow import gaussian_kl, repeated
from vla_rl.policies.noise import Generators, integers, normal
from vla_rl.policies.normalization import Affine, action_limits
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import load_weights, save_folder


@dataclass(frozen=True)
class DiffusionConfig:
    """Sizes of the network and how it samples."""

    horizon: int = 5  # H: actions in a chunk
    condition: int = 192  # width of what the denoiser is conditioned on
    width: int = 256
    blocks: int = 3
    sampler: DiffusionSampler = DiffusionSampler()

    def __post_init__(self) -> None:
        check_sizes(self, "horizon", "condition", "width", "blocks")


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


class DiffusionPolicy(nn.Module):
    """Denoises a chunk of actions given the features of ``encoder``, which stays frozen.

    Diffusion Policy (Chi et al. 2023, arXiv 2303.04137) with an MLP, and DPPO's use of it (Ren et al. 2024, arXiv
    2409.00588): where fewer than all steps are fine-tuned, the first steps keep a frozen copy of the network that
    imitation trained.  The likelihood is that of the fine-tuned steps given their starting point, summed over steps and
    dimensions; mode "eval" is DDIM without noise, or ancestral DDPM.  It implements ``LikelihoodPolicy`` and DPPO's
    ``StepwisePolicy``.

    Raises UserError when diffusers is not installed or ``encoder`` has no ``feature_sizes``.
    """

    action_low: Tensor
    action_high: Tensor

    def __init__(self, encoder: ObservationEncoder, config: DiffusionConfig | None = None) -> None:
        super().__init__()
        if not isinstance(getattr(encoder, "feature_sizes", None), Mapping):
            raise UserError(
                f"{type(encoder).__name__} has no feature_sizes, which names the features that a head may act on, so "
                "it cannot be the encoder of a diffusion policy; give a policy that has them, or add the property."
            )
        self.encoder, self.spec, self.config, self.version = encoder, encoder.spec, config or DiffusionConfig(), 0
        self.sampler, self.final_noise = self.config.sampler, 1.0
        self.action_scale = Affine.from_bounds(self.spec.action)
        self.scheduler = self.config.sampler.reverse.scheduler(self.config.sampler.process)
        dims = self.config.horizon * self.spec.action_dim
        self.heads = nn.ModuleDict({"late": Denoiser(sum(self.feature_sizes.values()), dims, self.config)})
        self._freeze_early_copy()
        low, high = action_limits(self.spec)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    @property
    def horizon(self) -> int:
        """``H``: actions in a chunk."""
        return self.config.horizon

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Sizes of the encoder's features, by name."""
        return dict(self.encoder.feature_sizes)

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """The encoder's features."""
        return self.encoder.encode(obs)

    # -- acting -----------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """``aux["points"]``: the fine-tuned part of the chain [E,K'+1,N]; its last point is the sample."""
        early, late = self._networks(features)
        num_envs = len(features[next(iter(self.feature_sizes))])
        shape = (num_envs, self.config.horizon * self.spec.action_dim)
        noise = normal(shape, generator, like=self.action_low)
        if mode == "eval":
            flat = self.sampler.deployed(early, late, noise, generator)
            return self._action_out(flat, flat.new_zeros(num_envs, dtype=torch.float64), {}), state
        points, mean, std = self.sampler.sample(early, late, noise, generator)
        logprob = step_logprob(points[:, 1:], mean, std).sum(1)
        return self._action_out(points[:, -1], logprob, {"points": points}), state

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

    def _action_out(self, flat: Tensor, logprob: Tensor, aux: Mapping[str, Tensor]) -> ActionOut:
        sample = flat.unflatten(-1, (self.config.horizon, self.spec.action_dim))
        action = self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)
        return ActionOut(action, sample, logprob, aux, self.version)

    # -- learning ---------------------------------------------------------------------------------------------------

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Joint density of the recorded fine-tuned steps, whose last point is ``sample``."""
        mean, std = self.sampler.gaussians(self._late_network(features), aux["points"])
        params = {"mean": mean, "std": std}
        return Likelihood(self.step_logprob(aux, params).sum(1), step_entropy(std).sum(1), params)

    def step_logprob(self, aux: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Tensor:
        """Log-density [B,K'] of every recorded step under the ``params`` of :meth:`log_prob`, noisiest first."""
        return step_logprob(aux["points"][:, 1:], params["mean"], params["std"])

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        """Exact KL of the chains, an upper bound of that of the actions (data processing)."""
        return gaussian_kl(old["mean"], old["std"], new["mean"], new["std"])

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """DDPM's loss of every action [B,H] at uniform training timesteps (arXiv 2006.11239, eq. 14), for noise or v.

        Raises UserError once the first steps have a frozen copy of the network, which imitation would not change.
        """
        if "early" in self.heads:
            raise UserError(
                f"only {self.config.sampler.fine_tuned} of {self.config.sampler.steps} steps of this policy are "
                "trainable and the others use a frozen copy, so imitation would not change those; imitate with "
                "fine_tuned = steps and choose fewer afterwards (with_sampler)."
            )
        target, process = chunks.flatten(1).repeat(draws, 1), self.config.sampler.process
        noise = normal(target.shape, generator, like=target)
        timestep = integers(process.timesteps, (len(target),), generator).to(target.device)
        network = self._late_network(repeated(features, draws))
        errors = denoising_errors(process, network, target, noise, timestep, self.scheduler)
        return errors.unflatten(0, (draws, len(chunks))).unflatten(-1, chunks.shape[1:]).mean((0, -1))

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
