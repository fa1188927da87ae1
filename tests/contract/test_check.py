"""check_env finds every fault: each environment here breaks one rule of the contract."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sims.catalog import make
from sims.toy.counting import CountingEnv
from tests.auditing import PrivilegedEnv
from vla_rl.contract.check import check_array, check_env, check_step
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError


class Wrapped:
    """The counting environment; subclasses break it."""

    def __init__(self, num_envs: int = 3) -> None:
        self.env = make("counting", num_envs=num_envs)
        self.num_envs, self.seeds = num_envs, np.zeros(num_envs, int)
        self.spec = self.env.spec

    def reset(self, env_ids, seeds):
        self.seeds[env_ids] = seeds
        return self.changed(self.env.reset(env_ids, seeds))

    def step(self, chunk, observe="last"):
        step = self.env.step(chunk, observe)
        return replace(step, obs=self.changed(step.obs), frames=tuple(map(self.changed, step.frames)))

    def changed(self, obs):
        return obs

    def snapshot(self, env_ids):
        return self.env.snapshot(env_ids)

    def restore(self, env_ids, snapshot):
        return self.changed(self.env.restore(env_ids, snapshot))

    def close(self):
        self.env.close()


class ResetsItself(Wrapped):
    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        over = np.flatnonzero(step.done)
        return replace(step, obs=self.env.reset(over, self.seeds[over] + 100)) if len(over) else step


class HalfPrecision(Wrapped):
    def changed(self, obs):
        return replace(obs, state=obs.state.astype(np.float64))


class CountsBeyondItsRange(Wrapped):
    def changed(self, obs):
        return replace(obs, state=obs.state + np.array([0, 60, 0, 0], np.float32))


class HoldsNaN(Wrapped):
    def changed(self, obs):
        return replace(obs, state=np.where(obs.state == 2, np.float32(np.nan), obs.state))


class OtherCamera(Wrapped):
    def changed(self, obs):
        return replace(obs, images={"front": obs.images["audit"]})


class ChannelsFirst(Wrapped):
    def changed(self, obs):
        return replace(obs, images={"audit": obs.images["audit"].transpose(0, 3, 1, 2)})


class UnknownTask(Wrapped):
    def changed(self, obs):
        return replace(obs, task=obs.task + 1)


class Leaks(Wrapped):
    def changed(self, obs):
        return replace(obs, state=obs.state + np.array([0, 0, 0, 1], np.float32) * np.roll(obs.state, 1, 0))


class GlobalRandomness(Wrapped):
    noise = np.random.default_rng(0)

    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, reward=step.reward + step.valid * self.noise.random(step.valid.shape, np.float32))


class ExecutesNaN(Wrapped):
    def step(self, chunk, observe="last"):
        chunk = np.asarray(chunk)
        return super().step(np.nan_to_num(chunk) if chunk.ndim == 3 else chunk, observe)


class TakesFlatChunks(Wrapped):
    def step(self, chunk, observe="last"):
        chunk = np.asarray(chunk)
        return super().step(chunk if chunk.ndim == 3 else chunk[:, None], observe)


class TakesEndlessChunks(Wrapped):
    def step(self, chunk, observe="last"):
        return super().step(chunk[:, : self.spec.max_chunk] if np.ndim(chunk) == 3 else chunk, observe)


class MovesBeforeItRefuses(Wrapped):
    def step(self, chunk, observe="last"):
        if np.isnan(chunk).any():
            super().step(np.nan_to_num(chunk), observe)
        return super().step(chunk, observe)


class RewardsChunks(Wrapped):
    """The whole reward of a chunk stands at its last action."""

    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        reward = np.zeros_like(step.reward)
        reward[np.arange(self.num_envs), np.maximum(step.valid.sum(1) - 1, 0)] = step.reward.sum(1)
        return replace(step, reward=reward)


class SmoothsChunks(Wrapped):
    def step(self, chunk, observe="last"):
        chunk = np.asarray(chunk)
        return super().step(np.broadcast_to(chunk.mean(1, keepdims=True), chunk.shape) if chunk.ndim == 3 else chunk)


class ReportsUnclipped(Wrapped):
    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, executed=np.where(step.valid[..., None], np.asarray(chunk, np.float32), np.float32(0)))


class RewardsIdleActions(Wrapped):
    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, reward=step.reward + np.float32(0.5))


class EndsTwice(Wrapped):
    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, truncated=step.truncated | step.terminated)


class NoCause(Wrapped):
    def step(self, chunk, observe="last"):
        return replace(super().step(chunk, observe), cause=("",) * self.num_envs)


class ForgetsSuccess(Wrapped):
    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, success=step.success & step.valid.any(1))


class Overwrites(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros((3, 4), np.float32)

    def changed(self, obs):
        self.buffer[:] = obs.state
        return replace(obs, state=self.buffer)


class ForgetsInSnapshots(Wrapped):
    def snapshot(self, env_ids):
        saved = self.env.snapshot(env_ids)
        return {**saved, "task_state/echo": 0 * saved["task_state/echo"]}


class DeclaresNoSnapshot(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, can_snapshot=False)


class RunsLongerThanDeclared(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, time_limit=10)


class LacksFrames(Wrapped):
    def step(self, chunk, observe="last"):
        return replace(super().step(chunk, observe), frames=())


class StopsItsClock(Wrapped):
    def changed(self, obs):
        return replace(obs, time=obs.time // 2)


FAULTS = {
    ResetsItself: "time does not count|idle environment",
    HalfPrecision: "state is float64",
    CountsBeyondItsRange: "outside its declared range",
    HoldsNaN: "outside its declared range",
    OtherCamera: r"images are \['front'\] but \['audit'\]",
    ChannelsFirst: r"uint8\[3, 3, 4, 4\] but uint8\[3, 4, 4, 3\]",
    UnknownTask: "task holds",
    Leaks: "outside its declared range|the same seed|neighbours|another one",
    GlobalRandomness: "the same seed and actions give another episode",
    ExecutesNaN: "executed a NaN",
    TakesFlatChunks: "executed a chunk without an action axis",
    TakesEndlessChunks: "executed a chunk beyond max_chunk",
    MovesBeforeItRefuses: "a refused chunk moved something",
    RewardsChunks: "one chunk of 4 differs from 4 chunks of 1",
    SmoothsChunks: "one chunk of 4 differs|the same seed|depends on its place|frames",
    ReportsUnclipped: "executed holds",
    RewardsIdleActions: "not executed earned a reward",
    EndsTwice: "terminated and truncated at once",
    NoCause: "has the cause ''",
    ForgetsSuccess: "the end of environment 1 changed while it idled",
    Overwrites: "overwritten by the next step",
    ForgetsInSnapshots: "restore does not return the observation",
    DeclaresNoSnapshot: "can_snapshot is wrong",
    RunsLongerThanDeclared: r"time holds .* outside its declared range 0\.\.10",
    LacksFrames: "gave 0 frames",
    StopsItsClock: "time does not count",
}


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_broken_environment_is_found(kind):
    with pytest.raises(ContractError, match=FAULTS[kind]):
        check_env(kind(), seed=11)


@pytest.mark.parametrize("env", [Wrapped(), Wrapped(1), PrivilegedEnv(3), CountingEnv(2)])
def test_a_sound_environment_passes(env):
    assert [item.name for item in check_env(env, seed=11)][-1] == "snapshot"
    assert not env.step(np.zeros((env.num_envs, 1, 2))).obs.time.max() > 1  # every row was reset


def test_actions_of_running_environments_must_be_valid():
    env = make("counting", num_envs=2)
    env.reset([0, 1], [1, 2])
    step = env.step(np.zeros((2, 2, 2)))
    check_step(step, env.spec, 2, 2)
    with pytest.raises(ContractError, match="running environment has an action"):
        check_step(replace(step, valid=np.array([[True, False], [True, True]]), reward=0 * step.reward), env.spec, 2, 2)
    with pytest.raises(ContractError, match="True again"):
        check_step(replace(step, valid=np.array([[False, True], [True, True]])), env.spec, 2, 2)
    with pytest.raises(ContractError, match="reward holds"):
        check_step(replace(step, reward=step.reward * np.float32(np.inf)), env.spec, 2, 2)


def test_bounds_may_be_given_per_entry_and_rounding_is_forgiven():
    spec = ArraySpec((2,), "float32", (-1.0, 0.0), (1.0, 5.0))
    check_array("x", np.array([[1.0 + 5e-6, 5.0]], np.float32), spec, (1,))
    for bad in ([[1.1, 0.0]], [[0.0, -0.1]]):
        with pytest.raises(ContractError, match="x holds"):
            check_array("x", np.array(bad, np.float32), spec, (1,))
