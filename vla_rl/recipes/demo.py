"""The demo: imitation, reinforcement learning and a page about both."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field

from vla_rl.evaluation import seed_ranges
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes import stages
from vla_rl.recipes.demo_report import DemoReport, write_report
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.perception_ablation import PerceptionAblation, ablate_perception
from vla_rl.recipes.progress import console
from vla_rl.recipes.stages import EvaluationConfig, clock
from vla_rl.recipes.tiny import NewTiny
from vla_rl.recipes.trainers import RLConfig
from vla_rl.recipes.workers import workers
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.threads import shared
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class Demo:
    """Imitation and RL from nothing, both evaluated on the same test seeds, and a page about them."""

    rl: RLConfig
    seed: int = 1
    env: EnvConfig = field(kw_only=True)
    new: NewTiny = field(default_factory=NewTiny)
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "cpu"  # where policy, critic, learner and replay compute: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> JsonObject:
        """Collect, ground, imitate, improve, evaluate, report."""
        seconds: dict[str, float] = {}
        before = Imitate(
            self.seed, self.new, self.grounding, self.imitation, self.evaluation, self.device, env=self.env
        )
        if self.evaluation.processes > 1:
            workers(self.evaluation.processes)  # they start meanwhile
        grounded, episodes = before.ground(folder, seconds)
        assert isinstance(grounded, TinyVLA)  # what NewTiny builds
        with shared() if self.evaluation.processes > 1 else nullcontext():
            imitation = before.imitate(grounded, episodes, folder, seconds)
            assert isinstance(imitation, TinyVLA)
        with clock(seconds, "evaluation"):
            tests = seed_ranges.held_out(seed_ranges.TEST, self.evaluation.test)
            first = stages.play(self.env, imitation, tests, self.evaluation, self.seed, "test imitation")
        console.print(f"imitation: {first.rate.success:.1%} of {first.rate.episodes} test episodes")
        policy = copy.deepcopy(imitation)
        improve = Improve(self.rl, "", "", self.seed, self.evaluation, self.device, env=self.env)
        last, summary = improve.improve(policy, folder, seconds)
        console.print(f"after RL:  {last.rate.success:.1%}")
        with clock(seconds, "evaluation"):
            both = {"imitation": imitation, "RL": policy}
            perception = ablate_perception(self.env, both, self.evaluation, self.seed)
        summary = {"imitation": asdict(first.rate), **summary, "perception": _flat(perception)}
        folder.write_summary(summary)  # safe before the page is made
        with clock(seconds, "report"):
            noise = self.rl.noise()
            content = DemoReport(self.env, imitation, policy, first, last, perception, self.seed, noise)
            write_report(content, summary, folder)
        summary["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
        return summary


def _flat(perception: dict[str, PerceptionAblation]) -> JsonObject:
    return {who: asdict(item) for who, item in perception.items()}
