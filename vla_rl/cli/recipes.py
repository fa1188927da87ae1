"""What a config function returns: a frozen dataclass that says everything about a run and can run itself."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from vla_rl.cli import stages
from vla_rl.cli.method import Method, RLConfig, Setting
from vla_rl.cli.progress import console
from vla_rl.cli.sanity import Sanity, check_senses
from vla_rl.cli.stages import EvaluationConfig, clock
from vla_rl.cli.story import Story, write_report
from vla_rl.cli.world import World
from vla_rl.evaluation import suite
from vla_rl.evaluation.run import Outcomes
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.training.distributed import this_process
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.tracking import RunFolder


class Recipe(Protocol):
    """Anything that ``vla-rl train`` can run."""

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Do it, leaving everything in ``folder``; returns what belongs into ``summary.json``."""


@dataclass(frozen=True)
class Imitate:
    """Collect demonstrations, ground a new policy, imitate: the checkpoint "imitation"."""

    seed: int = 1
    world: World = field(default_factory=World)
    tiny: TinyConfig = field(default_factory=TinyConfig)
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Train and validate."""
        seconds: dict[str, float] = {}
        policy, _, _ = self.prepare(folder, seconds)
        validation = suite.held_out(suite.VALIDATION, self.evaluation.validation)
        outcomes = stages.play(self.world, policy, validation, self.evaluation, self.seed, "validate")
        families = {name: asdict(rate) for name, rate in outcomes.families.items()}
        return {"validation": asdict(outcomes.rate), "families": families, "seconds": seconds, "seed": self.seed}

    def prepare(self, folder: RunFolder, seconds: dict[str, float]) -> tuple[TinyVLA, TinyVLA, Demonstrations]:
        """The imitation policy, its grounded ancestor and the demonstrations; a resumed run takes its own."""
        grounded_at, imitation_at = folder.checkpoint("grounded"), folder.checkpoint("imitation")
        if folder.resumed and imitation_at.exists():
            episodes = Demonstrations.load(folder.path / "demonstrations")
            return TinyVLA.from_pretrained(imitation_at), TinyVLA.from_pretrained(grounded_at), episodes
        with clock(seconds, "collect"):
            episodes = stages.collect(self.world, self.imitation.demonstrations, self.seed)
            episodes.save(folder.path / "demonstrations", video="never")  # every pixel, for an exact repetition
        with clock(seconds, "grounding"):
            grounded = stages.ground_policy(self.world, episodes, self.tiny, self.grounding, self.seed)
            grounded.save_pretrained(grounded_at)
        with clock(seconds, "imitation"):
            policy = copy.deepcopy(grounded)
            stages.imitate_policy(policy, episodes, self.imitation, self.seed, folder)
            policy.save_pretrained(imitation_at)
        return policy, grounded, episodes


@dataclass(frozen=True)
class Improve:
    """Reinforcement learning from a checkpoint, then the test seeds: the checkpoint "best"."""

    rl: Method
    policy: str = "runs/demo/checkpoints/imitation"  # a checkpoint folder
    demonstrations: str = ""  # folder of a dataset, for methods that learn from it as well
    seed: int = 1
    world: World = field(default_factory=World)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Improve and judge.  The policy to begin with is kept in the run folder, so the run can be resumed from it."""
        start = folder.checkpoint("start")
        env = self.world.make(1)
        policy = TinyVLA.from_pretrained(start if folder.resumed and start.exists() else self.policy, env.spec)
        env.close()
        if not start.exists():
            policy.save_pretrained(start)
        return self.improve(policy, folder, {})[1]

    def improve(self, policy: TinyVLA, folder: RunFolder, seconds: dict[str, float]) -> tuple[Outcomes, dict[str, Any]]:
        """Train from ``policy``, in place or on top of it, and play the test seeds; returns outcomes and summary."""
        with clock(seconds, "rl"):
            setting = Setting(self.world, policy, self.seed, this_process(), self.demonstrations)
            trained, best = stages.improve(self.rl, setting, self.evaluation, folder)
        rows = folder.metrics("rl")
        with clock(seconds, "evaluation"):
            tests = suite.held_out(suite.TEST, self.evaluation.test)
            outcomes = stages.play(self.world, trained, tests, self.evaluation, self.seed, "test RL")
        summary = {
            "rl": asdict(outcomes.rate),
            "families": {name: asdict(rate) for name, rate in outcomes.families.items()},
            "best_iteration": best.iteration,
            "env_steps": int(rows[-1]["env_steps_total"]),
            "env_steps_at_best": _steps_at(rows, best.iteration),
            "episodes": int(sum(row.get("episodes", 0) for row in rows)),
            **_groups(rows),
            "seconds": seconds,
            "seed": self.seed,
        }
        return outcomes, summary


