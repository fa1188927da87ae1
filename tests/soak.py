"""``make soak``: workers of an isolated environment are killed and stopped at random while PPO trains.

The counting environment's episodes are audited: every seed that was begun is played to its end, is running, or was
truncated because its worker failed; anything else is lost.  Writes ``runs/soak/summary.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
import warnings
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sims.catalog import make
from sims.isolation.supervised import LIMIT, SupervisedWorker
from sims.toy.counting import episode_length, expected_reward
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Rollout
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.gaussian import GaussianConfig, GaussianPolicy

HANG_SHARE, DEADLINE_S, HORIZON = 0.2, 1.5, 3
SUMMARY = Path("runs/soak/summary.json")


@dataclass
class Audit:
    """What became of every episode, from the rollouts alone."""

    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # env_id -> seed, actions so far
    whole: list[int] = field(default_factory=list)  # seeds of episodes that were played to their end
    truncated: list[int] = field(default_factory=list)  # by a worker's failure
    wrong: list[str] = field(default_factory=list)  # what cannot be, in words

    def add(self, rollout: Rollout) -> None:
        """Follow every decision of ``rollout``."""
        for env_id in range(rollout.seeds.shape[1]):
            for t in range(len(rollout.reward)):
                self._decision(env_id, rollout, t)

    def lost(self, source: RolloutSource) -> int:
        """Episodes that were begun and that nobody has seen, or seen twice, and whatever else was wrong."""
        seen, playing = [*self.whole, *self.truncated], {int(seed) for seed in source.driver.seeds}
        unseen = set(range(source.seeds.drawn)) - set(seen) - playing
        twice = len(seen) - len(set(seen)) + len(set(seen) & playing)
        left = {seed for seed, _ in self.running.values()} - playing
        return len(self.wrong) + len(unseen) + twice + len(left)

    def _decision(self, env_id: int, rollout: Rollout, t: int) -> None:
        seed, valid = int(rollout.seeds[t, env_id]), rollout.valid[t, env_id]
        known, steps = self.running.get(env_id, (seed, 0))
        if known != seed:
            self.wrong.append(f"environment {env_id} left seed {known} at action {steps}")
            steps = 0
        count, length = int(valid.sum()), int(episode_length(np.array(seed)))
        rewards = rollout.reward[t, env_id][valid].tolist()
        if rewards != expected_reward(np.arange(steps + 1, steps + count + 1)).tolist():
            self.wrong.append(f"seed {seed} earned {rewards} after {steps} actions")
        terminated, truncated = bool(rollout.terminated[t, env_id]), bool(rollout.truncated[t, env_id])
        self.running[env_id] = seed, steps + count
        if not (terminated or truncated):
            return
        del self.running[env_id]
        if count == 0 and truncated:
            self.truncated.append(seed)
            return
        self.whole.append(seed)
        if steps + count != length or terminated != (seed % 2 == 0):
            self.wrong.append(f"seed {seed} ended after {steps + count} of {length} actions")


class Trouble(threading.Thread):
    """Kills or stops one worker after the other, at random moments, until there were ``kills``."""

    def __init__(self, workers: list[SupervisedWorker], kills: int, seed: int) -> None:
        super().__init__(name="trouble", daemon=True)
        self.workers, self.wanted, self.random = workers, kills, random.Random(seed)
        self.kills = self.hangs = 0
        self.over = threading.Event()

    def run(self) -> None:
        while self.kills + self.hangs < self.wanted and not self.over.is_set():
            worker, link = (chosen := self.random.choice(self.workers)), chosen.link
            # A worker that never completes a step is an error by design: leave it a chance.
            if worker.failures < LIMIT - 2 and link.running:
                if self.random.random() < HANG_SHARE:
                    os.kill(link.pid, signal.SIGSTOP)
                    self.hangs += 1
                else:
                    link.kill()
                    self.kills += 1
            self.over.wait(self.random.expovariate(1 / 0.15))


def soak(kills: int, seed: int = 0, num_envs: int = 8, workers: int = 4) -> dict[str, Any]:
    """Train until there were ``kills`` kills and hangs; the summary, with the memory of this process in MB."""
    warnings.filterwarnings("ignore", "worker process", UserWarning)
    start = time.monotonic()
    env = make("isolated", num_envs=num_envs, env="counting", workers=workers, deadline_s=DEADLINE_S)
    with closing(env):
        torch.manual_seed(seed)
        policy = GaussianPolicy(env.spec, config=GaussianConfig(HORIZON, width=32))
        generator = torch.Generator().manual_seed(seed)
        seeds = SeedStream(0, 10**9)
        source = RolloutSource(env, policy, 16, seeds, generator)
        critic = ValueCritic({"state": env.spec.state.shape[0], "time": 1}, width=32)
        learner = PPO(policy, policy.trainable(), critic, PPOConfig(epochs=1, minibatch=64), generator)
        audit, memory, updates = Audit(), [], 0
        trouble = Trouble(list(env.workers), kills, seed)
        trouble.start()
        try:
            while trouble.is_alive() or updates % 10:
                rollout = source.next()
                audit.add(rollout)
                learner.update(rollout)
                updates += 1
                memory.append(resident_mb())
        finally:
            trouble.over.set()
            trouble.join()
        for _ in range(2):  # a failure in a reset shows at the next step
            audit.add(source.next())
        return {
            "kills": trouble.kills + trouble.hangs,
            "hangs": trouble.hangs,
            "restarts": env.restarts,
            "episodes": len(audit.whole),
            "truncated_by_worker": env.truncated_by_worker,
            "truncated_in_rollouts": len(audit.truncated),
            "lost": audit.lost(source) + abs(env.truncated_by_worker - len(audit.truncated)),
            "wrong": audit.wrong[:10],
            "updates": updates,
            "finite": all(bool(torch.isfinite(item).all()) for item in policy.parameters()),
            "memory_mb": [round(memory[len(memory) * part // 5], 1) for part in range(1, 5)] + [round(memory[-1], 1)],
            "open_files": len(os.listdir("/proc/self/fd")),
            "seconds": round(time.monotonic() - start, 1),
        }


def resident_mb() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Run, print and write the summary; fails when anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    summary = soak(given.kills, given.seed)
    SUMMARY.parent.mkdir(parents=True, exist_ok=True)
    SUMMARY.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=2))
    if summary["lost"] or not summary["finite"]:
        raise SystemExit(f"{summary['lost']} episodes were lost: {summary['wrong']}")


if __name__ == "__main__":
    main()
