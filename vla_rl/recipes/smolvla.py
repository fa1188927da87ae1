"""SmolVLA from nothing: random weights, grounded on labelled scenes; as small as a CPU needs it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.normalization import Affine
from vla_rl.policies.smolvla.pointing import PointingVLM, scale_to_inputs
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.grounding import Report, Scenes
from vla_rl.training.grounding import GroundingConfig, ground


@dataclass(frozen=True)
class NewSmolVLA:
    """A SmolVLA of random weights (a ``GroundedPolicyConfig``); without a ``shape`` about two million of them."""

    shape: SmolVLAShape | None = None
    options: VLAOptions = field(default_factory=VLAOptions)

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> SmolVLA:
        """The policy for ``spec``, on the host; its input statistics are those of the demonstrations."""
        torch.manual_seed(seed)  # module initialisation has no generator argument
        state = Affine.from_data(torch.as_tensor(episodes.state))
        policy = SmolVLA.new(spec, state, self.shape, self.options)
        scale_to_inputs(policy.network)  # type: ignore[arg-type]  # a module
        return policy

    def ground(
        self, policy: object, scenes: Scenes, config: GroundingConfig, generator: torch.Generator, report: Report
    ) -> None:
        """Train the vision-language model to point at the named object; the expert stays as it is."""
        assert isinstance(policy, SmolVLA)
        prompts = policy.tokens[scenes.tasks], policy.token_mask[scenes.tasks]
        vlm = PointingVLM(policy.network)  # type: ignore[arg-type]  # a SmolVLANetwork
        vlm.requires_grad_(True)
        ground(vlm, scenes.images, prompts, scenes.uv, config, generator, report)
        policy.network.train(False)  # type: ignore[attr-defined]
