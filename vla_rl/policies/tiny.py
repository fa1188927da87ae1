"""TinyVLA: image + instruction + proprioception -> flow-matching action chunk, about one million parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vla_rl.contract.config import DEEPEST, WIDEST, Checked, from_json, to_json, within
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import Features
from vla_rl.policies.flow import AllSteps, Field, FlowSampler, Ode, VelocityField, imitation_losses
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.history import MOST_STEPS, history_of
from vla_rl.policies.image_encoder import BackboneOutput, FlowExpert, PointingBackbone
from vla_rl.policies.normalization import Affine, Relative, check_same_env, origin
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.vla.features import PICTURE
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.pretrained import load_weights, save_folder


@dataclass(frozen=True)
class TinyConfig(Checked):
    """Sizes of the network and how it samples."""

    horizon: int = within(5, 1, WIDEST)  # H: actions in a chunk
    queries: int = within(4, 1, 1000)  # attention queries of the backbone
    condition: int = within(192, 1, WIDEST)  # width of the expert's conditioning
    width: int = within(256, 1, WIDEST)
    blocks: int = within(3, 1, DEEPEST)
    sampler: FlowSampler = FlowSampler(Ode(), AllSteps(), steps=4)
    relative: Relative = ()  # which entries of an action are relative to the state; (): none
    n_obs_steps: int = within(1, 1, MOST_STEPS)  # observations that a decision reads: its own and those before


class TinyVLA(FlowPolicy):
    """A small VLA with a pointing backbone, frozen unless asked, and a trainable connector and flow expert.

    ``encode`` runs the backbone once per observation; ``act`` and ``log_prob`` take its features.
    :meth:`with_trained_backbone` makes the backbone learn, too.
    With ``config.n_obs_steps`` it also reads what the backbone and the state said at earlier decisions, as they were
    encoded then (``policies/history.py``): RL of the backbone has the gradient of the present observation alone.
    The likelihood is that of ``config.sampler`` (Flow-SDE, Flow-Noise, ...; see ``policies/flow.py``); mode "eval" is
    always the deterministic ODE from random noise.  It implements ``LikelihoodPolicy``.
    """

    config: TinyConfig
    tokens: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        vocabulary: Vocabulary,
        proprioception: Affine,
        config: TinyConfig,
        action_scale: Affine | None = None,
    ) -> None:
        """``action_scale`` normalises actions; None: the bounds of ``spec`` do."""
        super().__init__(spec, action_scale or Affine.from_bounds(spec.action), config)
        self.vocabulary, self.proprioception = vocabulary, proprioception
        self.backbone = PointingBackbone(len(vocabulary.words), config.queries, max_words=vocabulary.length)
        self.history = history_of(config.n_obs_steps, config.horizon, self._encoded_sizes)
        self.connector = nn.Sequential(
            nn.Linear(sum(self.feature_sizes.values()), 256),
            nn.SiLU(),
            nn.Linear(256, config.condition),
            nn.LayerNorm(config.condition),
        )
        self.expert = FlowExpert(config.horizon * spec.action_dim, config.condition, config.width, config.blocks)
        self.register_buffer("tokens", vocabulary.encode(spec.tasks), persistent=False)
        self.backbone_learns = False

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Sizes of the features that this policy and other heads act on, by name."""
        return {**self._encoded_sizes, **(self.history.feature_sizes if self.history else {})}

    @property
    def _encoded_sizes(self) -> dict[str, int]:
        """Of an observation alone."""
        return {"image_features": self.backbone.features * len(self.spec.images), "state": self.spec.state.shape[0]}

    def with_trained_backbone(self) -> Self:
        """Let RL train the backbone, too: from now on features keep the pictures that it reads; returns ``self``."""
        self.backbone_learns = True
        self.backbone.requires_grad_(True)
        return self

    # -- what it sees -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """``{"image_features": [E,F], "state": [E,S], "time": [E,1]}``: normalised state, and time / time limit.

        Only critics read the time.  With a backbone that learns also ``task`` [E] and ``picture/NAME`` [E,h,w,3].
        """
        features = self.encode_with_grad(obs)
        if not self.backbone_learns:
            return features
        pictures = {PICTURE + name: self._tensor(obs.images[name]) for name in self.spec.images}
        return {**features, **pictures, "task": self._tensor(obs.task).long()}

    def encode_with_grad(self, obs: Observation) -> Features:
        """:meth:`encode` with gradient and without pictures, to train the backbone on demonstrations as well."""
        pictures = [self._tensor(obs.images[name]) for name in sorted(self.spec.images)]
        raw = self._tensor(obs.state)
        state, from_here = self.proprioception.normalize(raw), origin(self.relative, raw)
        time = self._tensor(obs.time)[:, None].to(state) / self.spec.time_limit
        seen = self._see(pictures, self._tensor(obs.task))
        return {"image_features": seen, "state": state, "time": time, **from_here}

    def encode_again(self, features: Features) -> Features:
        """``features`` as today's backbone makes them of their pictures, with gradient; without any as they are."""
        names = sorted(name for name in features if name.startswith(PICTURE))
        if not names:
            return features
        rest = {name: item for name, item in features.items() if name not in names}
        return {**rest, "image_features": self._see([features[name] for name in names], features["task"])}

    def _see(self, pictures: Sequence[Tensor], task: Tensor) -> Tensor:
        """The features [B,F] of ``pictures`` uint8 [B,h,w,3], one for each camera by name, under ``task`` [B]."""
        outputs = [self.run_backbone(picture, self.tokens[task]) for picture in pictures]
        return torch.cat([out.features for out in outputs], -1)

    def run_backbone(self, images: Tensor, tokens: Tensor) -> BackboneOutput:
        """The backbone on ``images`` uint8 [B,h,w,3] under instructions ``tokens`` [B,L]."""
        return self.backbone(images, tokens)

    # -- learning ---------------------------------------------------------------------------------------------------

    def field(self, features: Features) -> VelocityField:
        """The velocity field given features, differentiable in all that is trained."""
        return self.conditioned_field(self.condition(self.encode_again(features)))

    def acting_field(self, features: Features) -> VelocityField:
        """The same of features that were encoded just now."""
        return self.conditioned_field(self.condition(features))

    @property
    def condition_size(self) -> int:
        return self.config.condition

    def condition(self, features: Features) -> Tensor:
        """What conditions the expert, [B,C]."""
        return self.connector(torch.cat([features[name] for name in self.feature_sizes], -1))

    def conditioned_field(self, condition: Tensor) -> VelocityField:
        """The velocity field given ``condition`` [B,C]."""
        return lambda x, t: Field(*self.expert(condition, x, t))

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Conditional flow matching (Lipman et al. 2022, arXiv 2210.02747) of every action [B,H], at uniform times."""
        return imitation_losses(self.field, self.encode_again(features), chunks, draws, generator)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights that imitation and RL train; the backbone stays frozen after grounding unless it learns."""
        parameters = dict(self.named_parameters())
        if self.backbone_learns:
            return parameters
        return {name: item for name, item in parameters.items() if not name.startswith("backbone.")}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` (sizes, spec, vocabulary, statistics) and ``model.safetensors``."""
        config = {
            "policy": name_of(type(self)),
            "config": to_json(self.config),
            "spec": self.spec.to_json(),
            "vocabulary": to_json(self.vocabulary),
            "proprioception": to_json(self.proprioception),
            "action_scale": to_json(self.action_scale),
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
            from_json(saved["action_scale"]) if "action_scale" in saved else None,  # older checkpoints have the bounds'
        )
        load_weights(policy, Path(folder))
        return policy.eval()
