"""A policy from pixels alone, by imitation of an environment's scripted expert; it needs no labelled scenes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from vla_rl.contract.config import JsonObject
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import stages
from vla_rl.recipes.context import placed
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate_dataset import ImitateDataset, NewPolicyConfig
from vla_rl.recipes.stages import EvaluationConfig, clock
from vla_rl.recipes.tiny import NewTiny
from vla_rl.training.device import resolve_device
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class ImitateExpert:
    """Record demonstrations, imitate them as ``ImitateDataset`` does, validate: the checkpoint "imitation".

    The policy ``new`` learns everything, perception included, from the demonstrations, which stay in the run folder.
    ``Imitate`` needs fewer of them where the task has labelled scenes.
    """

    seed: int = 1
    env: EnvConfig = field(kw_only=True)
    new: NewPolicyConfig = field(default_factory=NewTiny)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)  # of as many demonstrations as are recorded
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "cpu"  # where the policy learns: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> JsonObject:
        """Record, train and validate; a resumed run begins anew."""
        seconds: dict[str, float] = {}
        kept = folder.path / "demonstrations"
        with clock(seconds, "collect"):
            episodes = stages.collect(self.env, self.imitation.demonstrations, self.seed, self.evaluation.num_envs)
            save_demonstrations(episodes, kept, video="never")  # every pixel, for an exact repetition
        found = replace(self.imitation, demonstrations=0)  # all of them: an expert may have failed
        learning = ImitateDataset(
            str(kept), self.env, new=self.new, seed=self.seed, imitation=found, device=self.device
        )
        learned = learning.run(folder)
        policy = placed(load_policy(folder.checkpoint("imitation"), self.env.spec()), resolve_device(self.device))
        with clock(seconds, "evaluation"):
            validation = seed_ranges.held_out(seed_ranges.VALIDATION, self.evaluation.validation)
            outcomes = stages.play(self.env, policy, validation, self.evaluation, self.seed, "validate")
        families = {name: asdict(rate) for name, rate in outcomes.families.items()}
        took = {**seconds, **learned["seconds"]}
        return {**learned, "validation": asdict(outcomes.rate), "families": families, "seconds": took}