@dataclass(frozen=True)
class Demo:
    """From nothing to a policy that RL has made good, honestly measured before and after, and a page to look at."""

    rl: RLConfig
    seed: int = 1
    world: World = field(default_factory=World)
    tiny: TinyConfig = field(default_factory=TinyConfig)
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Collect, ground, imitate, improve, judge, report."""
        seconds: dict[str, float] = {}
        before = Imitate(self.seed, self.world, self.tiny, self.grounding, self.imitation, self.evaluation)
        imitation, grounded, episodes = before.prepare(folder, seconds)
        with clock(seconds, "evaluation"):
            plateau = self._plateau(imitation, grounded, episodes)
            tests = suite.held_out(suite.TEST, self.evaluation.test)
            first = stages.play(self.world, imitation, tests, self.evaluation, self.seed, "test imitation")
        console.print(f"imitation: {first.rate.success:.1%} of {first.rate.episodes} test episodes")
        policy = copy.deepcopy(imitation)
        improve = Improve(self.rl, "", "", self.seed, self.world, self.evaluation)
        last, summary = improve.improve(policy, folder, seconds)
        console.print(f"after RL:  {last.rate.success:.1%}")
        with clock(seconds, "evaluation"):
            senses = check_senses(self.world, {"imitation": imitation, "RL": policy}, self.evaluation, self.seed)
        summary = {"imitation": asdict(first.rate), **summary, "plateau": plateau, "senses": _flat(senses)}
        folder.write_summary(summary)  # safe before the page is made
        with clock(seconds, "report"):
            story = Story(self.world, imitation, policy, first, last, senses, plateau, self.seed, self.rl.noise())
            write_report(story, summary, folder)
        summary["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
        return summary

    def _plateau(self, policy: TinyVLA, grounded: TinyVLA, episodes: Demonstrations) -> dict[str, Any]:
        """Validation success after the configured imitation and after twice as many steps."""
        longer = replace(self.imitation, fit=replace(self.imitation.fit, steps=2 * self.imitation.fit.steps))
        other = copy.deepcopy(grounded)
        stages.imitate_policy(other, episodes, longer, self.seed)
        seeds = suite.held_out(suite.VALIDATION, 2 * self.evaluation.validation)
        rates = {
            config.fit.steps: stages.play(self.world, trained, seeds, self.evaluation, self.seed, "plateau").rate
            for config, trained in ((self.imitation, policy), (longer, other))
        }
        return {str(steps): asdict(rate) for steps, rate in rates.items()}


def _steps_at(rows: list[dict[str, Any]], iteration: int) -> int:
    return int(next((row["env_steps_total"] for row in rows if row["step"] == iteration), 0))


def _groups(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Totals of what a source of groups counts; nothing for other sources."""
    names = sorted({name for row in rows for name in row if name.startswith("groups_")})
    totals = {name.removeprefix("groups_"): int(sum(row.get(name, 0) for row in rows)) for name in names}
    return {"groups": totals} if totals else {}


def _flat(senses: dict[str, Sanity]) -> dict[str, Any]:
    return {who: asdict(item) for who, item in senses.items()}
