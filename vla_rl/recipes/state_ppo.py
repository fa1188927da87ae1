"""PPO from scratch on state and pixels, evaluated by returns; ``configs/gym.py`` has the tasks."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import JsonObject
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.limits import check_sizes
from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.run import evaluate as play_seeds
from vla_rl.evaluation.stats import MeanReturn
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.critics import RunningCritic
from vla_rl.policies.feed_forward import ActorConfig
from vla_rl.policies.image_encoder import Activation, ImageEncoder, check_activation
from vla_rl.policies.normalization import RunningStatistics
from vla_rl.recipes.context import generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import lending, require_same
from vla_rl.recipes.memory_knobs import naming_knobs
from vla_rl.recipes.progress import Clock, bar, console, mostly, steps_per_second
from vla_rl.recipes.signals import Terminated, patient_sigterm
from vla_rl.recipes.stages import EvaluationConfig, clock
from vla_rl.recipes.trainers import SharingConfig
from vla_rl.training.device import resolve_device
from vla_rl.training.distributed import SummedCounters, anyone, current_reducer
from vla_rl.training.loop import BestWeights, Loop, LoopConfig, LoopLearner
from vla_rl.training.policy_store import InProcessPolicyStore
from vla_rl.training.timeline import Timeline
from vla_rl.training.tracking import RunFolder


@dataclass(frozen=True)
class CriticConfig:
    """Sizes of the value network."""

    width: int = 64
    depth: int = 2
    activation: Activation = "tanh"  # or "elu", of the hidden layers

    def __post_init__(self) -> None:
        """Raises UserError for sizes of no network."""
        check_sizes(self, "width", "depth")
        check_activation(self)


class NewPolicyConfig(Protocol):
    """The config of a new policy, such as ``ActorConfig``."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras whose pixels the policy reads, and so does its critic."""

    def build(self, spec: EnvSpec, proprioception: RunningStatistics) -> Any:
        """A ``LikelihoodPolicy`` with ``trainable``, ``save_pretrained`` and ``to``."""


