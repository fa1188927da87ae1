"""Evaluate a policy: play one episode per seed and record the outcome of each; in batches, or deciding one by one."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vla_rl.contract.env import WORKER, Array, Observation, Observe, VecEnv, on_host
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State, encode_observation
from vla_rl.contract.tracker import HostStep
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.experience.driver import ATTEMPTS, Decision, Driver


@dataclass(frozen=True)
class Outcomes:
    """One entry per seed, in the order of the seeds.

    success bool [n]; cause and family (the kind of task) are texts; length int [n], in low-level actions; returns float
    [n], undiscounted sums of rewards.  ``has_success`` is False for an environment without a notion of success
    (``spec.success`` None): ``success`` is then False throughout and means nothing.
    """

    seeds: np.ndarray
    success: np.ndarray
    cause: tuple[str, ...]
    length: np.ndarray
    family: tuple[str, ...]
    returns: np.ndarray
    has_success: bool = True

    @property
    def score(self) -> Rate | MeanReturn:
        """The headline number: the success rate, or the mean return where the environment has no success."""
        return self.rate if self.has_success else MeanReturn.of(self.returns)

    @property
    def rate(self) -> Rate:
        """Share of successes with its Wilson interval."""
        return Rate.of(self.success)

    @property
    def families(self) -> dict[str, Rate]:
        """Success by kind of task, in the order of their names."""
        kinds = np.array(self.family)
        return {name: Rate.of(self.success[kinds == name]) for name in sorted(set(self.family))}

    def remarks(self, time_limit: float) -> list[str]:
        """What can hardly be meant, in sentences: success at the first action, ends at what is not finite."""
        count, found = len(self.seeds), []
        at_once = int((self.success & (self.length <= 1)).sum())
        if at_once and time_limit > 1:
            found.append(
                f"{at_once} of {count} episodes had succeeded after their first action, so they say little about the "
                "policy; look at the rule of success and at the initial states."
            )
        if diverged := self.cause.count("diverged"):
            found.append(
                f"{diverged} of {count} episodes ended because a reward or an observation was not finite (diverged), "
                "so their returns are cut off; look at the environment."
            )
        return found


@dataclass(frozen=True)
class Episode:
    """One played seed, number ``index`` of the given ones; it has just ended in environment ``env_id``.

    ``length`` is in low-level actions, ``returns`` the undiscounted sum of rewards, ``family`` the kind of task.
    """

    index: int
    env_id: int
    seed: int
    success: bool
    cause: str
    length: int
    family: str
    returns: float


def evaluate(
    env: VecEnv,
    policy: Policy,
    seeds: Sequence[int],
    noise_seed: int = 0,
    view: Callable[[Observation], Observation] = lambda obs: obs,
    report: Callable[[int, int | None], None] = lambda episodes, successes: None,
    watch: Callable[[Decision], None] = lambda decision: None,
) -> Outcomes:
    """The outcomes of :func:`play` in the order of ``seeds``; raises what that raises.

    ``report(episodes, successes)`` is called whenever an episode ends; without a notion of success, with None.
    """
    played: list[Episode] = []
    successes, has_success = 0, env.spec.success is not None
    for episode in play(env, policy, seeds, noise_seed, view, watch=watch):
        played.append(episode)
        successes += episode.success
        report(len(played), successes if has_success else None)
    played.sort(key=lambda episode: episode.index)
    return Outcomes(
        seeds=np.asarray(seeds),
        success=np.array([episode.success for episode in played]),
        cause=tuple(episode.cause for episode in played),
        length=np.array([episode.length for episode in played]),
        family=tuple(episode.family for episode in played),
        returns=np.array([episode.returns for episode in played]),
        has_success=has_success,
    )


def play(
    env: VecEnv,
    policy: Policy,
    seeds: Sequence[int],
    noise_seed: int = 0,
    view: Callable[[Observation], Observation] = lambda obs: obs,
    observe: Observe = "last",
    watch: Callable[[Decision], None] = lambda decision: None,
    announce: Callable[[np.ndarray], None] = lambda playing: None,
) -> Iterator[Episode]:
    """Play every one of ``seeds`` once with ``policy`` in mode "eval"; an ended environment takes the next seed.

    Yields every episode when it has ended, before its environment is reset.  ``view`` changes the observations of the
    policy (blanks the images, for example).  ``announce(playing)``, bool [E], says before each decision which
    environments play, and ``watch`` gets each decision.  An episode that was truncated because its simulator's process
    broke down (cause "worker") is played again.  Raises UserError without a seed, and when a seed broke its simulator
    ``ATTEMPTS`` times.

    Every episode draws its noise from a generator of its own, seeded by ``noise_seed`` and the episode's seed, so an
    outcome does not depend on the number of environments, on their order, or on the other seeds.  That holds exactly
    as far as simulator and network compute an environment equally in batches of any size; matrix products of different
    batch sizes may differ in the last bits (``one_by_one.py`` is exact).
    """
    if not len(seeds):
        raise UserError("no seeds were given, so there is nothing to evaluate; give at least one.")
    generators = [episode_generator(noise_seed, 0)] * env.num_envs
    driver = Driver(env, policy, generators, "eval", observe, view)
    return _Play(driver, seeds, noise_seed).episodes(watch, announce)


def episode_generator(noise_seed: int, episode_seed: int) -> torch.Generator:
    """The generator of an episode's noise."""
    mixed = np.random.SeedSequence([noise_seed, episode_seed]).generate_state(1)
    return torch.Generator().manual_seed(int(mixed[0]))


