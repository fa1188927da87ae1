"""``python -m tests.benchmarks.stable_baselines TASK [SEED ...]``: Stable-Baselines3's PPO on environments of ours.

TASK is one of ``STUDIES``.  For every training seed it prints mean return and success on the same test seeds before and
after training, each with its 95 % interval.  Nothing is chosen by these test seeds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO

from sims.as_sb3 import make_vec
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.plots import interval, number
from vla_rl.evaluation.stats import MeanReturn, Rate

SEEDS = (1, 2, 3)
EPISODES = 256


@dataclass(frozen=True)
class Study:
    """What is trained on what: ``options`` of the environment, ``ppo`` of Stable-Baselines3's PPO."""

    id: str
    policy: str
    num_envs: int
    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    ppo: dict[str, Any] = field(default_factory=dict)


STUDIES = {
    "point_mass": Study("vla_rl/point_mass-v0", "MlpPolicy", 16, 60_000, ppo={"n_steps": 64, "batch_size": 256}),
    "lift": Study(
        "vla_rl/lift-v0",
        "MultiInputPolicy",
        32,
        250_000,
        {
            "render": False,
            "threads": 1,
            "privileged": True,
            "potential": "sims.mujoco.tasks.lift:potential",
        },
        {"n_steps": 64, "batch_size": 512, "learning_rate": 5e-4, "gamma": 0.98},
    ),
}


def train(study: Study, seed: int) -> tuple[list[str], list[str], float]:
    """Return and success of the untrained and of the trained policy, and the seconds of training."""
    torch.set_num_threads(1)
    first = seed_ranges.training_seeds(seed, "reinforcement").start
    envs = make_vec(study.id, study.num_envs, seed=first, **study.options)
    model = PPO(study.policy, envs, seed=seed, device="cpu", **study.ppo)
    before, start = measure(study, model), time.perf_counter()
    model.learn(study.steps)
    seconds = time.perf_counter() - start
    after = measure(study, model)
    envs.close()
    return before, after, seconds


def measure(study: Study, model: PPO) -> list[str]:
    """Return and success of the most likely actions on the test seeds."""
    envs = gymnasium.make_vec(study.id, EPISODES, **study.options)
    obs, _ = envs.reset(seed=seed_ranges.TEST.start)
    returns, success = np.zeros(EPISODES), np.zeros(EPISODES, bool)
    running = np.ones(EPISODES, bool)
    while running.any():
        action, _ = model.predict(obs, deterministic=True)
        obs, reward, terminated, truncated, infos = envs.step(action)
        returns += np.where(running, reward, 0.0)
        success |= infos.get("is_success", np.zeros(EPISODES, bool)) & running
        running &= ~(terminated | truncated)
    envs.close()
    earned, rate = MeanReturn.of(returns), Rate.of(success)
    return [
        f"{number(earned.mean)} {interval(earned.low, earned.high)}",
        f"{number(rate.success, True)} {interval(rate.low, rate.high, True)}",
    ]


def main() -> None:
    """Train with each seed and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("seeds", type=int, nargs="*", default=SEEDS)
    given = parser.parse_args()
    for seed in given.seeds:
        study = STUDIES[given.task]
        before, after, seconds = train(study, seed)
        print(f"{given.task} seed {seed}, {study.steps:,} steps, {seconds:.0f} s", flush=True)
        for name, first, last in zip(("return", "success"), before, after, strict=True):
            print(f"  {name}: {first} -> {last}", flush=True)


if __name__ == "__main__":
    main()
