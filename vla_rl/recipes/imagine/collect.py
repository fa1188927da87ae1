"""Episodes of the simulator: what a world model is trained on, calibrated on and evaluated on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.contract.trust import read_json
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.collect import collect_trajectories
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.policies.epsilon_random import EpsilonRandomPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.context import generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.progress import bar
from vla_rl.training.tracking import write_json

_PARTS = ("learnt", "calibration", "held_out")


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
        """What :meth:`save` wrote; None when it did not get to the end.

        Raises UserError for episodes that an earlier version wrote.
        """
        success = folder / "policy_success.json"
        if not success.exists():
            return None
        found = read_json(success)
        if not isinstance(found, dict):
            raise UserError(
                f"{str(success)!r} does not say in how many episodes the policy succeeded, as it was written by an "
                "earlier version, so imagined success cannot be compared with it; collect episodes in a new run."
            )
        parts = {name: Trajectories.load(folder / f"{name}.npz") for name in _PARTS}
        return cls(**parts, policy_success=found["success"], policy_episodes=found["episodes"])


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
    others = [(name, config.other_episodes, load_policy(name, env.spec)) for name in config.other_policies]
    mixed, random = (EpsilonRandomPolicy(policy, env.spec, share) for share in (config.random_action_prob, 1.0))
    kinds = (
        ("policy", config.policy_episodes, policy),
        ("epsilon-random", config.epsilon_random_episodes, mixed),
        ("random", config.random_episodes, random),
        *others,
    )
    parts = []
    for name, count, player in kinds:
        if count:
            with bar(f"play {name}", count) as update:
                chosen, noise = [next(seeds) for _ in range(count)], generator(seed, 30)
                parts.append(collect_trajectories(env, player, chosen, noise, "sample", show_success(update)))
    env.close()
    trajectories = Trajectories.joined(parts)
    order = np.random.default_rng([seed, 31]).permutation(trajectories.count)
    cuts = np.split(order, [config.held_out, aside])
    held_out, calibration, learnt = (trajectories.select(part) for part in cuts)
    own = float(parts[0].outcomes.mean()) if config.policy_episodes else None  # parts[0] is of another kind without
    return CollectedEpisodes(learnt, calibration, held_out, own, config.policy_episodes)


def show_success(update: Callable[[int, str], None]) -> Callable[[int, int], None]:
    """A callback ``(episodes, successes)`` for the progress bar ``update``."""
    return lambda episodes, won: update(episodes, f"success {won / episodes:.0%}")