class _Play:
    """Which environment plays which seed, and what it has earned so far."""

    def __init__(self, driver: Driver, seeds: Sequence[int], noise_seed: int) -> None:
        self.driver, self.seeds, self.noise_seed = driver, np.asarray(seeds), noise_seed
        num_envs = driver.env.num_envs
        self.playing = np.full(num_envs, -1)  # index into seeds, -1 for an environment without one
        self.queue = deque(range(len(self.seeds)))
        self.attempts = np.zeros(len(self.seeds), int)
        self.length = np.zeros(num_envs, np.int64)
        self.rewards: list[list[float]] = [[] for _ in range(num_envs)]
        self.family = [""] * num_envs

    def episodes(self, watch: Callable[[Decision], None], announce: Callable[[np.ndarray], None]) -> Iterator[Episode]:
        self._refill(np.arange(self.driver.env.num_envs))
        while (self.playing >= 0).any():
            announce(self.playing >= 0)
            decision = self.driver.step()
            watch(decision)
            ended = self._count(decision.host)
            for env_id in ended:
                if decision.step.cause[env_id] == WORKER:
                    self._again(env_id)
                else:
                    yield self._episode(decision, env_id)
            self._refill(ended)

    def _count(self, step: HostStep) -> np.ndarray:
        """Add up lengths and rewards; returns the ids of the environments whose episode ended."""
        active = self.playing >= 0
        self.length[active] += step.valid.sum(1)[active]
        for env_id in np.flatnonzero(active):
            self.rewards[env_id] += step.reward[env_id].tolist()
        return np.flatnonzero(step.done & active)

    def _episode(self, decision: Decision, env_id: int) -> Episode:
        index = int(self.playing[env_id])
        return Episode(
            index=index,
            env_id=int(env_id),
            seed=int(self.seeds[index]),
            success=bool(decision.host.success[env_id]),
            cause=decision.step.cause[env_id],
            length=int(self.length[env_id]),
            family=self.family[env_id],
            returns=math.fsum(self.rewards[env_id]),  # exact, however the episode was cut into chunks
        )

    def _again(self, env_id: int) -> None:
        index = int(self.playing[env_id])
        self.attempts[index] += 1
        if self.attempts[index] == ATTEMPTS:
            raise UserError(
                f"the simulator of {self.driver.env.spec.name!r} broke down {ATTEMPTS} times while seed "
                f"{int(self.seeds[index])} was played, so the evaluation has no outcome for it; see its messages above."
            )
        self.queue.appendleft(index)

    def _refill(self, env_ids: Array) -> None:
        """Give ``env_ids`` their next seeds.  At the start all are reset, surplus ones with the first seed."""
        self.playing[env_ids] = [self.queue.popleft() if self.queue else -1 for _ in env_ids]
        playing = env_ids[self.playing[env_ids] >= 0]
        reset = env_ids if self.driver.obs is None else playing
        for env_id in playing:
            self.driver.generator[env_id] = episode_generator(self.noise_seed, int(self.seeds[self.playing[env_id]]))
            self.length[env_id], self.rewards[env_id] = 0, []
        obs = self.driver.reset(reset, self.seeds[np.maximum(self.playing[reset], 0)])
        for env_id in playing:
            self.family[env_id] = self.driver.env.spec.family(int(obs.task[env_id]))


