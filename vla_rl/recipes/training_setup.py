"""The parts of one training run, built from its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vla_rl.contract.batch import ExperienceSource
from vla_rl.contract.env import VecEnv
from vla_rl.experience.background import BackgroundSource
from vla_rl.recipes.collectors import process_sources
from vla_rl.recipes.context import RunContext, Trainable
from vla_rl.recipes.trainers import TrainerConfig
from vla_rl.training.distributed import SummedCounters
from vla_rl.training.loop import LoopLearner
from vla_rl.training.policy_store import InProcessPolicyStore


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of one training run; ``close()`` ends its environments and those who collect in them."""

    policy: Trainable
    env: VecEnv
    source: ExperienceSource
    learner: LoopLearner
    store: InProcessPolicyStore
    close: Callable[[], None]


def build(
    trainer: TrainerConfig, context: RunContext, check: Callable[[Trainable], None] = lambda policy: None
) -> TrainingSetup:
    """All parts of a run; its sources are in processes of their own if there are several.

    ``check`` may refuse the policy before anything is built around it.
    """
    loop, shares = trainer.loop, context.split(trainer.loop.collectors)
    policy = trainer.build_policy(context.for_policy())
    check(policy)
    context.share(policy, loop)
    env = trainer.build_env(shares[0])  # for its spec alone, where other processes collect
    learner = trainer.build_learner(context, env, policy)
    store = InProcessPolicyStore(policy)
    if loop.collectors == 1:
        sources = [trainer.build_source(context, env, policy)]
    else:
        sources = process_sources(trainer, shares, lambda: store.progress)
    source: ExperienceSource = sources[0]
    close = env.close
    if loop.collectors > 1 or loop.rollouts_ahead:
        background = BackgroundSource(sources, policy, loop.rollouts_ahead)
        source, close = background, background.close
    summed = source if context.group.size == 1 else SummedCounters(source, context.group)
    return TrainingSetup(policy, env, trainer.whole_source(summed, policy), learner, store, close)
