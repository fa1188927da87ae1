"""TinyVLA: image + instruction + proprioception -> flow-matching action chunk, about one million parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.backbone import BackboneOutput, PointingBackbone
from vla_rl.policies.expert import FlowExpert
from vla_rl.policies.flow import AllSteps, Chain, FlowSampler, VelocityField, gaussian_kl, imitation_loss
from vla_rl.policies.flow_schedules import Field, Ode
from vla_rl.policies.noise import Generators, normal
from vla_rl.policies.normalization import Affine, action_limits, check_same_env
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.tokens import Vocabulary
from vla_rl.pretrained import load_weights, save_folder


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the network and how it samples."""

    horizon: int = 5  # H: actions in a chunk
    queries: int = 4  # attention queries of the backbone
    condition: int = 192  # width of the expert's conditioning
    width: int = 256
    blocks: int = 3
    sampler: FlowSampler = FlowSampler(Ode(), AllSteps(), steps=4)


class TinyVLA(nn.Module):
    """A small VLA with a frozen pointing backbone and a trainable connector and flow expert.

    ``encode`` runs the backbone once per observation; ``act`` and ``log_prob`` take its features.
    The likelihood is that of ``config.sampler`` (Flow-SDE, Flow-Noise, ...; see ``policies/flow.py``); mode "eval" is
    always the deterministic ODE from random noise.  It implements ``LikelihoodPolicy``.
    """

    action_low: Tensor
    action_high: Tensor
    tokens: Tensor

    def __init__(self, spec: EnvSpec, vocabulary: Vocabulary, proprioception: Affine, config: TinyConfig) -> None:
        super().__init__()
        self.spec, self.vocabulary, self.proprioception, self.config = spec, vocabulary, proprioception, config
        self.action_scale = Affine.from_bounds(spec.action)
        self.version, self.sampler, self.final_noise = 0, config.sampler, 1.0
        self.backbone = PointingBackbone(len(vocabulary.words), config.queries, max_words=vocabulary.length)
        self.connector = nn.Sequential(
            nn.Linear(sum(self.feature_sizes.values()), 256),
            nn.SiLU(),
            nn.Linear(256, config.condition),
            nn.LayerNorm(config.condition),
        )
        self.expert = FlowExpert(config.horizon * spec.action_dim, config.condition, config.width, config.blocks)
        low, high = action_limits(spec)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)
        self.register_buffer("tokens", vocabulary.encode(spec.tasks), persistent=False)

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Sizes of the features of :meth:`encode` that this policy and other heads act on, by name."""
        return {"image_features": self.backbone.features * len(self.spec.images), "state": self.spec.state.shape[0]}

    @property
    def horizon(self) -> int:
        """``H``: actions in a chunk."""
        return self.config.horizon

    # -- the part no gradient reaches ------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """``{"image_features": [E,F], "state": [E,S], "time": [E,1]}``: normalised state, and time / time limit.

        Only critics read the time.
        """
        return self.encode_with_grad(obs)

    def encode_with_grad(self, obs: Observation) -> Features:
        """:meth:`encode` with gradient, to train the backbone on demonstrations as well."""
        tokens = self.tokens[self._tensor(obs.task)]
        outputs = [self.run_backbone(self._tensor(obs.images[name]), tokens) for name in sorted(self.spec.images)]
        state = self.proprioception.normalize(self._tensor(obs.state))
        time = self._tensor(obs.time)[:, None].to(state) / self.spec.time_limit
        return {"image_features": torch.cat([out.features for out in outputs], -1), "state": state, "time": time}

    def run_backbone(self, images: Tensor, tokens: Tensor) -> BackboneOutput:
        """The backbone on ``images`` uint8 [B,h,w,3] under instructions ``tokens`` [B,L]."""
        return self.backbone(images, tokens)

    # -- acting -----------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        field = self.field(features)
        num_envs = features["state"].shape[0]
        shape = (num_envs, self.config.horizon * self.spec.action_dim)
        noise = normal(shape, generator, like=self.expert.enter.weight)
        if mode == "eval":
            sample = self.sampler.deterministic(field, noise)
            out = self._action_out(sample, sample.new_zeros(num_envs), {})
        else:
            chain, density = self.sampler.sample(field, noise, generator)
            out = self._action_out(
                chain.points[:, -1], density.logprob, {"points": chain.points, "noisy_steps": chain.noisy_steps}
            )
        return out, state

    def _action_out(self, flat: Tensor, logprob: Tensor, aux: Mapping[str, Tensor]) -> ActionOut:
        sample = flat.unflatten(-1, (self.config.horizon, self.spec.action_dim))
        action = self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)
        return ActionOut(action, sample, logprob, aux, self.version)

    # -- learning ---------------------------------------------------------------------------------------------------

    def field(self, features: Features) -> VelocityField:
        """The velocity field given features, differentiable in connector and expert."""
        condition = self.connector(torch.cat([features["image_features"], features["state"]], -1))
        return lambda x, t: Field(*self.expert(condition, x, t))

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Joint density of recorded chains, summed over noisy steps and dimensions; ``sample`` is their last point."""
        density = self.sampler.log_prob(self.field(features), Chain(aux["points"], aux["noisy_steps"]))
        return Likelihood(density.logprob, density.entropy, {"mean": density.mean, "std": density.std})

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        """Exact KL of the chains, an upper bound of that of the actions (data processing)."""
        return gaussian_kl(old["mean"], old["std"], new["mean"], new["std"])

    def imitation_loss(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Conditional flow matching with uniform times (Lipman et al. 2022, arXiv 2210.02747)."""
        return imitation_loss(self.field, features, chunks, draws, generator)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights that imitation and RL train; the backbone stays frozen after grounding."""
        return {name: p for name, p in self.named_parameters() if not name.startswith("backbone.")}

    def with_sampler(self, sampler: FlowSampler, final_noise: float = 1.0) -> TinyVLA:
        """Replace the sampler; returns ``self``.  Its noise falls linearly to ``final_noise`` times itself in a run."""
        self.config, self.final_noise = replace(self.config, sampler=sampler), final_noise
        self.set_progress(0.0)
        return self

    def set_progress(self, progress: float) -> None:
        """Scale the noise of ``config.sampler`` for a run of which the share ``progress`` is done."""
        self.sampler = self.config.sampler.scaled(1.0 + (self.final_noise - 1.0) * progress)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` (sizes, spec, vocabulary, statistics) and ``model.safetensors``."""
        config = {
            "policy": f"{type(self).__module__}:{type(self).__qualname__}",
            "config": to_json(self.config),
            "spec": self.spec.to_json(),
            "vocabulary": to_json(self.vocabulary),
            "proprioception": to_json(self.proprioception),
        }
        save_folder(Path(folder), config, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> TinyVLA:
        """Load a checkpoint; with ``spec``, first check that the policy was trained for such an environment."""
        saved: dict[str, Any] = read_config(Path(folder))
        trained = EnvSpec.from_json(saved["spec"])
        if spec is not None:
            check_same_env(trained, spec)
        policy = cls(
            spec or trained,
            from_json(saved["vocabulary"]),
            from_json(saved["proprioception"]),
            from_json(saved["config"]),
        )
        load_weights(policy, Path(folder))
        return policy.eval()

    def _tensor(self, array: Array) -> Tensor:
        return torch.as_tensor(array, device=self.action_low.device)