class OneByOne:
    """``policy`` in batches of one, as on a robot.

    Matrix products of different batch sizes differ in the last bits, and contacts make whole episodes of such bits.  So
    in batches an outcome depends on how many environments run side by side; decided one by one it does not.  It costs
    the speed of batches, and measures what one decision takes.

    Environments that :meth:`announce` does not name idle: nothing is computed for them.
    """

    def __init__(self, policy: Policy, num_envs: int) -> None:
        self.policy = policy
        self.version = policy.version
        self.reads_privileged = bool(getattr(policy, "reads_privileged", False))
        self._playing = np.ones(num_envs, bool)
        self._seconds: list[list[float]] = [[] for _ in range(num_envs)]

    def announce(self, playing: np.ndarray) -> None:
        """Decide for the environments in ``playing`` (bool [E]) alone from now on."""
        self._playing = playing

    def seconds(self, env_id: int) -> list[float]:
        """Wall time of every decision of environment ``env_id`` since its reset: encoder and policy."""
        return self._seconds[env_id]

    def encode(self, obs: Observation) -> Features:
        """The observation itself; :meth:`act` encodes."""
        return obs.arrays()

    def initial_state(self, num_envs: int) -> State:
        return self.policy.initial_state(num_envs)

    def reset_state(self, state: State, env_ids: Array) -> State:
        for env_id in env_ids:
            self._seconds[env_id] = []
        return self.policy.reset_state(state, env_ids)

    def act(self, features: Features, state: State, mode: Mode, generator: Sequence[Any]) -> tuple[ActionOut, State]:
        """Actions of the announced environments, 0 for the others; ``generator`` has one per environment."""
        obs = Observation.of_arrays(features)
        chunks: dict[int, np.ndarray] = {}
        rows = {name: [item[i : i + 1] for i in range(len(item))] for name, item in state.items()}
        for env_id in np.flatnonzero(self._playing).tolist():
            start = time.perf_counter()
            own, generators = {name: row[env_id] for name, row in rows.items()}, [generator[env_id]]
            encoded, own = encode_observation(self.policy, obs.select(slice(env_id, env_id + 1)), own, generators)
            out, own = self.policy.act(encoded, own, mode, generators)
            chunks[env_id] = on_host(out.action)[0]  # a GPU has finished when the action is here
            self._seconds[env_id].append(time.perf_counter() - start)
            for name, row in rows.items():
                row[env_id] = own[name]
        action = _side_by_side(chunks, len(obs.time))
        after = {name: _joined(row) for name, row in rows.items()}
        return ActionOut(action, action, np.zeros(len(action), np.float32), policy_version=self.version), after


def _side_by_side(chunks: dict[int, np.ndarray], num_envs: int) -> np.ndarray:
    shapes = {chunk.shape for chunk in chunks.values()}
    if len(shapes) != 1:
        raise ContractError(
            f"the policy chose chunks of the shapes {sorted(shapes)} at the same time, so they cannot be executed "
            "together; let all have one length, or evaluate with --num-envs 1."
        )
    action = np.zeros((num_envs, *shapes.pop()), np.float32)
    for env_id, chunk in chunks.items():
        action[env_id] = chunk
    return action


def _joined(rows: Sequence[Array]) -> Array:
    """Arrays or tensors [1,...] as one [E,...]."""
    return np.concatenate(rows) if isinstance(rows[0], np.ndarray) else torch.cat(list(rows))
