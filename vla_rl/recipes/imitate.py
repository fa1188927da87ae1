"""A policy from nothing by imitation of a scripted expert."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field

from vla_rl.contract.config import JsonObject
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.datasets import load_demonstrations, save_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.pretrained import load_policy
from vla_rl.pretrained import save_own
from vla_rl.recipes import stages
from vla_rl.recipes.context import placed
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.grounding import GroundedPolicyConfig, grounded_policy
from vla_rl.recipes.imitation import ImitatingPolicy, imitate_policy
from vla_rl.recipes.stages import EvaluationConfig, clock
from vla_rl.recipes.tiny import NewTiny
from vla_rl.training.device import resolve_device
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class Imitate:
    """Collect demonstrations, ground a new policy, imitate: the checkpoint "imitation"."""

    seed: int = 1
    env: EnvConfig = field(kw_only=True)
    new: GroundedPolicyConfig = field(default_factory=NewTiny)
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "cpu"  # where the policy learns: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> JsonObject:
        """Train and validate."""
        seconds: dict[str, float] = {}
        policy = self.imitate(*self.ground(folder, seconds), folder, seconds)
        validation = seed_ranges.held_out(seed_ranges.VALIDATION, self.evaluation.validation)
        outcomes = stages.play(self.env, policy, validation, self.evaluation, self.seed, "validate")
        families = {name: asdict(rate) for name, rate in outcomes.families.items()}
        return {"validation": asdict(outcomes.rate), "families": families, "seconds": seconds, "seed": self.seed}

    def ground(self, folder: RunFolder, seconds: dict[str, float]) -> tuple[ImitatingPolicy, Demonstrations]:
        """A policy that points at objects, and the demonstrations to imitate; a resumed run takes its own."""
        device = resolve_device(self.device)
        kept, grounded_at = folder.path / "demonstrations", folder.checkpoint("grounded")
        if folder.resumed and folder.checkpoint("imitation").exists():
            return placed(load_policy(grounded_at), device), load_demonstrations(kept)
        with clock(seconds, "collect"):
            episodes = stages.collect(self.env, self.imitation.demonstrations, self.seed)
            save_demonstrations(episodes, kept, video="never")  # every pixel, for an exact repetition
        with clock(seconds, "grounding"):
            grounded = grounded_policy(self.env, episodes, self.new, self.grounding, self.seed, device)
            grounded.save_pretrained(grounded_at)
        return grounded, episodes

    def imitate(
        self, grounded: ImitatingPolicy, episodes: Demonstrations, folder: RunFolder, seconds: dict[str, float]
    ) -> ImitatingPolicy:
        """The policy that imitates; a resumed run takes its own."""
        imitation_at = folder.checkpoint("imitation")
        if folder.resumed and imitation_at.exists():
            imitating: ImitatingPolicy = placed(load_policy(imitation_at), resolve_device(self.device))
            return imitating
        with clock(seconds, "imitation"):
            policy = copy.deepcopy(grounded)
            imitate_policy(policy, episodes, self.imitation, self.seed, folder)
            save_own(policy, imitation_at)
        return policy
