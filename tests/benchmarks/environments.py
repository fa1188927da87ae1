"""Stepping: against Gymnasium's worker processes, and against MuJoCo's own rollout with no environment around it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import mujoco
import numpy as np
from mujoco.rollout import Rollout

from sims.catalog import make
from tests.benchmarks.gymnasium_lift import OPPONENT, vector
from tests.benchmarks.measure import Contender, Row, interleave, rate_row

THREADS = 2
PHYSICS = mujoco.mjtState.mjSTATE_FULLPHYSICS.value


def env_vs_async(quick: bool = False) -> list[Row]:
    """Control steps per second, one control step per call, against Gymnasium's parallel environments.

    The opponent is ``AsyncVectorEnv`` (shared memory, no copies) with 2, 4, 16 or 64 worker processes, whichever is
    fastest; each hosts one plain environment with its own ``MjData``, one ``mujoco.mj_step`` per control step and rules
    in numpy.  With fewer workers than our 64 rows, it steps fewer environments: steps per second are compared.
    """
    return [_against("env_vs_async", {count: count for count in ((2,) if quick else (2, 4, 16, 64))}, quick)]


def env_vs_async_nested(quick: bool = False) -> list[Row]:
    """As :func:`env_vs_async` against its fastest setup: 64 environments in 2, 4 or 16 workers.

    Gymnasium gives a worker one environment; this one is a ``SyncVectorEnv`` of the worker's share of all.  All
    end in the same physics state, bit for bit.  Little is left to win: even ``mujoco.rollout`` without an environment
    around it, as in :func:`env_vs_rollout`, is not much faster than physics in plain processes.
    """
    workers = dict.fromkeys((2,) if quick else (2, 4, 16), 4 if quick else 64)
    return [_against("env_vs_async_nested", workers, quick, other_is=OPPONENT)]


def _against(name: str, workers: Mapping[int, int], quick: bool, **detail: Any) -> Row:
    """Against so many environments in so many ``workers``; where they are as many as ours, they do the same."""
    num_envs, steps, repeats = (4, 2, 1) if quick else (64, 40, 7)
    env = make("lift", num_envs=num_envs, render=False, threads=THREADS)
    env_ids, actions = np.arange(num_envs), _actions(env, steps)

    def play() -> None:
        for action in actions:
            step = env.step(action[:, None])
        assert step.valid.all(), "a row ended, so ours did less work; take fewer steps"

    def play_async(other: Any, envs: int) -> None:
        for action in actions:
            other.step(action[:envs].reshape(other.action_space.shape))

    contenders = {"ours": Contender(play, lambda: env.reset(env_ids, env_ids))}
    with closing(env), ExitStack() as stack:
        others = {count: stack.enter_context(closing(vector(envs, count))) for count, envs in workers.items()}
        for count, other in others.items():
            seeds = [int(seed) for seed in range(0, workers[count], workers[count] // count)]
            reset = partial(other.reset, seed=seeds)
            contenders[str(count)] = Contender(partial(play_async, other, workers[count]), reset)
        seconds = interleave(contenders, repeats)
        physics = np.concatenate([env._batch.bind("qpos"), env._batch.bind("qvel")], axis=1)
        for count, other in others.items():
            same = np.array_equal(np.concatenate(other.call("physics")), physics[: workers[count]])
            assert same, f"{count} workers simulated something else"
    ours = seconds.pop("ours")
    equal_work = {count: value * num_envs / workers[int(count)] for count, value in seconds.items()}
    detail |= {f"async_{count}_workers": round(num_envs * steps / value) for count, value in equal_work.items()}
    pair = (ours, min(equal_work.values()))
    return rate_row(name, name, num_envs * steps, pair, "steps/s", num_envs=num_envs, **detail)


def env_vs_rollout(quick: bool = False) -> list[Row]:
    """Physics steps per second of a chunk of 5, against bare ``mujoco.rollout`` from the same states and controls."""
    num_envs, repeats = (4, 1) if quick else (64, 30)
    env = make("lift", num_envs=num_envs, render=False, threads=THREADS)
    env_ids = np.arange(num_envs)
    env.reset(env_ids, env_ids)
    for action in _actions(env, 10):
        env.step(action[:, None])
    start, chunk = env.snapshot(env_ids), _actions(env, 5).swapaxes(0, 1)
    bare = _Bare(env, start["physics"], chunk)
    last: dict[str, np.ndarray] = {}

    def step() -> None:
        last["ours"] = env.step(chunk).obs.state

    with closing(env), closing(bare.pool):
        contenders = {"ours": Contender(step, lambda: env.restore(env_ids, start)), "other": Contender(bare.run)}
        seconds = interleave(contenders, repeats)
        physics = env.snapshot(env_ids)["physics"]
    width = bare.out.shape[-1]
    assert np.array_equal(physics[:, :width], bare.out[:, -1]), "the rollout simulated something else"
    total = num_envs * bare.steps
    pair = (seconds["ours"], seconds["other"])
    return [rate_row("env_vs_rollout", "env_vs_rollout", total, pair, "physics steps/s", num_envs=num_envs, chunk=5)]


class _Bare:
    """``mujoco.rollout`` with a persistent pool and everything allocated beforehand."""

    def __init__(self, env: Any, physics: np.ndarray, chunk: np.ndarray) -> None:
        task = env.task
        self.model, self.steps = task.model, task.substeps * chunk.shape[1]
        parts = {name: self._slice(name) for name in ("CTRL", "WARMSTART")}
        ctrl, targets = physics[:, parts["CTRL"]], []
        for action in chunk.swapaxes(0, 1):
            ctrl = task.control(ctrl, action)
            targets.append(ctrl)
        self.control = np.repeat(np.stack(targets, 1), task.substeps, axis=1)
        width = mujoco.mj_stateSize(self.model, PHYSICS)
        self.initial = np.ascontiguousarray(physics[:, :width])
        self.warmstart = np.ascontiguousarray(physics[:, parts["WARMSTART"]])
        self.out = np.empty((len(physics), self.steps, width))
        self.sensors = np.empty((len(physics), self.steps, self.model.nsensordata))
        self.models = [self.model] * len(physics)
        self.data = [mujoco.MjData(self.model) for _ in range(THREADS)]
        self.pool = Rollout(nthread=THREADS)

    def run(self) -> None:
        self.pool.rollout(
            self.models,
            self.data,
            self.initial,
            self.control,
            skip_checks=True,
            nstep=self.steps,
            initial_warmstart=self.warmstart,
            state=self.out,
            sensordata=self.sensors,
        )

    def _slice(self, name: str) -> slice:
        """The slice of a component in mjSTATE_INTEGRATION: components are in the order of their bits."""
        bit = getattr(mujoco.mjtState, f"mjSTATE_{name}").value
        whole = mujoco.mjtState.mjSTATE_INTEGRATION.value
        start = mujoco.mj_stateSize(self.model, whole & (bit - 1))
        return slice(start, start + mujoco.mj_stateSize(self.model, bit))


def _actions(env: Any, steps: int) -> np.ndarray:
    """Random actions float32 [steps,E,D] within the bounds."""
    shape = (steps, env.num_envs, env.spec.action_dim)
    return np.random.default_rng(steps).uniform(env.spec.action.low, env.spec.action.high, shape).astype(np.float32)
