"""TinyVLA from nothing: grounded on labelled scenes, or learnt from a dataset alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from vla_rl.contract.limits import check_positive
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.tokens import Vocabulary
from vla_rl.recipes.grounding import Report, Scenes
from vla_rl.training.grounding import GroundingConfig, ground


@dataclass(frozen=True)
class NewTiny(TinyConfig):
    """A TinyVLA without training (a ``GroundedPolicyConfig``); a checkpoint of it holds a plain ``TinyConfig``."""

    smallest_scale: float = 1e-3  # of a state's entry that demonstrations hardly vary, in its unit: a joint at rest

    def __post_init__(self) -> None:
        """Raises UserError for a scale of 0 or less."""
        check_positive(self, "smallest_scale")

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> TinyVLA:
        """The policy for ``spec``, on the host; its input statistics are those of the demonstrations."""
        torch.manual_seed(seed)  # module initialisation has no generator argument
        config = TinyConfig(**{item.name: getattr(self, item.name) for item in fields(TinyConfig)})
        return TinyVLA(spec, Vocabulary.from_texts(spec.tasks), *self.scales(config, episodes))

    def scales(self, config: TinyConfig, episodes: Demonstrations) -> tuple[Affine, TinyConfig, Affine | None]:
        """What the policy is made of besides words: how states are normalised, its sizes, and how actions are."""
        return Affine.from_data(torch.as_tensor(episodes.state), self.smallest_scale), config, None

    def ground(
        self, policy: object, scenes: Scenes, config: GroundingConfig, generator: torch.Generator, report: Report
    ) -> None:
        """Train the backbone to point at the named object."""
        assert isinstance(policy, TinyVLA)
        ground(policy.backbone, scenes.images, (policy.tokens[scenes.tasks],), scenes.uv, config, generator, report)


@dataclass(frozen=True)
class NewTinyOfJoints(NewTiny):
    """The same for joint positions: actions are normalised by what was demonstrated, too.

    The bounds of a joint are many times the range in which a task moves it, so an error that is small beside them is
    large for the task.  A joint that stays still has ``smallest_scale`` (rad), lest its trembling counts.
    """

    smallest_scale: float = 0.05

    def scales(self, config: TinyConfig, episodes: Demonstrations) -> tuple[Affine, TinyConfig, Affine | None]:
        state, action = (torch.as_tensor(item) for item in (episodes.state, episodes.action))
        by_data = [Affine.from_data(item, self.smallest_scale) for item in (state, action)]
        return by_data[0], config, by_data[1]