@dataclass(frozen=True)
class StateBased:
    """A policy from nothing by PPO, then the test seeds: the checkpoint "best", chosen by validation return.

    Policy and critic read proprioception and the pixels of ``policy.cameras``; they standardise proprioception by the
    statistics of all training data so far.  The critic also reads the ``privileged/*`` entries that
    ``experience.privileged`` names; the policy never does.
    """

    env: EnvConfig
    seed: int = 1
    policy: NewPolicyConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: PPOConfig = field(default_factory=PPOConfig)
    experience: WindowConfig = field(default_factory=WindowConfig)
    loop: LoopConfig = field(
        default_factory=lambda: LoopConfig(collapse=math.inf)
    )  # returns have no scale of their own
    evaluation: EvaluationConfig = field(default_factory=lambda: EvaluationConfig(validation=16, test=64, num_envs=16))
    device: str = "cpu"  # where policy, critic and learner compute: "cpu", "cuda", "cuda:1", "auto"
    tracking: tuple[str, ...] = ()  # "tensorboard", "wandb": where metrics go besides metrics.jsonl
    shared: SharingConfig = SharingConfig()

    def run(self, folder: RunFolder) -> JsonObject:
        """Train and evaluate."""
        if self.loop.collectors > 1 or self.loop.staleness:
            raise UserError(
                "StateBased collects in the learner's own thread, so collectors and staleness would change nothing; "
                "leave them at 1 and 0."
            )
        seconds: dict[str, float] = {}
        group = current_reducer()
        self.shared.require_one_process(group)
        experience = self.experience.split(group.size)
        with (
            closing(self.env.make_training(experience.num_envs)) as env,
            closing(self._held(env)) as held,
        ):
            policy, learner = self.learner(env, group)
            seeds = seed_ranges.training_seeds(self.seed, "reinforcement")
            stream = SeedStream(seeds.start + group.rank, seeds.stop, group.size)
            source = experience.build(env, policy, stream, generator(self.seed, 5 + 100 * group.rank))
            lent = lending(source).lent if self.evaluation.share_env else nullcontext

            def validate() -> MeanReturn:
                with lent():
                    return self.evaluate(held, policy, seed_ranges.VALIDATION, self.evaluation.validation)

            loop = Loop(
                self.shared.around(source, policy) if group.size == 1 else SummedCounters(source, group),
                learner,
                InProcessPolicyStore(policy),
                validate,
                self.loop,
                on_best=lambda iteration: policy.save_pretrained(folder.checkpoint("best")),
            )
            with clock(seconds, "rl"), naming_knobs(self, self.evaluation):
                best = _train(loop, folder, group)
            with clock(seconds, "evaluation"):
                found = self.evaluate(held, policy, seed_ranges.TEST, self.evaluation.test)
        return {
            "return": asdict(found),
            "best_iteration": best.iteration,
            "env_steps": int(loop.env_steps),
            "seconds": seconds,
            "seed": self.seed,
        }

    def _held(self, env: VecEnv) -> VecEnv:
        """The environments to evaluate in; raises UserError where they cannot be those of training, ``env``."""
        if not self.evaluation.share_env:
            return self.env.make(self.evaluation.num_envs)
        require_same(self.env)
        return env

    def learner(self, env: VecEnv, group: Reducer) -> tuple[Any, LoopLearner]:
        """A new policy for ``env`` and what improves it."""
        torch.manual_seed(self.seed)  # module initialisation has no generator argument
        sizes = {"state": env.spec.state.shape[0]}
        device = resolve_device(self.device)
        policy = self.policy.build(env.spec, RunningStatistics(sizes["state"])).to(device)
        if unknown := sorted(set(self.experience.privileged) - set(env.spec.extras)):
            raise UserError(
                f"{env.spec.name!r} delivers no {unknown[0]!r} (--experience.privileged), so the critic cannot read "
                f"it; {did_you_mean(unknown[0], env.spec.extras)}"
            )
        sizes |= {name: math.prod(env.spec.extras[name].shape) for name in self.experience.privileged}
        vision = ImageEncoder.of(env.spec, self.policy.cameras)
        critic = RunningCritic(sizes, self.critic.width, self.critic.depth, vision, self.critic.activation).to(device)
        return policy, self.algorithm.build(policy, policy.trainable(), critic, generator(self.seed, 4), group)

    def evaluate(self, env: VecEnv, policy: Any, seeds: range, count: int) -> MeanReturn:
        """The mean return of what would be deployed, on ``count`` held-out seeds."""
        outcomes = play_seeds(env, policy, seed_ranges.held_out(seeds, count), noise_seed=self.seed)
        return MeanReturn.of(outcomes.returns)


def _train(loop: Loop, folder: RunFolder, group: Reducer) -> BestWeights:
    """Run ``loop`` with a progress bar, metrics and states to go on from in ``folder``."""
    with bar("improve", loop.config.iterations) as update, patient_sigterm() as asked_to_stop:
        last = {"eval/score": math.nan}
        spent, timeline = Clock(), Timeline.of(folder)

        def report(iteration: int, metrics: dict[str, float]) -> None:
            folder.log("rl", iteration, metrics)
            if "eval/score" in metrics:
                timeline.write(folder)
            last["eval/score"] = metrics.get("eval/score", last["eval/score"])
            spent.add(metrics)
            speed = steps_per_second(metrics)
            update(iteration, f"validated return {last['eval/score']:.1f}, {speed:.0f} steps/s, {mostly(metrics)}")

        def save(iteration: int) -> None:
            stopping = anyone(asked_to_stop, group)
            if can_resume and (stopping or iteration % loop.config.save_every == 0):
                folder.save_state(iteration, loop.state_dict())
            if stopping:
                raise Terminated

        loop.report, loop.save, loop.timeline = report, save, timeline
        if reason := loop.not_resumable():
            console.print(reason)
        can_resume = not reason
        if folder.resumed and (state := folder.load_state("rl")):
            loop.load_state_dict(state)
        try:
            best = loop.run()
        finally:
            timeline.write(folder)
    spent.tell()
    return best
