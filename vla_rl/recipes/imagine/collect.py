"""Episodes of the simulator that a world model learns from, is calibrated on and is judged by."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import suite
from vla_rl.experience.collect import collect_trajectories
from vla_rl.experience.trajectories import Trajectories
from vla_rl.policies.epsilon_random import EpsilonRandomPolicy
from vla_rl.recipes.context import generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.progress import bar
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class Gather:
    """Episodes of the simulator that a world model learns from; every one is paid for."""

    own: int = 830  # the policy itself, with the noise that it explores with
    clumsy: int = 330  # with a share of its decisions at random: near-successes, and failures of all kinds
    random: int = 115  # random play: what things do when nobody means anything
    random_action_prob: float = 0.3
    calibration: int = 300  # of all of them, held out to set limits of doubt, the threshold of success and the horizon
    held_out: int = 300  # and to tell agreement by
    num_envs: int = 32

    @property
    def episodes(self) -> int:
        """All of them."""
        return self.own + self.clumsy + self.random


@dataclass(frozen=True)
class Gathered:
    """What was played, and the success of those episodes that the policy played by itself."""

    learnt: Trajectories
    calibration: Trajectories
    held_out: Trajectories
    own: float

    def save(self, folder: Path) -> None:
        """Keep it in ``folder``, the number last: with it, everything is there."""
        for name in ("learnt", "calibration", "held_out"):
            getattr(self, name).save(folder / f"{name}.npz")
        write_json(folder / "own.json", self.own)

    @classmethod
    def load(cls, folder: Path) -> Gathered | None:
        """What :meth:`save` kept; None when it did not get to the end."""
        if not (folder / "own.json").exists():
            return None
        parts = {name: Trajectories.load(folder / f"{name}.npz") for name in ("learnt", "calibration", "held_out")}
        return cls(**parts, own=json.loads((folder / "own.json").read_text(encoding="utf-8")))


def gather(world: EnvConfig, policy: Policy, plan: Gather, seed: int) -> Gathered:
    """Play what ``plan`` says; learnt from, calibrated on and held out are equal mixtures.

    Raises UserError when nothing would be left to learn from.
    """
    aside = plan.calibration + plan.held_out
    if not (plan.calibration and plan.held_out and aside < plan.episodes):
        raise UserError(
            f"{plan.calibration} of {plan.episodes} episodes to calibrate on and {plan.held_out} held out leave "
            "nothing to learn from, or to judge by; change one of the numbers."
        )
    env = world.make_training(plan.num_envs)
    seeds = iter(suite.training_seeds(seed, "dreams"))
    shares = (("own", plan.own, 0.0), ("clumsy", plan.clumsy, plan.random_action_prob), ("random", plan.random, 1.0))
    parts = []
    for name, count, share in shares:
        if count:
            player = EpsilonRandomPolicy(policy, env.spec, share) if share else policy
            with bar(f"play {name}", count) as update:
                chosen = [next(seeds) for _ in range(count)]
                parts.append(collect_trajectories(env, player, chosen, generator(seed, 30), "sample", told(update)))
    env.close()
    trajectories = Trajectories.joined(parts)
    order = np.random.default_rng([seed, 31]).permutation(trajectories.count)
    cuts = np.split(order, [plan.held_out, aside])
    held_out, calibration, learnt = (trajectories.select(part) for part in cuts)
    return Gathered(learnt, calibration, held_out, float(parts[0].outcomes.mean()))


def told(update: Callable[[int, str], None]) -> Callable[[int, int], None]:
    """Tells a progress bar of episodes and successes."""
    return lambda episodes, won: update(episodes, f"success {won / episodes:.0%}")
