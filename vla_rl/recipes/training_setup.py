"""The parts of one training run, built from its config."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import cast

from vla_rl.contract.batch import ExperienceSource
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.experience.asynchronous import Advancing, AdvancingSource, AsyncSource
from vla_rl.experience.background import BackgroundSource, CollectingSource
from vla_rl.recipes.collectors import ProcessSources
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
    source, close = _source(trainer, shares, env, policy, store)
    summed = source if context.group.size == 1 else SummedCounters(source, context.group)
    return TrainingSetup(policy, env, trainer.whole_source(summed, policy), learner, store, close)


def _source(
    trainer: TrainerConfig, shares: list[RunContext], env: VecEnv, policy: Trainable, store: InProcessPolicyStore
) -> tuple[ExperienceSource, Callable[[], None]]:
    """The experience of all ``shares``, in step with the learner or ahead of it, and what ends it."""
    loop, remake = trainer.loop, None
    with ExitStack() as stack:
        if loop.collectors == 1:
            sources: list[CollectingSource] = [trainer.build_source(shares[0], env, policy)]
        else:
            remote = stack.enter_context(closing(ProcessSources(trainer, shares, lambda: store.progress)))
            sources, remake = [*remote.all()], remote.remake
        whole: AsyncSource | BackgroundSource
        if loop.staleness:
            advancing, windows = [_advancing(source) for source in sources], trainer.windows(len(sources))
            whole = stack.enter_context(closing(AsyncSource(advancing, policy, loop.staleness, windows, remake)))
        elif loop.collectors > 1:
            whole = stack.enter_context(closing(BackgroundSource(sources, policy)))
        else:
            return sources[0], env.close
        return whole, stack.pop_all().close


def _advancing(source: CollectingSource) -> AdvancingSource:
    """``source``; raises UserError unless it can be given new weights between two decisions."""
    if not isinstance(source, Advancing):
        raise UserError(
            f"{type(source).__name__} has no advance and deliver, so it cannot play on while the policy changes; add "
            "them, or set staleness to 0."
        )
    return cast(AdvancingSource, source)
