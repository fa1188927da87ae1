"""Where the simulator knows the named object to be, beside what its cameras show: labels that only a simulator has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.driver import Driver
from vla_rl.experience.expert import ExpertPolicy

TARGET = "privileged/target"  # centre of the object that the instruction names


@dataclass(frozen=True)
class Sightings:
    """``N`` pictures of an object whose place is known.

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
    def of(cls, obs: Observation, rows: np.ndarray) -> Sightings:
        """What ``rows`` (bool [E]) of ``obs`` show."""
        pictures = np.concatenate([obs.images[name][rows] for name in sorted(obs.images)], -1)
        return cls(pictures, obs.task[rows], obs.extras[TARGET][rows])

    @classmethod
    def joined(cls, parts: Sequence[Sightings]) -> Sightings:
        """``parts`` one after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in _NAMES))


_NAMES = ("pictures", "tasks", "positions")


def watch(
    env: VecEnv,
    act: Callable[[Observation], np.ndarray],
    seeds: Sequence[int],
    clumsy: float,
    random: np.random.Generator,
    report: Callable[[int], None] = lambda episodes: None,
) -> Sightings:
    """Every frame of one episode per seed, the first one included.

    ``act`` (obs -> [E,H,D], a scripted expert: it sees what is privileged) plays, so that objects are lifted, carried
    and hidden by the gripper; a share ``clumsy`` of its decisions is random, one action held for the chunk, so that
    they are missed, pushed and dropped, too.

    Raises UserError for an environment that does not know where the named object is.
    """
    require_target(env)
    parts: list[Sightings] = []
    for start in range(0, len(seeds), env.num_envs):
        batch = list(seeds[start : start + env.num_envs])
        parts += _watched(env, act, batch, clumsy, random)
        report(start + len(batch))
    return Sightings.joined(parts)


def _watched(
    env: VecEnv,
    act: Callable[[Observation], np.ndarray],
    seeds: list[int],
    clumsy: float,
    random: np.random.Generator,
) -> list[Sightings]:
    """One batch; rows beyond ``seeds`` replay the last seed and are not kept."""
    kept = np.arange(env.num_envs) < len(seeds)
    low, high = (np.asarray(bound, np.float32) for bound in (env.spec.action.low, env.spec.action.high))

    def act_randomly_at_times(obs: Observation) -> np.ndarray:
        chunk = np.array(act(obs))
        lost = random.random(len(chunk)) < clumsy
        chunk[lost] = random.uniform(low, high, (int(lost.sum()), 1, len(chunk[0, 0])))
        return chunk

    driver = Driver(env, ExpertPolicy(act_randomly_at_times), None, observe="all")
    parts = [Sightings.of(driver.start(seeds), kept)]
    for step in (decision.step for decision in driver.until_done()):
        parts += [Sightings.of(frame, kept & step.valid[:, h]) for h, frame in enumerate(step.frames)]
    return parts


def replayed_positions(env: VecEnv, seeds: Sequence[int], actions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Where the named object was in recorded episodes: for each of them float32 [T+1,3] metres, the start first.

    A simulator repeats an episode from its seed ``seeds[i]`` and what was executed, ``actions[i]`` [T,D], so recordings
    need not hold what only a simulator knows.  ``env`` may do without pictures.

    Raises UserError for an environment that does not know where the named object is and for episodes without a seed,
    ContractError for one that ends before its last action: it was recorded in another environment.
    """
    require_target(env)
    if len(seeds) and min(seeds) < 0:
        raise UserError(
            f"episode {int(np.argmin(seeds))} has no seed, so it cannot be repeated to learn where its objects were; "
            "leave it out, or record it in a simulator."
        )
    found: list[np.ndarray] = []
    for start in range(0, len(seeds), env.num_envs):
        part = slice(start, start + env.num_envs)
        found += _replayed(env, list(seeds[part]), actions[part])
    return found


def _replayed(env: VecEnv, seeds: list[int], actions: Sequence[np.ndarray]) -> list[np.ndarray]:
    rows, lengths = env.num_envs, np.array([len(item) for item in actions])
    padded = np.zeros((rows, int(lengths.max()), env.spec.action_dim), np.float32)
    for row, item in enumerate(actions):
        padded[row, : len(item)] = item
    starts = range(0, padded.shape[1], env.spec.max_chunk)
    chunks = iter([padded[:, first : first + env.spec.max_chunk] for first in starts])
    driver = Driver(env, ExpertPolicy(lambda obs: next(chunks)), None, observe="all")
    places, valid = [driver.start(seeds).extras[TARGET]], []
    for step in (driver.step().step for _ in starts):
        places += [frame.extras[TARGET] for frame in step.frames]
        valid.append(step.valid[: len(seeds)])
    lasted = np.concatenate(valid, 1).sum(1)
    for seed, length, steps in zip(seeds, lengths, lasted, strict=True):
        if steps < length:
            raise ContractError(
                f"the episode of seed {seed} ends after {steps} of its {length} actions when it is repeated, so where "
                f"its objects were is unknown; repeat it in the environment and with the options of its recording."
            )
    path = np.stack(places, 1)
    return [path[row, : length + 1].copy() for row, length in enumerate(lengths)]


def require_target(env: VecEnv) -> None:
    """Raise UserError for an environment that does not know where the object of the instruction is."""
    if TARGET not in env.spec.extras:
        raise UserError(
            f"environment {env.spec.name!r} has no {TARGET!r}, so it cannot say where an object is; take a simulator "
            "that knows."
        )
