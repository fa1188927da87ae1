"""Record whole episodes: the successes of a scripted expert, or every episode of a policy."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vla_rl.contract.env import PRIVILEGED, WORKER, Array, EnvSpec, Observation, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State
from vla_rl.contract.task import RANDOMIZATION
from vla_rl.experience.demonstrations import Demonstrations, Trajectories, concatenated
from vla_rl.experience.driver import ATTEMPTS, Decision, Driver


def collect_demonstrations(
    env: VecEnv,
    expert: Callable[[Observation], np.ndarray],
    seeds: list[int],
    report: Callable[[int], None] = lambda episodes: None,
) -> Demonstrations:
    """Play one episode per seed with ``expert(obs) -> [E,1,D]``, one control step at a time; keep the successes."""
    return Demonstrations.joined(list(iter_demonstrations(env, expert, seeds, report)))


def iter_demonstrations(
    env: VecEnv,
    expert: Callable[[Observation], np.ndarray],
    seeds: list[int],
    report: Callable[[int], None] = lambda episodes: None,
) -> Iterator[Demonstrations]:
    """The episodes of :func:`collect_demonstrations` one by one, as soon as all environments have ended theirs.

    ``report(episodes)`` is called after each batch of environments.  Raises UserError at the end if none succeeded.
    """
    found = False
    driver = Driver(env, ExpertPolicy(expert, horizon=1), None, observe="all")
    for episode in iter_episodes(driver, seeds, lambda episodes, successes: report(episodes)):
        if episode.extras["next.success"][-1]:
            found = True
            yield episode
    if not found:
        raise UserError(
            f"none of {len(seeds)} demonstrations of {env.spec.name!r} succeeded, so there is nothing to imitate; look "
            "at the expert."
        )


def iter_episodes(
    driver: Driver, seeds: Sequence[int], report: Callable[[int, int], None] = lambda episodes, successes: None
) -> Iterator[Demonstrations]:
    """One episode per seed, successful or not, one by one, as soon as all environments have ended theirs.

    ``driver`` observes "all".  ``report(episodes, successes)`` is called after each batch of environments.
    """
    played = successes = 0
    for decisions, whole in _batches(driver, seeds):
        played += len(whole)
        for env_id in whole:
            successes += bool(decisions[-1].step.success[env_id])
            yield _recorded(decisions, env_id, driver.env.spec)
        report(played, successes)


def _columns(seen: Observation, spec: EnvSpec) -> dict[str, np.ndarray]:
    """What the environment shows besides, ``extras``: "observation.NAME", as LeRobot calls "environment_state".

    And "randomization.NAME" float32 [n] of the parameters that it records, if it does.
    """
    public = {f"observation.{name}": on_host(seen.extras[name]) for name in spec.extras if _is_public(name)}
    if RANDOMIZATION not in spec.extras:
        return public
    values = on_host(seen.extras[RANDOMIZATION])
    return public | {f"randomization.{name}": values[:, i] for i, name in enumerate(spec.extras[RANDOMIZATION].names)}


def _is_public(name: str) -> bool:
    return not name.startswith(PRIVILEGED)


def _recorded(decisions: Sequence[Decision], env_id: int, spec: EnvSpec) -> Demonstrations:
    """The episode that environment ``env_id`` played in ``decisions``, one entry for each action."""
    row, steps = slice(env_id, env_id + 1), [decision.step for decision in decisions]
    executed = [(step, i) for step in steps for i in range(len(step.frames)) if step.valid[env_id, i]]
    frames = [decisions[0].obs.select(row), *(step.frames[i].select(row) for step, i in executed[:-1])]
    action = np.stack([step.executed[env_id, i] for step, i in executed])
    reward = np.array([step.reward[env_id, i] for step, i in executed])
    seen, seed = Observation(**concatenated(frames)), int(decisions[0].seeds[env_id])
    success, more = bool(steps[-1].success[env_id]), _columns(seen, spec)
    return Demonstrations.of_episode(spec, seen, action, success, seed, reward, more)


def collect_trajectories(
    env: VecEnv,
    policy: Policy,
    seeds: Sequence[int],
    generator: Any,
    mode: Mode = "sample",
    report: Callable[[int, int], None] = lambda episodes, successes: None,
) -> Trajectories:
    """Play one episode per seed with ``policy`` and keep all of them, successful or not, with every frame.

    ``report(episodes, successes)`` is called after each batch of environments.
    """
    parts: list[Trajectories] = []
    driver = Driver(env, policy, generator, mode, observe="all")
    for decisions, whole in _batches(driver, seeds):
        parts += [_trajectory(decisions, env_id) for env_id in whole]
        report(len(parts), sum(bool(part.success[-1]) for part in parts))
    return Trajectories.joined(parts)


def _batches(driver: Driver, seeds: Sequence[int]) -> Iterator[tuple[list[Decision], list[int]]]:
    """One episode per seed, as many at a time as there are environments: decisions, and environments with a whole one.

    Seeds whose simulator broke down (cause "worker") are played again later; after ``ATTEMPTS`` times they are left
    out with a warning.
    """
    waiting, attempts = deque(seeds), Counter[int]()
    while waiting:
        batch = [waiting.popleft() for _ in range(min(driver.env.num_envs, len(waiting)))]
        driver.start(batch)
        decisions = list(driver.until_done())
        lost = [env_id for env_id in range(len(batch)) if decisions[-1].step.cause[env_id] == WORKER]
        for seed in (batch[env_id] for env_id in lost):
            attempts[seed] += 1
            if attempts[seed] < ATTEMPTS:
                waiting.append(seed)
            else:
                warnings.warn(
                    f"the simulator of {driver.env.spec.name!r} broke down {ATTEMPTS} times while seed {seed} was "
                    "played, so that episode is not recorded; look at the simulator's own messages.",
                    stacklevel=2,
                )
        yield decisions, [env_id for env_id in range(len(batch)) if env_id not in lost]


def _trajectory(decisions: Sequence[Decision], env_id: int) -> Trajectories:
    """The episode that environment ``env_id`` played in ``decisions``.

    An episode fails when the task terminates it without success; a truncated one has not failed.
    """
    steps, row = [decision.step for decision in decisions], slice(env_id, env_id + 1)
    executed = [(step, i) for step in steps for i in range(len(step.frames)) if step.valid[env_id, i]]
    observations = [decisions[0].obs.select(row), *(step.frames[i].select(row) for step, i in executed)]
    actions = [step.executed[env_id, i] for step, i in executed]
    rewards = [float(step.reward[env_id, i]) for step, i in executed]
    count = len(observations)
    last = np.arange(count) == count - 1
    success, terminated = bool(steps[-1].success[env_id]), bool(steps[-1].terminated[env_id])
    return Trajectories(
        {name: np.concatenate([obs.images[name] for obs in observations]) for name in observations[0].images},
        state=np.concatenate([obs.state for obs in observations]),
        action=np.stack([*actions, np.zeros_like(actions[0])]),
        task=np.concatenate([obs.task for obs in observations]),
        success=last & success,
        failed=last & terminated & (not success),
        episode=np.zeros(count, np.int64),
        seed=np.full(count, decisions[0].seeds[env_id], np.int64),
        reward=np.array([*rewards, 0.0], np.float32),
    )


class ExpertPolicy:
    """``expert(obs) -> [E,H,D]`` in physical units, for instance the ``act`` of a scripted expert.

    It may read ``privileged/*``, so it can neither be trained nor deployed.  With ``horizon`` only that many actions of
    every chunk are executed.  It has no likelihood: ``sample`` is the action itself.
    """

    reads_privileged = True
    version = 0

    def __init__(self, expert: Callable[[Observation], np.ndarray], horizon: int | None = None) -> None:
        self.expert, self.horizon = expert, horizon

    def encode(self, obs: Observation) -> Features:
        return obs.arrays()

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        action = self.expert(Observation.of_arrays(features))[:, : self.horizon]
        return ActionOut(action, action, np.zeros(len(action), np.float32)), state
