"""Learn from a few hundred episodes, and play the test scenes at every milestone on the way."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch

from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import UserError
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import evaluate
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.rollout import RolloutSource
from vla_rl.recipes.context import RunContext, Trainable, generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.few.simulator import Simulator
from vla_rl.recipes.few.uses import InUse, NoModel, OnlyLearning, Use
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.off_policy import OffPolicyRL
from vla_rl.recipes.policies import start_policy
from vla_rl.recipes.progress import bar
from vla_rl.recipes.stages import clock
from vla_rl.recipes.training_setup import build
from vla_rl.training.distributed import current_reducer
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class FewEpisodes:
    """Off-policy RL for as many training episodes as the last of ``episodes``; tests at each of them.

    ``use`` is what a model would be used for; the simulator stands in its place.  Raises UserError for milestones that
    do not rise.
    """

    rl: OffPolicyRL
    use: Use = NoModel()
    policy: str = ""  # a checkpoint folder
    demonstrations: str = ""
    seed: int = 1
    env: EnvConfig = field(kw_only=True)
    episodes: tuple[int, ...] = (100, 200, 400)
    scenes: int = 512
    num_envs: int = 64  # of a test, and those in which decisions are tried

    def __post_init__(self) -> None:
        if list(self.episodes) != sorted(set(self.episodes)) or min(self.episodes, default=0) < 1:
            raise UserError(f"episodes {self.episodes} are no rising milestones, so none could be tested; sort them.")

    def run(self, folder: RunFolder) -> JsonObject:
        """``summary.json`` has a row for every milestone, 0 included, with the outcome of every scene.

        A run that was stopped begins anew.
        """
        seconds: dict[str, float] = {}
        if folder.resumed:
            folder.keep_metrics(lambda line: False)
        policy = start_policy(self.policy, self.env, self.seed)
        context = RunContext(self.env, policy, self.seed, current_reducer(), self.demonstrations)
        with closing(build(self.rl, context)) as setup, closing(self.env.make_training(self.num_envs)) as copies:
            learner, source = setup.learner, setup.source
            assert isinstance(learner, OffPolicy) and isinstance(source, RolloutSource)
            simulator = Simulator(copies, setup.policy, generator(self.seed, 11))
            in_use = self.use.attach(source, learner, simulator, self.rl.replay.gamma)
            counts = Counts()
            rows = [self._test(OnlyLearning(), setup.policy, 0, seconds)]
            with bar("learn", self.episodes[-1]) as update:
                for milestone in self.episodes:
                    while counts.episodes < milestone:
                        with clock(seconds, "learn"):
                            rollout = source.next()
                            before = learner.steps
                            metrics = learner.update(rollout)
                            metrics |= in_use.learn(rollout, learner.steps - before)
                            setup.store.publish(learner.parameters, counts.episodes / self.episodes[-1])
                        counts.add(rollout)
                        folder.log("rl", len(counts.outcomes), {**rollout.info, **metrics, **counts.total()})
                        update(min(counts.episodes, milestone), f"exploring {counts.recent():.0%}")
                    tested = self._test(in_use, setup.policy, milestone, seconds)
                    rows.append(tested | counts.summary())
        return {"rows": rows, "seconds": seconds, "seed": self.seed}

    def _test(self, use: InUse, policy: Trainable, episodes: int, seconds: dict[str, float]) -> JsonObject:
        """Success on the test scenes, of what would be deployed now."""
        scenes = seed_ranges.held_out(seed_ranges.TEST, self.scenes)
        env, copies = self.env.make(self.num_envs), self.env.make(self.num_envs)
        with (
            clock(seconds, "test"),
            closing(env),
            closing(copies),
            bar(f"test after {episodes} episodes", self.scenes) as update,
        ):
            simulator = Simulator(copies, policy, generator(self.seed, 12))
            deployed = use.deployed(policy, env, simulator)
            found = evaluate(
                env, deployed, scenes, self.seed, report=lambda done, won: update(done, f"success {won / done:.0%}")
            )
        rate = Rate.of(found.success)
        outcomes = "".join(str(int(one)) for one in found.success)
        return {"episodes": episodes, "success": rate.success, "low": rate.low, "high": rate.high, "outcomes": outcomes}


@dataclass
class Counts:
    """The training episodes so far, and their control steps."""

    outcomes: list[bool] = field(default_factory=list)
    steps: int = 0

    @property
    def episodes(self) -> int:
        return len(self.outcomes)

    def add(self, rollout: Rollout) -> None:
        """Those that end in ``rollout``, in the order of time."""
        over = torch.as_tensor(rollout.terminated) | torch.as_tensor(rollout.truncated)
        self.outcomes += [bool(one) for one in torch.as_tensor(rollout.success)[over]]
        self.steps += int(rollout.info["env/steps"])

    def recent(self, episodes: int = 64) -> float:
        """Success of the latest ``episodes``."""
        return float(np.mean(self.outcomes[-episodes:])) if self.outcomes else 0.0

    def total(self) -> dict[str, float]:
        """As metrics have it."""
        return {"env/steps_total": float(self.steps), "rollout/episodes_total": float(self.episodes)}

    def summary(self) -> JsonObject:
        """What was played until now, and how often it succeeded."""
        return {"played": self.episodes, "steps": self.steps, "exploring": float(np.mean(self.outcomes))}
