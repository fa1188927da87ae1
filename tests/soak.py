"""``make soak``: simulator processes are killed and stopped at random while PPO trains in their environments.

The counting environment is behind isolation, and then behind a socket, whose connections are cut as well.  Its episodes
are audited: every seed that was begun is played to its end, is running, or was truncated because its worker failed;
anything else is lost.  Writes ``runs/soak/summary.json``: totals, and each kind with the memory of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from sims.catalog import make
from sims.isolated import IsolatedEnv
from sims.isolation.remote import RemoteWorker, Server
from sims.isolation.supervised import LIMIT
from sims.toy.counting import episode_length, expected_reward
from tests.worker_pids import worker_pids
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Rollout
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy

HORIZON = 3
# Seconds for an answer and for a start, after which a worker counts as hung: what one that was stopped costs.
DEADLINES: Mapping[str, float] = {"deadline_s": 1.5, "start_deadline_s": 10.0}
SLACK_FILES = 20  # those of workers and connections that are just beginning or ending
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


@dataclass
class Sample:
    """What this process holds after so many kills."""

    kills: int
    memory_mb: float
    open_files: int

    @classmethod
    def now(cls, kills: int) -> Sample:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(kills, round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1), len(os.listdir("/proc/self/fd")))


def is_flat(samples: Sequence[Sample]) -> bool:
    """Whether memory and open files are no more at the end than after the first tenth of the kills."""
    first, last = samples[0], samples[-1]
    return last.memory_mb <= 1.1 * first.memory_mb and last.open_files <= first.open_files + SLACK_FILES


# -- trouble -----------------------------------------------------------------------------------------------------------


def kill(env: IsolatedEnv, rng: random.Random) -> bool:
    """Kill some worker process, as the kernel does when memory runs out; False when there is none."""
    return _signal(rng, signal.SIGKILL)


def stop(env: IsolatedEnv, rng: random.Random) -> bool:
    """Let some worker process hang; False when there is none."""
    return _signal(rng, signal.SIGSTOP)


def cut(env: IsolatedEnv, rng: random.Random) -> bool:
    """Cut the connection to some remote worker; False when it has none."""
    stream = cast(RemoteWorker, rng.choice(env.workers).link)._stream
    with suppress(OSError):  # it was closed
        if stream is not None:
            stream.socket.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _signal(rng: random.Random, number: signal.Signals) -> bool:
    pids = sorted(worker_pids())
    with suppress(ProcessLookupError):
        if pids:
            os.kill(rng.choice(pids), number)
            return True
    return False


class Trouble(threading.Thread):
    """Strikes the workers of ``env`` at random moments in random ``ways``, until there were ``wanted`` kills."""

    def __init__(self, env: IsolatedEnv, ways: Sequence[Way], wanted: int, seed: int) -> None:
        super().__init__(name="trouble", daemon=True)
        self.env, self.ways, self.wanted, self.random = env, ways, wanted, random.Random(seed)
        self.kills, self.hangs = 0, 0
        self.over = threading.Event()

    def run(self) -> None:
        while self.kills < self.wanted and not self.over.is_set():
            # A worker that never completes a step is an error by design: leave it a chance.
            if all(worker.failures < LIMIT - 2 for worker in self.env.workers):
                way = self.random.choice(self.ways)
                hit = way(self.env, self.random)
                self.kills, self.hangs = self.kills + hit, self.hangs + (hit and way is stop)
            self.over.wait(self.random.expovariate(1 / 0.15))


@contextmanager
def isolated(**options: Any) -> Iterator[IsolatedEnv]:
    """The counting environment in processes of this machine."""
    with closing(make("isolated", env="counting", **options)) as env:
        yield env


@contextmanager
def remote(**options: Any) -> Iterator[IsolatedEnv]:
    """The same behind a socket, served by this process."""
    with closing(Server("counting", 0)) as server:
        threading.Thread(target=server.run, daemon=True).start()
        with closing(make("remote", address=f"127.0.0.1:{server.port}", **options)) as env:
            yield env


Way: TypeAlias = Callable[[IsolatedEnv, random.Random], bool]
Kind: TypeAlias = Callable[..., AbstractContextManager[IsolatedEnv]]
KINDS: dict[str, tuple[Kind, Sequence[Way]]] = {
    "isolated": (isolated, (*[kill] * 9, stop)),
    "remote": (remote, (*[kill] * 5, *[cut] * 4, stop)),
}


# -- training ----------------------------------------------------------------------------------------------------------


def soak(kind: str, kills: int, seed: int = 0, deadlines: Mapping[str, float] = DEADLINES) -> dict[str, Any]:
    """Train in an environment of ``KINDS`` until there were ``kills`` kills, hangs included; the summary."""
    warnings.filterwarnings("ignore", ".*worker (process|at) ", UserWarning)
    start, (build, ways) = time.monotonic(), KINDS[kind]
    with build(num_envs=8, workers=4, **deadlines) as env:
        source, learner = training(env, seed)
        audit, samples, updates = Audit(), [Sample.now(0)], 0
        trouble = Trouble(env, ways, kills, seed)
        trouble.start()
        try:
            while trouble.is_alive() or updates % 10:
                rollout = source.next()
                audit.add(rollout)
                learner.update(rollout)
                updates += 1
                if trouble.kills >= samples[-1].kills + kills / 10:
                    samples.append(Sample.now(trouble.kills))
        finally:
            trouble.over.set()
            trouble.join()
        for _ in range(2):  # a failure in a reset shows at the next step
            audit.add(source.next())
        samples.append(Sample.now(trouble.kills))
        return {
            "kills": trouble.kills,
            "hangs": trouble.hangs,
            "restarts": env.restarts,
            "episodes": len(audit.whole),
            "truncated_by_worker": env.truncated_by_worker,
            "truncated_in_rollouts": len(audit.truncated),
            "lost": audit.lost(source) + abs(env.truncated_by_worker - len(audit.truncated)),
            "wrong": audit.wrong[:10],
            "updates": updates,
            "finite": all(bool(torch.isfinite(item).all()) for item in learner.parameters.values()),
            "flat": is_flat(samples[1:]),
            "held": [asdict(sample) for sample in samples],
            "seconds": round(time.monotonic() - start, 1),
        }


def training(env: IsolatedEnv, seed: int) -> tuple[RolloutSource, PPO]:
    """A Gaussian policy's rollouts and its learner."""
    torch.manual_seed(seed)
    policy = GaussianPolicy(env.spec, config=GaussianConfig(HORIZON, width=32))
    generator = torch.Generator().manual_seed(seed)
    source = RolloutSource(env, policy, 16, SeedStream(0, 10**9), generator)
    critic = ValueCritic({"state": env.spec.state.shape[0], "time": 1}, width=32)
    return source, PPO(policy, policy.trainable(), critic, PPOConfig(epochs=1, minibatch=64), generator)


def main() -> None:
    """Run both kinds, print and write the summary; fails when anything was lost or kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="of each kind of isolation")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = {kind: soak(kind, given.kills, given.seed) for kind in KINDS}
    totals = ("kills", "restarts", "episodes", "truncated_by_worker", "lost")
    summary = {name: sum(one[name] for one in found.values()) for name in totals} | found
    SUMMARY.parent.mkdir(parents=True, exist_ok=True)
    SUMMARY.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=2))
    if summary["lost"] or not all(one["finite"] and one["flat"] for one in found.values()):
        raise SystemExit(f"{summary['lost']} episodes were lost, or memory grew, or weights are not finite: see above")


if __name__ == "__main__":
    main()
