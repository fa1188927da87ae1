"""Off-policy training: a replay buffer, demonstrations beside it, and learners that may begin with recorded data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vla_rl.algorithms.off_policy import OffPolicyConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.contract.batch import ReplayBuffer
from vla_rl.contract.config import Checked, at_least, check_limits, within
from vla_rl.contract.env import EnvSpec, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.experience.mixture import Mixture, Strata
from vla_rl.experience.relabel import relabelled
from vla_rl.experience.replay import InMemory, Interventions, OnDisk, Replay
from vla_rl.experience.rollout import WindowConfig
from vla_rl.fleet.sampler import AdaptiveSampler, SamplerConfig
from vla_rl.policies.critics import QEnsemble
from vla_rl.recipes.terminal import bar
from vla_rl.recipes.trainers import PolicyConfig, RunContext, SourceConfig, Trainable, TrainerConfig, generator, placed
from vla_rl.training.checkpoint import process_folder
from vla_rl.training.loop import LoopConfig, LoopLearner


@dataclass(frozen=True)
class ReplayConfig(Checked):
    """The replay buffer, and the demonstrations and corrections that its batches are mixed with.

    What a person corrected is drawn among the run's own decisions as well, as in HIL-SERL (arXiv 2410.21845).
    """

    capacity: int = at_least(200_000, 1)  # slots: decisions and ends of episodes; processes that share a run share them
    gamma: float = within(0.99, 0, 1)  # per low-level action
    n_step: int = at_least(3, 1)  # decisions
    share: float = within(0.25, 0, 1)  # of the demonstrations in a batch
    corrections: float = 0.0  # share of the decisions in which a person acted
    folder: str = ""  # keep the replay in files there instead of in memory

    def __post_init__(self) -> None:
        """Raises UserError for numbers that have no meaning."""
        super().__post_init__()
        check_limits(self, corrections=(0, 1 - self.share))

    def build(self, policy: Policy, context: RunContext, spec: EnvSpec, horizon: int) -> ReplayBuffer:
        """The buffer, with the demonstrations relabelled as decisions of ``policy`` in chunks of ``horizon``.

        Raises ContractError for demonstrations that do not fit ``spec``.
        """
        device, group = context.device, context.group
        storage = OnDisk(process_folder(Path(self.folder), group.rank), device) if self.folder else InMemory(device)
        online = Replay(-(-self.capacity // group.size), self.gamma, self.n_step, storage)
        if not self.share:
            return self.joined(online, {}, policy)
        episodes = context.episodes(f"a replay with a share of {self.share:g} for demonstrations")
        noise = generator(context.seed, 6)  # every process relabels all of them alike
        offline = Replay(2 * horizon * len(episodes.state) + 2, self.gamma, self.n_step, InMemory(device))
        with bar("relabel", episodes.count * horizon) as update:
            for done, rollout in enumerate(relabelled(episodes, policy, spec, horizon, noise, horizon), 1):
                offline.add(rollout)
                update(done, "demonstrations")
        return self.joined(online, {"demonstrations": offline}, policy)

    def joined(self, online: Replay, recorded: Mapping[str, Replay], policy: Policy) -> ReplayBuffer:
        """Batches of what the run collects and what was ``recorded`` (demonstrations, or nothing)."""
        parts: dict[str, ReplayBuffer] = {"online": online, **recorded}
        shares = {"online": 1.0 - self.share - self.corrections, **dict.fromkeys(recorded, self.share)}
        if self.corrections:
            parts["corrections"], shares["corrections"] = Interventions(online), self.corrections
        return Mixture(parts, shares) if len(parts) > 1 else online


@dataclass(frozen=True)
class AdaptiveReplay(ReplayConfig):
    """Tasks are equally likely, and the kinds of data of a task are drawn by SOP's formula, in place of shares.

    See ``vla_rl/fleet/sampler.py``, which learns from the losses of the critics what is drawn.
    """

    max_age: int = at_least(1000, 0)  # updates after which autonomous decisions are no longer drawn
    sampler: SamplerConfig = field(default_factory=SamplerConfig)

    def joined(self, online: Replay, recorded: Mapping[str, Replay], policy: Policy) -> ReplayBuffer:
        """The strata of the run's decisions, of the corrections in them, and of the demonstrations."""
        offline = recorded.get("demonstrations", Replay(2, self.gamma, self.n_step))
        return Strata(online, offline, AdaptiveSampler(self.sampler), lambda: policy.version, self.max_age)


@dataclass(frozen=True)
class OffPolicyRL(TrainerConfig):
    """Off-policy RL of the policy that ``policy`` builds; each of several processes has a share of the replay."""

    policy: PolicyConfig
    experience: SourceConfig = field(default_factory=lambda: WindowConfig(num_envs=32, decisions=8))
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    algorithm: OffPolicyConfig = field(default_factory=ResidualTD3Config)

    joins_episodes = True  # in the replay buffer

    def build_policy(self, context: RunContext, env: VecEnv) -> Trainable:
        """Raises UserError where processes share the weights: batches are drawn by each, whenever it likes."""
        if context.sharded:
            raise UserError(
                f"{type(self.algorithm).__name__} has target networks, which cannot be cut into shards, so nothing was "
                "started; leave sharded out, or choose an on-policy algorithm."
            )
        torch.manual_seed(context.seed)  # module initialisation has no generator argument
        return placed(self.policy.build(context), context.device)

    def build_learner(self, context: RunContext, env: VecEnv, policy: Trainable) -> LoopLearner:
        horizon = getattr(policy, "horizon", 1)
        replay = self.replay.build(policy, context, env.spec, horizon)
        # Critics of latent noise evaluate the noise that is chosen, which may be larger than a chunk.
        actions = getattr(policy, "latent", horizon * env.spec.action_dim)
        sizes = {**policy.feature_sizes, "time": 1}
        critic = QEnsemble(sizes, actions, self.algorithm.num_critics, self.algorithm.critic).to(context.device)
        draws = generator(context.seed, 4 + 100 * context.group.rank)  # of each process's own
        ours: Any = policy  # whose decisions are differentiable, which the learner checks
        return self.algorithm.build(ours, policy.trainable(), critic, replay, draws, context.group)

    def pretrain(self, learner: LoopLearner) -> bool:
        """Learn from the recorded data before anything is collected."""
        if steps := self.algorithm.offline_steps:
            recorded: Any = learner  # its algorithm's, which can begin with recorded data
            with bar("offline", steps) as update:
                recorded.pretrain(steps, lambda step, info: update(step + 1, f"value {info['critic/value']:.3f}"))
        return steps > 0
