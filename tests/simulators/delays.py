"""``python -m tests.simulators.delays RUN [EPISODES] [DELAY ...]``: ways to execute chunks, and what delay costs them.

A flow policy plays test seeds in its run's environment, which takes absolute joint positions (so101), and every chunk
but an episode's first is there DELAY control steps after its observation.  Each way of execution plays the same seeds:
success with its Wilson interval (95 %), the largest acceleration that was requested of a joint, and how long an episode
takes.  No supervisor stands between requests and servos.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robot_drivers.chunks import Chunks, OpenLoop, RecedingHorizon, TemporalEnsembling
from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.intervals import wilson
from vla_rl.contract.policy import Policy, RealTimePolicy, State
from vla_rl.evaluation.run import episode_generator
from vla_rl.evaluation.seed_ranges import TEST, held_out
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.real_time_chunking import RealTimeChunking, RealTimeConfig
from vla_rl.recipes.saved import checkpoint_of, env_config_of

STEPS = 8  # actions between two observations that are decided on
SIDE_BY_SIDE = 50  # environments
DELAYS = (0, 1, 3, 5, 8)  # control steps


@dataclass
class Arm:
    """One environment: its queue, what is on its way, and what was requested so far."""

    chunks: Chunks
    waiting: tuple[int, np.ndarray] | None = None  # the step observed, and the chunk
    requested: list[np.ndarray] = field(default_factory=list)

    def receive(self, step: int, delay: int) -> None:
        """Queue the chunk that is there before ``step``; an episode begins with its first chunk, standing still."""
        if self.waiting is not None and (step == 0 or step >= self.waiting[0] + delay):
            observed, chunk = self.waiting
            self.waiting = None
            self.chunks.add(chunk, observed, step)

    def asks(self, step: int) -> bool:
        return self.waiting is None and self.chunks.wants(step)

    def act(self, step: int) -> np.ndarray:
        """The action [D] of ``step``: where none is queued, the last one again."""
        action = self.chunks.action(step)
        self.requested.append(self.requested[-1] if action is None else action)
        return self.requested[-1]

    def acceleration(self, dt: float, last: int) -> float:
        """The largest second difference of a joint's requests until step ``last``, in rad/s²; not of the gripper."""
        positions = np.array(self.requested[: last + 1])[:, :-1]
        return float(np.abs(np.diff(positions, 2, axis=0)).max() / dt**2)


class Fleet:
    """As many arms as environments, one episode each, all with the same delay."""

    def __init__(
        self, env: VecEnv, policy: Policy, horizon: int, make_chunks: Callable[[], Chunks], delay: int
    ) -> None:
        self.env, self.policy, self.horizon, self.delay = env, policy, horizon, delay
        self.make_chunks = make_chunks

    def play(self, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Success bool [E], largest acceleration [E] and length [E] of the episodes of ``seeds`` [E]."""
        obs = self.env.reset(np.arange(len(seeds)), seeds)
        self.arms = [Arm(self.make_chunks(), requested=[start]) for start in np.asarray(obs.state)]
        self.generators = [episode_generator(1, int(seed)) for seed in seeds]
        self.state = self.policy.initial_state(len(seeds))
        length, done, success = np.zeros(len(seeds), int), np.zeros(len(seeds), bool), np.zeros(len(seeds), bool)
        for step in range(self.env.spec.time_limit):
            self._receive(step)
            self._decide(obs, step, ~done)
            self._receive(step)
            moved = self.env.step(np.stack([arm.act(step) for arm in self.arms])[:, None].astype(np.float32))
            obs, length = moved.obs, length + ~done
            done, success = np.asarray(moved.done), np.asarray(moved.success)
            if done.all():
                break
        dt = self.env.spec.control_dt
        largest = [arm.acceleration(dt, last) for arm, last in zip(self.arms, length, strict=True)]
        return success, np.array(largest), length

    def _receive(self, step: int) -> None:
        for arm in self.arms:
            arm.receive(step, self.delay)

    def _decide(self, obs: Observation, step: int, running: np.ndarray) -> None:
        """Ask the policy for the chunks of the arms that want one."""
        rows = np.array([i for i, arm in enumerate(self.arms) if running[i] and arm.asks(step)], int)
        if not len(rows):
            return
        own: State = {name: item[rows] for name, item in self.state.items()}
        if isinstance(self.policy, RealTimePolicy):
            own = self._continue(self.policy, own, [self.arms[i].chunks.consumed(step) for i in rows])
        features = self.policy.encode(obs.select(rows).public())
        out, after = self.policy.act(features, own, "eval", [self.generators[i] for i in rows])
        for name, item in after.items():
            self.state[name][rows] = item
        for i, chunk in zip(rows, np.asarray(out.action, np.float64), strict=True):
            self.arms[i].waiting = step, chunk

    def _continue(self, policy: RealTimePolicy, state: State, consumed: list[int | None]) -> State:
        """Say how far the last chunks are executed; a late one has less of a delay to bridge."""
        known = [i for i, steps in enumerate(consumed) if steps is not None]
        steps = [int(consumed[i] or 0) for i in known]
        return policy.continue_chunk(state, known, steps, [min(self.delay, s, self.horizon - s) for s in steps])


WAYS: dict[str, tuple[Callable[[], Chunks], RealTimeConfig | None]] = {
    "open loop": (partial(OpenLoop, STEPS), None),
    "receding horizon": (partial(RecedingHorizon, STEPS), None),
    "temporal ensembling": (TemporalEnsembling, None),
    "real-time chunking, identity": (partial(RecedingHorizon, STEPS), RealTimeConfig("identity")),
    "real-time chunking, vjp": (partial(RecedingHorizon, STEPS), RealTimeConfig("vjp")),
}


def row(env: VecEnv, base: Any, way: str, delay: int, seeds: np.ndarray) -> str:
    """A line of the table."""
    make_chunks, config = WAYS[way]
    policy = base if config is None else RealTimeChunking(base, config)
    fleet = Fleet(env, policy, base.horizon, make_chunks, delay)
    parts = [fleet.play(part) for part in np.array_split(seeds, len(seeds) // env.num_envs)]
    success, largest, length = (np.concatenate(column) for column in zip(*parts, strict=True))
    low, high = wilson(int(success.sum()), len(success))
    rate = f"{success.mean():.1%} [{low:.1%}, {high:.1%}]"
    return f"| {delay} | {way} | {rate} | {np.median(largest):.0f} | {largest.max():.0f} | {length.mean():.1f} |"


def main(checkpoint: str, episodes: int, delays: tuple[int, ...]) -> None:
    folder, seeds = checkpoint_of(checkpoint), np.array(held_out(TEST, episodes))
    config = env_config_of(folder)
    assert config is not None and episodes % SIDE_BY_SIDE == 0, "a run's checkpoint, and episodes in fifties"
    torch.set_num_threads(1)
    print("| delay | execution | success | acceleration, median | largest | steps |\n|---|---|---|---|---|---|")
    with closing(config.make(SIDE_BY_SIDE)) as env:
        base = load_policy(Path(folder), env.spec)
        for delay in delays:
            for way in WAYS:
                print(row(env, base, way, delay, seeds), flush=True)


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    main(name, int(numbers[0]) if numbers else 100, tuple(map(int, numbers[1:])) or DELAYS)
