"""The recipe that learns a world model from few episodes, improves a policy in dreams and judges it in the truth."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.cli import stages
from vla_rl.cli.dreams import DreamWorld, Gather, gather, promise, replayed, starts_of
from vla_rl.cli.method import Method, Setting, generator
from vla_rl.cli.progress import bar
from vla_rl.cli.stages import EvaluationConfig, clock
from vla_rl.cli.world import World
from vla_rl.contract.load import load
from vla_rl.evaluation import suite
from vla_rl.evaluation.agreement import NEVER, ReplayAgreement, replay_agreement
from vla_rl.evaluation.stats import mcnemar_exact, paired_bootstrap
from vla_rl.experience.episodes import Episodes
from vla_rl.experience.traces import Traces
from vla_rl.policies.tiny import TinyVLA
from vla_rl.training.distributed import this_process
from vla_rl.training.tracking import RunFolder
from vla_rl.training.world_model import WorldFit, fit_world, save_world, statistics


@dataclass(frozen=True)
class Imagine:
    """Gather, learn the world, measure how far it agrees with the truth, improve in it, play the test scenes.

    Selection is by imagined episodes alone, so ``gather.episodes`` is all that the simulator is asked for but the test.
    """

    rl: Method
    model: Any  # a ``world_models.model:WorldConfig``
    dream: Any  # a ``world_models.env:DreamConfig``
    keyframes: Any  # a ``world_models.keyframes:KeyframeConfig``
    policy: str = "runs/demo/checkpoints/imitation"  # a checkpoint folder
    demonstrations: str = ""  # folder of a dataset that is learnt from as well
    seed: int = 1
    world: World = field(default_factory=World)
    gather: Gather = field(default_factory=Gather)
    fit: WorldFit = field(default_factory=WorldFit)
    quantile: float = 0.95  # of usual doubt, beyond which a dream ends
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb"

    def run(self, folder: RunFolder) -> dict[str, Any]:
        """Leave the checkpoints "world" and "best"."""
        seconds: dict[str, float] = {}
        policy = TinyVLA.from_pretrained(self.policy)
        before = copy.deepcopy(policy)
        with clock(seconds, "gather"):
            learnt, held_out = gather(self.world, policy, self.gather, self.seed)
            learnt = self.with_demonstrations(learnt, policy.spec.tasks)
        with clock(seconds, "world"):
            model = self.learn(learnt, folder)
        with clock(seconds, "agreement"):
            tables, limits = self.judge(model, held_out)
        save_world(model, folder.checkpoint("world"), {"limits": list(limits.values)})
        starts = starts_of(model, learnt, promise(model, learnt), self.keyframes)
        with clock(seconds, "rl"):
            setting = Setting(DreamWorld(model, starts, limits, self.dream), policy, self.seed, this_process())
            trained, best = stages.improve(self.rl, setting, self.evaluation, folder)
        with clock(seconds, "test"):
            tested = self.test(before, trained)
        counts = {"learnt": learnt.count, "held_out": held_out.count, "keyframes": len(starts.keyframes)}
        agreement = [asdict(table) for table in tables]
        found = {"agreement": agreement, "limits": list(limits.values), "best_iteration": best.iteration, **counts}
        return {**tested, **found, "simulator_episodes": self.gather.episodes, "seconds": seconds, "seed": self.seed}

    def with_demonstrations(self, traces: Traces, tasks: tuple[str, ...]) -> Traces:
        """``traces`` and the recorded demonstrations, whose texts are counted as in ``tasks``."""
        if not self.demonstrations:
            return traces
        episodes = Episodes.load(Path(self.demonstrations)).with_tasks(tasks)
        return Traces.joined([traces, Traces.of_episodes(episodes)])

    def learn(self, traces: Traces, folder: RunFolder) -> Any:
        """A world model of ``traces``."""
        torch.manual_seed(self.seed)  # module initialisation has no generator argument
        env = self.world.make(1)
        model = load("world_models.model:WorldModel")(env.spec, self.model, *statistics(traces))
        env.close()

        def report(step: int, info: dict[str, float]) -> None:
            told = ", ".join(
                f"{name} {info[name]:.3f}" for name in ("motion", "pose", "video", "outcome") if name in info
            )
            update(step + 1, told)
            if (step + 1) % 25 == 0:
                folder.log("world", step, info)

        with bar("learn the world", self.fit.steps) as update:
            fit_world(model, traces, self.fit, generator(self.seed, 33), report)
        return model.eval()

    def judge(self, model: Any, held_out: Traces) -> tuple[tuple[ReplayAgreement, ...], Any]:
        """How far replays of ``held_out`` agree with it, by horizon, and the limits of doubt."""
        found = replayed(model, held_out, self.dream)
        length = np.array([end - begin - 1 for begin, end in held_out.spans()])
        true = np.where(held_out.outcomes, length, NEVER)
        frames = model.config.frames
        horizons = range(frames, min(int(length.max()), self.dream.horizon) + 1, frames)
        tables = replay_agreement(found.done, true, length, list(horizons))
        return tables, load("world_models.uncertainty:Limits").calibrate(found.by_depth(), self.quantile)

    def test(self, before: TinyVLA, after: Any) -> dict[str, Any]:
        """Both policies on the same test scenes of the simulator."""
        scenes = suite.held_out(suite.TEST, self.evaluation.test)
        played = {
            name: stages.play(self.world, policy, scenes, self.evaluation, self.seed, f"test {name}")
            for name, policy in (("imitation", before), ("imagined RL", after))
        }
        one, two = (outcomes.success for outcomes in played.values())
        won, lost = int((two & ~one).sum()), int((one & ~two).sum())
        gain = asdict(paired_bootstrap(two, one, self.seed, 10_000)) | {"mcnemar_p": mcnemar_exact(won, lost)}
        rates = {name.replace(" ", "_").lower(): asdict(outcomes.rate) for name, outcomes in played.items()}
        return {**rates, "gain": gain}
