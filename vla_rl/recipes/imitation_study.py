"""What imitation alone is worth: twice as many steps of it, and what its policy looks at.

The demo's page compares RL with this.  With worker processes, one of them finds it out beside RL, whenever a core is
idle.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from vla_rl.contract.config import to_json
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.worker import Report
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes import stages
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import outcomes_of, remote_env
from vla_rl.recipes.imitation import imitate_policy
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.perception_ablation import CHECKS, PerceptionAblation, ablate_perception
from vla_rl.recipes.stages import EvaluationConfig
from vla_rl.recipes.workers import BackgroundJob, workers
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class ImitationFindings:
    """``plateau``: validation success by the number of imitation steps; ``perception`` of the configured policy."""

    plateau: JsonObject
    perception: PerceptionAblation


@dataclass(frozen=True)
class StudyConfig:
    """What is studied: ``imitation`` on ``env``."""

    env: EnvConfig
    imitation: ImitationConfig
    evaluation: EvaluationConfig
    seed: int

    @property
    def longer(self) -> ImitationConfig:
        """Twice as many steps."""
        return replace(self.imitation, fit=replace(self.imitation.fit, steps=2 * self.imitation.fit.steps))

    @property
    def plateau_seeds(self) -> list[int]:
        return [int(seed) for seed in seed_ranges.held_out(seed_ranges.VALIDATION, 2 * self.evaluation.validation)]

    def plateau(self, configured: Rate, longer: Rate) -> JsonObject:
        """Both rates by their number of steps."""
        steps = (self.imitation.fit.steps, self.longer.fit.steps)
        return {str(n): asdict(rate) for n, rate in zip(steps, (configured, longer), strict=True)}


class ImitationStudy(Protocol):
    """A study in three moments of a run."""

    def grounded(self, policy: TinyVLA, episodes: Demonstrations) -> None:
        """``policy`` is what imitates; it lies in the run's folder."""

    def imitated(self, policy: TinyVLA) -> None:
        """``policy`` has imitated; it lies in the run's folder."""

    def findings(self) -> ImitationFindings:
        """The result, when it is there."""


def imitation_study(config: StudyConfig, folder: RunFolder) -> ImitationStudy:
    """In a process of its own if the evaluation has several, otherwise in this one, when it is asked for."""
    return LocalStudy(config) if config.evaluation.processes == 1 else BackgroundStudy(config, folder)


class LocalStudy:
    """Does everything in :meth:`findings`."""

    def __init__(self, config: StudyConfig) -> None:
        self.config = config

    def grounded(self, policy: TinyVLA, episodes: Demonstrations) -> None:
        self._longer, self._episodes = copy.deepcopy(policy), episodes

    def imitated(self, policy: TinyVLA) -> None:
        self._policy = policy

    def findings(self) -> ImitationFindings:
        config = self.config
        imitate_policy(self._longer, self._episodes, config.longer, config.seed)
        configured, longer = (
            stages.play(config.env, policy, config.plateau_seeds, config.evaluation, config.seed, "plateau").rate
            for policy in (self._policy, self._longer)
        )
        found = ablate_perception(config.env, {"imitation": self._policy}, config.evaluation, config.seed)
        return ImitationFindings(config.plateau(configured, longer), found["imitation"])


class BackgroundStudy:
    """Gives every part to the background process as soon as its policy is there."""

    def __init__(self, config: StudyConfig, folder: RunFolder) -> None:
        self.config, self.folder = config, folder

    def grounded(self, policy: TinyVLA, episodes: Demonstrations) -> None:
        self._trained = self._job(
            "imitate",
            policy=str(self.folder.checkpoint("grounded")),
            demonstrations=str(self.folder.path / "demonstrations"),
            config=to_json(self.config.longer),
            seed=self.config.seed,
            out=self._longer,
        )

    def imitated(self, policy: TinyVLA) -> None:
        config, folder = self.config, str(self.folder.checkpoint("imitation"))
        common: dict[str, Any] = {
            "env": remote_env(config.env),
            "num_envs": config.evaluation.num_envs,
            "noise_seed": config.seed,
        }
        self._plateau = [
            self._job("evaluate", _ignore, policy=item, seeds=config.plateau_seeds, **common)
            for item in (folder, self._longer)
        ]
        seeds = [int(seed) for seed in seed_ranges.held_out(seed_ranges.VALIDATION, config.evaluation.ablation)]
        self._checks = [
            self._job("check_perception", policy=folder, check=check, seeds=seeds, **common) for check in CHECKS
        ]

    def findings(self) -> ImitationFindings:
        self._trained.hurry()
        self._trained.result()  # before what evaluates it
        for job in (*self._plateau, *self._checks):
            job.hurry()
        configured, longer = (outcomes_of(job.result()).rate for job in self._plateau)
        rates = [Rate(**rate) for job in self._checks for rate in job.result()["rates"]]
        return ImitationFindings(self.config.plateau(configured, longer), PerceptionAblation(*rates))

    @property
    def _longer(self) -> str:
        return str(self.folder.checkpoint("imitation-longer"))

    def _job(self, name: str, report: Report | None = None, **arguments: object) -> BackgroundJob:
        return workers(self.config.evaluation.processes).submit_background(name, report, **arguments)


def _ignore(episodes: int, successes: int) -> None:
    """Progress in the background is not shown."""
