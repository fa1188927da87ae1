"""The recipe that learns a world model from few episodes, improves a policy in dreams and judges it in the truth."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from vla_rl.evaluation import suite
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import mcnemar_exact, paired_bootstrap
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes import stages
from vla_rl.recipes.context import RunContext
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.coevolution import Growing, GrowingWorld, Plan
from vla_rl.recipes.stages import EvaluationConfig, clock
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.training.distributed import current_reducer
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class Imagine:
    """Gather, learn the world, measure how far it agrees with the truth, improve in it, play the test scenes.

    Selection is by imagined episodes alone, so gathered and bought episodes are all that the simulator is asked for but
    the test.
    """

    rl: TrainerConfig
    plan: Plan
    policy: str = "runs/demo/checkpoints/imitation"  # a checkpoint folder
    seed: int = 1
    env: EnvConfig = field(default_factory=EnvConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb"

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Leave the checkpoints "start", "world" and "best"; an interrupted run goes on."""
        seconds: dict[str, float] = {}
        with clock(seconds, "world"):
            policy, mind = self.prepare(folder)
        before = copy.deepcopy(policy)
        with clock(seconds, "rl"):
            context = RunContext(mind.dreams, policy, self.seed, current_reducer())
            trained, best = stages.improve(Growing(self.rl, mind), context, self.evaluation, folder)
        with clock(seconds, "agreement"):
            tables = mind.trained.agreement(mind.held_out)
        with clock(seconds, "test"):
            played = {name: self.test(one, name) for name, one in (("imitation", before), ("imagined RL", trained))}
        return {
            **_compared(played["imitation"], played["imagined RL"], self.seed),
            "agreement": [asdict(table) for table in tables],
            "horizon": mind.trained.dream.horizon,
            "threshold": mind.trained.dream.done,
            "limits": list(mind.trained.limits.values),
            "best_iteration": best.iteration,
            "simulator_episodes": self.plan.gather.episodes + mind.bought,
            "bought": mind.bought,
            "keyframes": len(mind.dreams.starts.keyframes),
            "seconds": seconds,
            "seed": self.seed,
        }

    def prepare(self, folder: RunFolder) -> tuple[TinyVLA, GrowingWorld]:
        """The policy to begin with, kept as the checkpoint "start", and a world model of what it does."""
        start = folder.checkpoint("start")
        policy = TinyVLA.from_pretrained(start if start.exists() else self.policy, self.env.spec())
        if not start.exists():
            policy.save_pretrained(start)
        return policy, GrowingWorld(self.plan, self.env, self.seed, folder, policy)

    def test(self, policy: Any, name: str) -> Outcomes:
        """``policy`` on the test scenes of the simulator."""
        scenes = suite.held_out(suite.TEST, self.evaluation.test)
        return stages.play(self.env, policy, scenes, self.evaluation, self.seed, f"test {name}")


def _compared(before: Outcomes, after: Outcomes, seed: int) -> dict[str, Any]:
    """Both rates and the gain on the same scenes."""
    one, two = before.success, after.success
    won, lost = int((two & ~one).sum()), int((one & ~two).sum())
    gain = asdict(paired_bootstrap(two, one, seed, 10_000)) | {"mcnemar_p": mcnemar_exact(won, lost)}
    return {"imitation": asdict(before.rate), "imagined_rl": asdict(after.rate), "gain": gain}
