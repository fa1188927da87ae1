"""Frames with the true position of the named object: labels that only a simulator has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.collect import ExpertPolicy
from vla_rl.experience.driver import Driver

TARGET = "privileged/target"  # extra: centre of the object that the instruction names


@dataclass(frozen=True)
class LocatedFrames:
    """``N`` frames with the true position of the named object.

    pictures   uint8 [N,h,w,c]  cameras in the order of their names, side by side in ``c``
    tasks      int64 [N]        index into the environment's texts
    positions  float32 [N,3]    centre of the named object, metres, as in ``privileged/target``
    """

    pictures: np.ndarray
    tasks: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.tasks)

    @classmethod
    def of(cls, obs: Observation, index: np.ndarray) -> LocatedFrames:
        """The frames of the environments ``index`` (bool [E]) in ``obs``."""
        pictures = np.concatenate([obs.images[name][index] for name in sorted(obs.images)], -1)
        return cls(pictures, obs.task[index], obs.extras[TARGET][index])

    @classmethod
    def concatenate(cls, parts: Sequence[LocatedFrames]) -> LocatedFrames:
        """All of ``parts``, in order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


_FIELDS = ("pictures", "tasks", "positions")


def collect_located_frames(
    env: VecEnv,
    act: Callable[[Observation], np.ndarray],
    seeds: Sequence[int],
    random_action_prob: float,
    rng: np.random.Generator,
    progress: Callable[[int], None] = lambda episodes: None,
) -> LocatedFrames:
    """Every frame of one episode per seed, the initial one included.

    ``act`` (obs -> [E,H,D]) is a scripted expert, which may read privileged extras; it lifts, carries and occludes
    objects.  A share ``random_action_prob`` of its decisions is replaced by one random action held for the chunk, so
    that objects are also missed, pushed and dropped.

    Raises UserError for an environment without ``privileged/target``.
    """
    require_target(env)
    parts: list[LocatedFrames] = []
    for start in range(0, len(seeds), env.num_envs):
        batch = list(seeds[start : start + env.num_envs])
        parts += _collect_batch(env, act, batch, random_action_prob, rng)
        progress(start + len(batch))
    return LocatedFrames.concatenate(parts)


def _collect_batch(
    env: VecEnv,
    act: Callable[[Observation], np.ndarray],
    seeds: list[int],
    random_action_prob: float,
    rng: np.random.Generator,
) -> list[LocatedFrames]:
    """One batch; surplus environments play the last seed, and their frames are dropped."""
    has_seed = np.arange(env.num_envs) < len(seeds)
    low, high = (np.asarray(bound, np.float32) for bound in (env.spec.action.low, env.spec.action.high))

    def act_partly_at_random(obs: Observation) -> np.ndarray:
        chunk = np.array(act(obs))
        randomized = rng.random(len(chunk)) < random_action_prob
        chunk[randomized] = rng.uniform(low, high, (int(randomized.sum()), 1, len(chunk[0, 0])))
        return chunk

    driver = Driver(env, ExpertPolicy(act_partly_at_random), None, observe="all")
    parts = [LocatedFrames.of(driver.start(seeds), has_seed)]
    for step in (decision.step for decision in driver.until_done()):
        parts += [LocatedFrames.of(frame, has_seed & step.valid[:, h]) for h, frame in enumerate(step.frames)]
    return parts


def replayed_positions(env: VecEnv, seeds: Sequence[int], actions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Positions of the named object in recorded episodes: for each float32 [T+1,3] metres, the initial one first.

    The simulator replays each episode from its seed ``seeds[i]`` and executed actions ``actions[i]`` [T,D], so
    recordings need not contain privileged extras.  ``env`` needs no cameras.

    Raises UserError for an environment without ``privileged/target`` and for episodes without a seed, ContractError for
    an episode that ends before its last action, which was therefore recorded in another environment.
    """
    require_target(env)
    if len(seeds) and min(seeds) < 0:
        raise UserError(
            f"episode {int(np.argmin(seeds))} has no seed, so it cannot be replayed to obtain its object positions; "
            "leave it out, or record it in a simulator."
        )
    found: list[np.ndarray] = []
    for start in range(0, len(seeds), env.num_envs):
        part = slice(start, start + env.num_envs)
        found += _replayed(env, list(seeds[part]), actions[part])
    return found


def _replayed(env: VecEnv, seeds: list[int], actions: Sequence[np.ndarray]) -> list[np.ndarray]:
    num_envs, lengths = env.num_envs, np.array([len(item) for item in actions])
    padded = np.zeros((num_envs, int(lengths.max()), env.spec.action_dim), np.float32)
    for i, item in enumerate(actions):
        padded[i, : len(item)] = item
    starts = range(0, padded.shape[1], env.spec.max_chunk)
    chunks = iter([padded[:, first : first + env.spec.max_chunk] for first in starts])
    driver = Driver(env, ExpertPolicy(lambda obs: next(chunks)), None, observe="all")
    positions, valid = [driver.start(seeds).extras[TARGET]], []
    for step in (driver.step().step for _ in starts):
        positions += [frame.extras[TARGET] for frame in step.frames]
        valid.append(step.valid[: len(seeds)])
    executed = np.concatenate(valid, 1).sum(1)
    for seed, length, steps in zip(seeds, lengths, executed, strict=True):
        if steps < length:
            raise ContractError(
                f"the episode of seed {seed} ends after {steps} of its {length} actions when it is replayed, so its "
                f"object positions are unknown; replay it in the environment and with the options of its recording."
            )
    path = np.stack(positions, 1)
    return [path[i, : length + 1].copy() for i, length in enumerate(lengths)]


def require_target(env: VecEnv) -> None:
    """Raise UserError for an environment that does not report the position of the named object."""
    if TARGET not in env.spec.extras:
        raise UserError(
            f"environment {env.spec.name!r} has no {TARGET!r}, so object positions are unknown; use a simulator with "
            "that extra."
        )
