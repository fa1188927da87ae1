"""What trainers share that imitate while they play: a flow policy changed in place, and demonstrations beside it."""

from __future__ import annotations

from typing import cast

from vla_rl.algorithms.chunks import Chunks
from vla_rl.contract.batch import ExperienceSource
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.experience.background import CollectingSource
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.flow import FlowSampler
from vla_rl.recipes.context import RunContext, Trainable
from vla_rl.recipes.imitation import ImitatingPolicy, demonstrated_chunks, encode_episodes
from vla_rl.recipes.trainers import FlowSampled, SourceConfig
from vla_rl.training.loop import LoopLearner


class ImitatingTrainer:
    """The parts of a ``TrainerConfig`` that do not depend on what is imitated; it runs in one process."""

    experience: SourceConfig
    sampler: FlowSampler

    def require_one_process(self, context: RunContext, needed_by: str) -> None:
        """Raise UserError for several processes."""
        if context.group.size > 1 or context.collectors > 1:
            raise UserError(
                f"{needed_by} keeps what is imitated in one process, so several would learn different things; start "
                "one process with one collector."
            )

    def build_policy(self, context: RunContext) -> Trainable:
        """``context.base`` itself; raises UserError unless it is a flow policy."""
        base = context.start("improvement by imitation")
        if not isinstance(base, FlowSampled):
            raise UserError(
                f"{type(base).__name__} has no with_sampler, so it is no flow policy and cannot be trained here; "
                "choose a flow policy such as an imitation checkpoint."
            )
        return base.with_sampler(self.sampler, 1.0)

    def recorded(self, context: RunContext, policy: Trainable, needed_by: str) -> Chunks:
        """The demonstrations of ``context``, to imitate."""
        episodes: Demonstrations = context.episodes(needed_by).with_tasks(context.env.spec().tasks)
        features = {name: item.to(context.device) for name, item in encode_episodes(policy, episodes).items()}
        flow = cast(ImitatingPolicy, policy)
        return demonstrated_chunks(flow, episodes, features, flow.horizon)

    def build_source(self, context: RunContext, env: VecEnv, policy: Trainable) -> CollectingSource:
        return self.experience.build(env, policy, context.seeds(), context.exploration())

    def windows(self, sources: int) -> int:
        """All of them; there is one, see :meth:`require_one_process`."""
        return sources

    def whole_source(self, source: ExperienceSource, policy: Trainable) -> ExperienceSource:
        return source

    def pretrain(self, learner: LoopLearner) -> bool:
        """Nothing: the policy that the run starts from has imitated already."""
        return False
