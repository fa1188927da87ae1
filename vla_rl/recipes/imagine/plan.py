"""The numbers of a world model's life: what it is trained on, how it is trained, trusted and used.

The episodes of a run, in ``RUN/episodes``: collected, demonstrated and bought ones.

learnt.npz           recorded episodes that the world model is trained on
bought-1.npz ...     those bought later
calibration.npz      held out: they set the limits of uncertainty, the threshold of success and the horizon
held_out.npz         held out: agreement is reported on these
policy_success.json  how often the policy succeeded before RL, exploring
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.trust import read_json
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.experience.collect import collect_trajectories
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.policies.function import EpsilonRandomPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import shown
from vla_rl.recipes.terminal import bar
from vla_rl.recipes.trainers import generator
from vla_rl.training.fit import FitConfig
from vla_rl.training.tracking import write_json
from vla_rl.training.world_model import CoevolutionConfig, WorldModelFit


@dataclass(frozen=True)
class CollectConfig:
    """How many episodes of the simulator are played before the world model is trained."""

    policy_episodes: int = 830  # of the policy, exploring
    epsilon_random_episodes: int = 330  # of the policy with random decisions: near-successes, failures of all kinds
    random_episodes: int = 115  # of random actions
    random_action_prob: float = 0.3  # of a decision, in the second kind
    calibration: int = 175  # of all of them, held out for the limits of uncertainty, the threshold and the horizon
    held_out: int = 100  # and to measure agreement on
    num_envs: int = 32
    other_policies: tuple[str, ...] = ()  # checkpoints whose episodes are learnt from as well, to rank ones like them
    other_episodes: int = 300  # of each of these, exploring

    @property
    def episodes(self) -> int:
        """All of them."""
        own = self.policy_episodes + self.epsilon_random_episodes + self.random_episodes
        return own + len(self.other_policies) * self.other_episodes


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


@dataclass(frozen=True)
class CollectedEpisodes:
    """The three parts, equal mixtures of all kinds, and how often the policy itself succeeded."""

    learnt: Trajectories
    calibration: Trajectories
    held_out: Trajectories
    policy_success: float | None  # in the first kind of episodes; None if none was played
    policy_episodes: int

    def save(self, folder: Path) -> None:
        """Write everything to ``folder``, the success last: where it exists, all files do."""
        for name in _PARTS:
            getattr(self, name).save(folder / f"{name}.npz")
        found = {"success": self.policy_success, "episodes": self.policy_episodes}
        write_json(folder / "policy_success.json", found)

    @classmethod
    def load(cls, folder: Path) -> CollectedEpisodes | None:
        """What :meth:`save` wrote; None when it did not get to the end."""
        if not (folder / "policy_success.json").exists():
            return None
        found = read_json(folder / "policy_success.json")
        parts = {name: Trajectories.load(folder / f"{name}.npz") for name in _PARTS}
        return cls(**parts, policy_success=found["success"], policy_episodes=found["episodes"])


_PARTS = ("learnt", "calibration", "held_out")


def collect_episodes(env_config: EnvConfig, policy: Policy, config: CollectConfig, seed: int) -> CollectedEpisodes:
    """Play ``config.episodes`` episodes and split them.

    Raises UserError when a part would be empty, and for a checkpoint of another environment.
    """
    aside = config.calibration + config.held_out
    if not (config.calibration and config.held_out and aside < config.episodes):
        raise UserError(
            f"{config.calibration} of {config.episodes} episodes to calibrate on and {config.held_out} held out leave "
            "nothing to train, calibrate or evaluate on; change one of the numbers."
        )
    env = env_config.make_training(config.num_envs)
    seeds = iter(seed_ranges.training_seeds(seed, "world_model"))
    mixed, random = (EpsilonRandomPolicy(policy, env.spec, share) for share in (config.random_action_prob, 1.0))
    kinds: list[tuple[str, int, Policy]] = [
        ("policy", config.policy_episodes, policy),
        ("epsilon-random", config.epsilon_random_episodes, mixed),
        ("random", config.random_episodes, random),
        *((name, config.other_episodes, load_policy(name, env.spec)) for name in config.other_policies),
    ]
    parts = [
        _played(f"play {name}", env, player, [next(seeds) for _ in range(count)], seed, 30)
        for name, count, player in kinds
        if count
    ]
    env.close()
    trajectories = Trajectories.joined(parts)
    order = np.random.default_rng([seed, 31]).permutation(trajectories.count)
    cuts = np.split(order, [config.held_out, aside])
    held_out, calibration, learnt = (trajectories.select(part) for part in cuts)
    own = float(parts[0].outcomes.mean()) if config.policy_episodes else None  # parts[0] is of another kind without
    return CollectedEpisodes(learnt, calibration, held_out, own, config.policy_episodes)


def _played(what: str, env: VecEnv, policy: Policy, seeds: Sequence[int], seed: int, stream: int) -> Trajectories:
    """One episode of ``policy`` per seed, exploring with the noise of ``stream``."""
    with bar(what, len(seeds)) as update:
        return collect_trajectories(env, policy, seeds, generator(seed, stream), "sample", shown(update))


class RunEpisodes:
    """``learnt`` are those that the world model is trained on, the latest last; ``bought`` counts the bought ones."""

    def __init__(self, folder: Path, collected: CollectedEpisodes, demonstrations: list[Trajectories]) -> None:
        """``folder``: ``RUN/episodes``, which may hold bought episodes."""
        self.folder = folder
        self.calibration, self.held_out = collected.calibration, collected.held_out
        self.policy_success, self.policy_episodes = collected.policy_success, collected.policy_episodes
        bought = sorted(folder.glob("bought-*.npz"), key=lambda path: int(path.stem.partition("-")[2]))
        played = [Trajectories.load(path) for path in bought]
        self._sizes = [trajectories.count for trajectories in played]  # of all purchases in the folder
        self._all = Trajectories.joined([*demonstrations, collected.learnt, *played])
        self.use(len(played))

    @classmethod
    def load_or_collect(cls, folder: Path, env: EnvConfig, policy: Policy, plan: Plan, seed: int) -> RunEpisodes:
        """Those of an earlier part of the run, of the run ``plan.init_from``, or newly played with ``policy``.

        Raises UserError where ``plan.init_from`` has none.
        """
        collected = CollectedEpisodes.load(folder)
        if collected is None and plan.init_from:
            collected = CollectedEpisodes.load(Path(plan.init_from) / "episodes")
            if collected is None:
                raise UserError(
                    f"{plan.init_from!r} holds no collected episodes, so a run cannot be initialised from it; name a "
                    "folder that vla-rl imagine made."
                )
            collected.save(folder)
        elif collected is None:
            collected = collect_episodes(env, policy, plan.collect, seed)
            collected.save(folder)
        demonstrations = []
        if plan.demonstrations:
            recorded = load_demonstrations(plan.demonstrations).for_env(env.spec())
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
        return self.learnt.select(np.arange(max(0, self.learnt.count - count), self.learnt.count))

    def buy(self, env_config: EnvConfig, policy: Policy, count: int, plan: Plan, seed: int) -> tuple[float, int]:
        """Learn from ``count`` real episodes of ``policy`` as well, on seeds that no other has.

        Returns their success and how many they are.
        Those that an interrupted run has played already are not played again.
        """
        number = self.purchases + 1
        if self.purchases == len(self._sizes):
            first, env = plan.collect.episodes + self.bought, env_config.make_training(plan.collect.num_envs)
            seeds = list(seed_ranges.training_seeds(seed, "world_model")[first : first + count])
            fresh = _played("buy episodes", env, policy, seeds, seed, 3000 + number)
            env.close()
            fresh.save(self.folder / f"bought-{number}.npz")
            self._sizes.append(fresh.count)
            self._all = Trajectories.joined([self._all, fresh])
        self.use(number)
        fresh = self.latest(self._sizes[number - 1])
        return float(fresh.outcomes.mean()), fresh.count
