"""The recipe that trains a world model on few episodes, improves a policy in it and tests it in the simulator."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field

from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import mcnemar_exact, paired_bootstrap
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import save_own
from vla_rl.recipes import stages, world_models
from vla_rl.recipes.context import RunContext, StartPolicy, placed
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.coevolution import CoevolvingTrainer, WorldModelRun
from vla_rl.recipes.imagine.plan import Plan
from vla_rl.recipes.imagine.run_episodes import RunEpisodes
from vla_rl.recipes.imagine.train_model import load_or_train
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.policies import start_policy
from vla_rl.recipes.stages import EvaluationConfig, clock
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.training.device import resolve_device
from vla_rl.training.distributed import current_reducer
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class Imagine:
    """Collect episodes, train and calibrate a world model, improve the policy in it, play the test scenes.

    The best weights are chosen by imagined episodes alone, so collected and bought episodes are all that is simulated
    before the test.
    """

    rl: TrainerConfig
    plan: Plan
    policy: str = "runs/demo/checkpoints/imitation"  # a checkpoint folder, a public one, or module:Class
    seed: int = 1
    env: EnvConfig = field(kw_only=True)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "cpu"  # of policy, critic, learner, replay and world model: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb"
    vla: VLAOptions = VLAOptions()  # how ``policy`` is opened if it is a public folder; ours have their own

    def run(self, folder: RunFolder) -> JsonObject:
        """Leave the checkpoints "start", "first", "world" and "best"; an interrupted run goes on."""
        seconds: dict[str, float] = {}
        with clock(seconds, "world"):
            policy, world_model = self.prepare(folder)
        before = copy.deepcopy(policy)
        with clock(seconds, "rl"):
            device = resolve_device(self.device)
            context = RunContext(world_model.env_factory, policy, self.seed, current_reducer(), device=device)
            trainer = CoevolvingTrainer(self.rl, world_model)
            trained, best = stages.improve(trainer, context, self.evaluation, folder)
        with clock(seconds, "agreement"):
            tables = world_model.calibrated.agreement(world_model.episodes.held_out)
        with clock(seconds, "test"):
            imitation, imagined = self._test(before, "imitation"), self._test(trained, "imagined RL")
        calibrated = world_model.calibrated
        return {
            **_compare(imitation, imagined, self.seed),
            "agreement": [asdict(table) for table in tables],
            "horizon": calibrated.imagination.horizon,
            "threshold": calibrated.imagination.success_threshold,
            "limits": list(calibrated.limits.values),
            "best_iteration": best.iteration,
            "simulator_episodes": self.plan.collect.episodes + world_model.episodes.bought,
            "bought": world_model.episodes.bought,
            "keyframes": world_model.keyframes,
            "seconds": seconds,
            "seed": self.seed,
        }

    def prepare(self, folder: RunFolder) -> tuple[StartPolicy, WorldModelRun]:
        """The starting policy and a calibrated world model, as far as an earlier part of the run has not made them."""
        device, spec = resolve_device(self.device), self.env.spec()
        require_imaginable(spec, self.plan)
        policy = placed(self._start(folder), device)
        episodes = RunEpisodes.load_or_collect(
            folder.path / "episodes", self.env, policy, spec.tasks, self.plan, self.seed
        )
        calibrated = load_or_train(folder, spec, episodes, self.plan, self.seed, device)
        world_model = WorldModelRun(self.plan, self.env, self.seed, folder, episodes, calibrated)
        world_model.measure_baseline(policy)
        return policy, world_model

    def _start(self, folder: RunFolder) -> StartPolicy:
        """The policy that the run starts from, kept as the checkpoint "start"; raises UserError without one."""
        kept = folder.checkpoint("start")
        policy = start_policy(kept if kept.exists() else self.policy, self.env, self.seed, self.vla)
        if policy is None:
            raise UserError(
                "imagination collects episodes with a policy and none was given, so there is nothing to train a world "
                "model on; add --policy with a checkpoint folder or module:Class."
            )
        if not kept.exists():
            save_own(policy, kept)
        return policy

    def _test(self, policy: Policy, name: str) -> Outcomes:
        """``policy`` on the test scenes of the simulator."""
        scenes = seed_ranges.held_out(seed_ranges.TEST, self.evaluation.test)
        return stages.play(self.env, policy, scenes, self.evaluation, self.seed, f"test {name}")


def require_imaginable(spec: EnvSpec, plan: Plan) -> None:
    """Raise UserError, before anything is played, where a world model of ``spec`` would have nothing to predict."""
    world_models.canvas(spec, plan.model)
    if not plan.init_from:
        plan.imagination.reward.require(plan.model.reward)
    if spec.success is None:
        raise UserError(
            f"{spec.name!r} has no notion of success, which imagined rollouts are rewarded with; an environment of "
            "Gymnasium gets one by the option success_return."
        )


def _compare(before: Outcomes, after: Outcomes, seed: int) -> JsonObject:
    """Both rates and the gain on the same scenes."""
    one, two = before.success, after.success
    won, lost = int((two & ~one).sum()), int((one & ~two).sum())
    gain = asdict(paired_bootstrap(two, one, seed, 10_000)) | {"mcnemar_p": mcnemar_exact(won, lost)}
    return {"imitation": asdict(before.rate), "imagined_rl": asdict(after.rate), "gain": gain}
