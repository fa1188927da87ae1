"""The numbers of a world model's life: what it is trained on, how it is trained, trusted and used.

The episodes of a run, in ``RUN/episodes``: collected, demonstrated and bought ones.

learnt.npz           recorded episodes that the world model is trained on
bought-1.npz ...     those bought later
calibration.npz      held out: they set the limits of uncertainty, the threshold of success and the horizon
held_out.npz         held out: agreement is reported on these
policy_success.json  how often the policy succeeded before RL, exploring
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.experience.collect import collect_trajectories
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.trajectories import Trajectories
from vla_rl.recipes.context import generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.collect import CollectConfig, CollectedEpisodes, collect_episodes, show_success
from vla_rl.recipes.progress import bar
from vla_rl.training.coevolve import CoevolutionConfig
from vla_rl.training.fit import FitConfig
from vla_rl.training.world_model import WorldModelFit


def _short_fit() -> WorldModelFit:
    lr = 5e-4
    return WorldModelFit(
        FitConfig(300, 512, lr), FitConfig(30, 256, lr), FitConfig(60, 32, lr), FitConfig(600, 64, lr, 1e-2)
    )


@dataclass(frozen=True)
class Plan:
    """How a world model is trained, and how far it is trusted."""

    model: Any  # a ``world_models.config.WorldModelConfig``
    imagination: Any  # a ``world_models.config.ImaginationConfig``, with the longest horizon to trust
    keyframes: Any  # a ``world_models.initial_states.KeyframeConfig``
    collect: CollectConfig = field(default_factory=CollectConfig)
    init_from: str = ""  # a run whose collected episodes and first world model are taken; "" makes both
    demonstrations: str = ""  # folder of a dataset that the world model is trained on as well
    fit: WorldModelFit = field(default_factory=WorldModelFit)
    refit: WorldModelFit = field(default_factory=_short_fit)  # after episodes were bought
    trust: TrustConfig = field(default_factory=TrustConfig)
    initial_episodes: int = 500  # imagined rollouts begin in so many of the latest episodes
    coevolution: CoevolutionConfig = field(default_factory=CoevolutionConfig)


class RunEpisodes:
    """``learnt`` are those that the world model is trained on, the latest last; ``bought`` counts the bought ones."""

    def __init__(self, folder: Path, collected: CollectedEpisodes, demonstrations: list[Trajectories]) -> None:
        """``folder``: ``RUN/episodes``, which may hold bought episodes."""
        self.folder = folder
        self.calibration, self.held_out = collected.calibration, collected.held_out
        self.policy_success, self.policy_episodes = collected.policy_success, collected.policy_episodes
        played = [Trajectories.load(path) for path in self._files()]
        self._sizes = [trajectories.count for trajectories in played]  # of all purchases in the folder
        self._all = Trajectories.joined([*demonstrations, collected.learnt, *played])
        self.use(len(played))

    @classmethod
    def load_or_collect(
        cls, folder: Path, env: EnvConfig, policy: Policy, tasks: tuple[str, ...], plan: Plan, seed: int
    ) -> RunEpisodes:
        """Those of an earlier part of the run, of the run ``plan.init_from``, or newly played with ``policy``.

        ``tasks`` are the environment's instructions, by which those of demonstrations are numbered.
        """
        collected = CollectedEpisodes.load(folder)
        if collected is None:
            if plan.init_from:
                collected = _collected_by(plan.init_from)
            else:
                collected = collect_episodes(env, policy, plan.collect, seed)
            collected.save(folder)
        demonstrations = []
        if plan.demonstrations:
            recorded = load_demonstrations(Path(plan.demonstrations)).with_tasks(tasks)
            demonstrations.append(Trajectories.from_demonstrations(recorded))
        return cls(folder, collected, demonstrations)

    def use(self, purchases: int) -> None:
        """Learn from the first ``purchases`` alone: :meth:`buy` finds later ones in the folder when it comes to them.

        A run goes on from a saved state that may be older than its newest purchase.
        """
        self.purchases, self.bought = purchases, sum(self._sizes[:purchases])
        unused = sum(self._sizes[purchases:])
        self.learnt = self._all.select(np.arange(self._all.count - unused)) if unused else self._all

    def latest(self, count: int) -> Trajectories:
        """The latest ``count`` of ``learnt``."""
        return self.learnt.select(np.arange(max(0, self.learnt.count - count), self.learnt.count))

    def buy(self, env_config: EnvConfig, policy: Policy, count: int, plan: Plan, seed: int) -> tuple[float, int]:
        """Learn from ``count`` real episodes of ``policy`` as well, on seeds that no other has.

        Returns their success and how many they are.
        Those that an interrupted run has played already are not played again.
        """
        if self.purchases == len(self._sizes):
            self._play(env_config, policy, count, plan, seed)
        self.use(self.purchases + 1)
        fresh = self.latest(self._sizes[self.purchases - 1])
        return float(fresh.outcomes.mean()), fresh.count

    def _play(self, env_config: EnvConfig, policy: Policy, count: int, plan: Plan, seed: int) -> None:
        number = self.purchases + 1
        first = plan.collect.episodes + self.bought
        seeds = seed_ranges.training_seeds(seed, "world_model")[first : first + count]
        env = env_config.make_training(plan.collect.num_envs)
        with bar("buy episodes", count) as update:
            noise = generator(seed, 3000 + number)
            fresh = collect_trajectories(env, policy, list(seeds), noise, "sample", show_success(update))
        env.close()
        fresh.save(self.folder / f"bought-{number}.npz")
        self._sizes.append(fresh.count)
        self._all = Trajectories.joined([self._all, fresh])

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("bought-*.npz"), key=lambda path: int(path.stem.partition("-")[2]))


def _collected_by(run: str) -> CollectedEpisodes:
    found = CollectedEpisodes.load(Path(run) / "episodes")
    if found is None:
        raise UserError(
            f"{run!r} holds no collected episodes, so a run cannot be initialised from it; name a folder that vla-rl "
            "imagine made."
        )
    return found
