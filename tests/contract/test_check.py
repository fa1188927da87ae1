"""Each environment and policy here breaks one rule of the contract, which is found; a NaN names where it came from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import CountingEnv
from sims.toy.point_mass import PointMassEnv
from tests.auditing import PrivilegedEnv
from tests.toys import Stateless
from vla_rl.contract.check import (
    PROFILES,
    Profile,
    check_array,
    check_env,
    check_env_quickly,
    check_policy,
    check_spec,
    check_step,
    loosest,
    profile_of,
)
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.contract.policy import ActionOut, Likelihood
from vla_rl.experience.driver import Driver
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.policies.function import FunctionPolicy


def same(value):
    return value


class Wrapped:
    """The counting environment; ``chunk``, ``obs`` and ``step`` change what goes in and comes out, subclasses more."""

    def __init__(self, num_envs: int = 3, chunk=same, obs=same, step=same, **declared) -> None:
        self.env = make("counting", num_envs=num_envs)
        self.num_envs, self.seeds = num_envs, np.zeros(num_envs, int)
        self.spec = replace(self.env.spec, **declared)
        self.chunk, self.obs, self.changed_step = chunk, obs, step

    def reset(self, env_ids, seeds):
        self.seeds[env_ids] = seeds
        return self.obs(self.env.reset(env_ids, seeds))

    def step(self, chunk, observe="last"):
        step = self.env.step(self.chunk(np.asarray(chunk)), observe)
        return self.changed_step(replace(step, obs=self.obs(step.obs), frames=tuple(map(self.obs, step.frames))))

    def snapshot(self, env_ids):
        return self.env.snapshot(env_ids)

    def restore(self, env_ids, snapshot):
        return self.obs(self.env.restore(env_ids, snapshot))

    def close(self):
        self.env.close()


class ResetsItself(Wrapped):
    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        over = np.flatnonzero(step.done)
        return replace(step, obs=self.env.reset(over, self.seeds[over] + 100)) if len(over) else step


class MovesBeforeItRefuses(Wrapped):
    def step(self, chunk, observe="last"):
        if np.isnan(chunk).any():
            super().step(np.nan_to_num(chunk), observe)
        return super().step(chunk, observe)


class ReportsUnclipped(Wrapped):
    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, executed=np.where(step.valid[..., None], np.asarray(chunk, np.float32), np.float32(0)))


class DriftsWhileIdle(CountingEnv):
    def __init__(self) -> None:
        super().__init__(3)

    def step(self, chunk, observe="last"):
        self._task_state["echo"][self._book.done] += 1
        return super().step(chunk, observe)


class ForgetsInSnapshots(Wrapped):
    def snapshot(self, env_ids):
        saved = self.env.snapshot(env_ids)
        return {**saved, "task_state/echo": 0 * saved["task_state/echo"]}


def whole(change):
    """``change`` of chunks that have all their axes."""
    return lambda chunk: change(chunk) if chunk.ndim == 3 else chunk


def rewards_chunks(step):
    """The whole reward of a chunk stands at its last action."""
    reward = np.zeros_like(step.reward)
    reward[np.arange(len(reward)), np.maximum(step.valid.sum(1) - 1, 0)] = step.reward.sum(1)
    return replace(step, reward=reward)


BUFFER = np.zeros((3, 4), np.float32)


def overwrites(obs):
    BUFFER[:] = obs.state
    return replace(obs, state=BUFFER)


NOISE, LONGEST = np.random.default_rng(0), CountingEnv(1).spec.max_chunk
OBSERVATIONS = [
    (lambda obs: dict(state=obs.state.astype(np.float64)), "state is float64"),
    (lambda obs: dict(state=obs.state + np.array([0, 60, 0, 0], np.float32)), "outside its declared range"),
    (lambda obs: dict(state=np.where(obs.state == 2, np.float32(np.nan), obs.state)), "outside its declared range"),
    (lambda obs: dict(images={"front": obs.images["audit"]}), r"images are \['front'\] but \['audit'\]"),
    (
        lambda obs: dict(images={"audit": obs.images["audit"].transpose(0, 3, 1, 2)}),
        r"uint8\[3, 3, 4, 4\] but uint8\[3, 4, 4, 3\]",
    ),
    (lambda obs: dict(task=obs.task + 1), "task holds"),
    (
        lambda obs: dict(state=obs.state + np.array([0, 0, 0, 1], np.float32) * np.roll(obs.state, 1, 0)),
        "outside its declared range|the same seed|neighbours|another one",
    ),
    (lambda obs: dict(time=obs.time // 2), "time does not count"),
]
STEPS = [
    (lambda step: dict(reward=step.reward + np.float32(0.5)), "not executed earned a reward"),
    (lambda step: dict(truncated=step.truncated | step.terminated), "terminated and truncated at once"),
    (lambda step: dict(cause=("",) * len(step.cause)), "has the cause ''"),
    (lambda step: dict(success=step.success & step.valid.any(1)), "the end of environment 1 changed while it idled"),
    (lambda step: dict(frames=()), "gave 0 frames"),
    (
        lambda step: dict(reward=step.reward + step.valid * NOISE.random(step.valid.shape, np.float32)),
        "the same seed and actions give another episode",
    ),
]


def replaced(change):
    return lambda value: replace(value, **change(value))


FAULTS = [
    (ResetsItself, "time does not count|idle environment"),
    (DriftsWhileIdle, "an idle environment's observation changed"),
    (MovesBeforeItRefuses, "a refused chunk moved something"),
    (ReportsUnclipped, "executed holds"),
    (ForgetsInSnapshots, "restore does not return the observation"),
    (partial(Wrapped, chunk=whole(np.nan_to_num)), "executed a NaN"),
    (partial(Wrapped, chunk=lambda chunk: chunk if chunk.ndim == 3 else chunk[:, None]), "without an action axis"),
    (partial(Wrapped, chunk=whole(lambda chunk: chunk[:, :LONGEST])), "executed a chunk beyond max_chunk"),
    (
        partial(Wrapped, chunk=whole(lambda chunk: np.broadcast_to(chunk.mean(1, keepdims=True), chunk.shape))),
        "one chunk of 4 differs|the same seed|depends on its place|frames",
    ),
    (partial(Wrapped, step=rewards_chunks), "one chunk of 4 differs from 4 chunks of 1"),
    (partial(Wrapped, obs=overwrites), "overwritten by the next step"),
    (partial(Wrapped, can_snapshot=False), "can_snapshot is wrong"),
    (partial(Wrapped, time_limit=10), r"time holds .* outside its declared range 0\.\.10"),
    *((partial(Wrapped, obs=replaced(change)), says) for change, says in OBSERVATIONS),
    *((partial(Wrapped, step=replaced(change)), says) for change, says in STEPS),
]


@pytest.mark.parametrize(("kind", "says"), FAULTS)
def test_a_broken_environment_is_found(kind, says):
    with pytest.raises(ContractError, match=says):
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


def acting(change, **attributes):
    """A policy whose decisions are changed by ``change(out, mode)``."""

    def act(self, features, state, mode, generator):
        out, state = GaussianPolicy.act(self, features, state, mode, generator)
        return replace(out, **change(out, mode)), state

    return type("Acting", (GaussianPolicy,), {"act": act, **attributes})


def in_parts(count):
    return acting(lambda out, mode: dict(logprob=out.logprob[:, None].expand(-1, count) / count), parts=count)


class MeanLikelihood(GaussianPolicy):
    def log_prob(self, features, sample, aux):
        found = super().log_prob(features, sample, aux)
        scale = 0.5 if torch.is_grad_enabled() else 1.0
        return Likelihood(scale * found.logprob, found.entropy, found.params)


class ScoresClippedActions(GaussianPolicy):
    def log_prob(self, features, sample, aux):
        return super().log_prob(features, sample.clamp(-1, 1) if torch.is_grad_enabled() else sample, aux)


class ReadsPrivileged(GaussianPolicy):
    def encode(self, obs):
        return {**super().encode(obs), "secret": torch.as_tensor(obs.extras["privileged/seed"])}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (acting(lambda out, mode: dict(action=out.action + 5)), "action holds"),
        (acting(lambda out, mode: dict(action=out.action * (np.nan if mode == "eval" else 1))), "action holds"),
        (acting(lambda out, mode: dict(action=out.action[:, 0])), "action is"),
        (acting(lambda out, mode: dict(logprob=out.logprob.sum())), "one number per environment"),
        (in_parts(2), r"logprob has parts \[2\] for 3 actions"),
        (in_parts(3), r"act gives log-probs \[8, 3\] but log_prob \[8\]"),
        (MeanLikelihood, "PPO's first ratio is not 1"),
        (ScoresClippedActions, "PPO's first ratio is not 1"),
        (ReadsPrivileged, "reads 'privileged/seed'.*could not be deployed"),
    ],
)
def test_a_broken_policy_is_found(kind, message):
    env = PrivilegedEnv(8) if kind is ReadsPrivileged else make("point_mass", num_envs=8)
    with pytest.raises(ContractError, match=message):
        check_policy(kind(env.spec, config=GaussianConfig(3, std=2.0)), env, torch.Generator().manual_seed(0))


def test_a_sound_policy_passes():
    env = make("point_mass", num_envs=8)
    found = check_policy(GaussianPolicy(env.spec, config=GaussianConfig(3)), env, torch.Generator().manual_seed(0))
    assert [item.name for item in found] == ["encode", "act", "log-prob gap"]


class Trembling:
    """The point mass with physics whose last digits differ from play to play."""

    def __init__(self, profile: str, size: float) -> None:
        self.env, self.num_envs, self.size = make("point_mass", num_envs=3), 3, size
        self.spec = replace(self.env.spec, profile=profile, can_snapshot=False)
        self.noise = np.random.default_rng(0)

    def reset(self, env_ids, seeds):
        return self.env.reset(env_ids, seeds)

    def step(self, chunk, observe="last"):
        step = self.env.step(chunk, observe)
        reward = step.reward + step.valid * self.noise.uniform(0, self.size, step.valid.shape).astype(np.float32)
        return replace(step, reward=reward.astype(np.float32))

    def close(self):
        self.env.close()


class Robot:
    """Whoever starts an episode or executes an action moves it; ``clock`` runs while nobody acts."""

    num_envs = 1

    def __init__(self, clock: int = 0) -> None:
        self.env = make("point_mass", num_envs=1)
        self.obs = self.env.reset([0], [3])
        self.spec = replace(self.env.spec, profile="hardware", can_snapshot=False)
        self.clock, self.looks = clock, 0

    def reset(self, env_ids, seeds):
        assert len(env_ids) == 0, "an episode was started"
        self.looks += 1
        return replace(self.obs, time=self.obs.time + self.clock * self.looks)

    def step(self, chunk, observe="last"):
        raise AssertionError("an action was executed")

    def close(self):
        self.env.close()


def test_only_a_tolerant_environment_may_differ_in_last_digits():
    assert len(check_env(Trembling("tolerant", 1e-5))) == 7
    for profile, size in (("bitwise", 1e-5), ("tolerant", 0.1)):
        with pytest.raises(ContractError, match="the same seed and actions give another episode"):
            check_env(Trembling(profile, size))


def test_pictures_may_differ_on_average_and_indices_never():
    tolerant, exact = Profile(0.01), PROFILES["bitwise"]
    one = np.full((2, 4, 4, 3), 100, np.uint8)
    other = one.copy()
    other[1, 0, 0] = 130  # 90 levels, a mean of 1.9
    assert tolerant.alike(one, other) and not exact.alike(one, other)
    other[1, 0, 1] = 170
    assert not tolerant.alike(one, other)
    assert not tolerant.alike(np.array([1000]), np.array([1001])) and not tolerant.alike(np.zeros(2), np.zeros(3))
    assert tolerant.alike(np.array([100.0, 0]), np.array([100.5, 0.005])) and exact.alike(one, one.copy())


@pytest.mark.parametrize("check", [check_env, check_env_quickly])
def test_a_robot_is_looked_at_and_not_moved(check):
    robot = Robot()
    check(robot)
    assert robot.looks
    policy = FunctionPolicy(robot.spec, lambda obs: np.zeros((1, 1, 2), np.float32))
    assert [one.name for one in check_policy(policy, robot, torch.Generator())] == ["encode", "act"]
    with pytest.raises(ContractError, match="time counts although no action was executed"):
        check(Robot(clock=1))
    robot.obs = replace(robot.obs, state=robot.obs.state * 1e6)
    with pytest.raises(ContractError, match="outside its declared range"):
        check(robot)


def test_profiles_have_an_order_and_unknown_ones_are_refused():
    specs = [replace(CountingEnv(1).spec, profile=name) for name in ("bitwise", "hardware", "tolerant")]
    assert loosest(specs) == "hardware" and loosest(specs[:1]) == "bitwise" and loosest(specs[::2]) == "tolerant"
    with pytest.raises(ContractError, match=r"names the profile 'loose'.*choose one of bitwise, tolerant, hardware"):
        profile_of(replace(specs[0], profile="loose"))


SPEC = PointMassEnv(1).spec


class Foreign:
    """The point mass behind attributes that a test replaces or deletes."""

    def __init__(self, **changes):
        env = PointMassEnv(2)
        self.spec, self.num_envs = env.spec, 2
        self.reset, self.step, self.close = env.reset, env.step, env.close
        for name, value in changes.items():
            if value is None:
                delattr(self, name)
            else:
                setattr(self, name, value)


def changed(**arrays):
    """``reset`` whose observation has other arrays."""
    env = PointMassEnv(2)

    def reset(env_ids, seeds):
        obs = env.reset(env_ids, seeds)
        return replace(obs, **{name: change(getattr(obs, name)) for name, change in arrays.items()})

    return reset


def stepped(**fields):
    """``reset`` and ``step`` of an environment whose steps have other fields."""
    env = PointMassEnv(2)

    def step(chunk, observe="last"):
        taken = env.step(chunk, observe)
        return replace(taken, **{name: change(getattr(taken, name)) for name, change in fields.items()})

    return {"reset": env.reset, "step": step}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reset": None}, r"environment 'Foreign' has no 'reset'.*implement reset\(env_ids, seeds\)"),
        ({"spec": None}, r"has no 'spec'"),
        ({"reset": lambda seeds: None}, r"reset of .* cannot be called as reset\(env_ids, seeds\)"),
        ({"step": lambda chunk: None}, r"step of .* cannot be called as step\(chunk, observe\)"),
        ({"spec": {"name": "mine"}}, r"spec is a dict, not a vla_rl\.contract\.env\.EnvSpec"),
        ({"reset": lambda env_ids, seeds: (np.zeros(2), {})}, r"reset of .* is a tuple, not a .*Observation"),
        ({"step": lambda chunk, observe: (0, 0, False)}, r"step of .* is a tuple, not a .*Step"),
        ({"reset": changed(state=lambda x: x.astype(np.float64))}, r"state is float64\[2, 2\] but float32\[2, 2\]"),
        ({"reset": changed(state=lambda x: x * np.nan)}, r"'point_mass' returned a state that is not finite"),
        (stepped(reward=lambda x: x * np.inf), r"'point_mass' returned a reward that is not finite"),
        (stepped(success=lambda x: x.astype(np.float32)), r"success is float32"),
        (stepped(frames=lambda x: x[:1]), r"returned [01] frames for 2 actions"),
    ],
)
def test_a_mistake_in_an_environment_is_one_sentence(changes, sentence):
    with pytest.raises(ContractError, match=sentence) as refused:
        check_env_quickly(Foreign(**changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"state": ArraySpec([2], "float32", -1, 1)}, "shape of state is wrong"),
        ({"state": ArraySpec((2,), "float64", -1, 1)}, "state is wrong.*float32"),
        ({"action": ArraySpec((2, 2), "float32", -1, 1)}, "action is wrong.*one axis"),
        ({"action": ArraySpec((2,), "float32", (-1, -1, -1), 1)}, "low of action is wrong"),
        ({"action": ArraySpec((2,), "float32", 1, -1)}, "low of action is wrong"),
        ({"action": ArraySpec((2,), "float32", -1, 1, names=("x",))}, "names of action is wrong"),
        ({"images": {"front": ArraySpec((8, 8, 3), "float32", 0, 1)}}, r"images\['front'\] is wrong.*uint8"),
        ({"images": {"front": (8, 8, 3)}}, "the spec of front is a tuple"),
        ({"tasks": "reach"}, "tasks is wrong"),
        ({"time_limit": 0}, "time_limit is wrong"),
        ({"control_dt": 0.0}, "control_dt is wrong"),
        ({"success": "never"}, "success is wrong"),
    ],
)
def test_a_spec_that_does_not_fit_together_is_refused(changes, sentence):
    with pytest.raises(ContractError, match=sentence):
        check_spec(replace(SPEC, **changes))
    check_spec(replace(SPEC, success=None))


def test_the_check_leaves_every_episode_at_its_start():
    env = CountingEnv(3)
    check_env_quickly(env)
    assert (env._book.time == 0).all()
    counted = []
    env.step, inner = (lambda chunk, observe="last": counted.append(chunk.shape[1]) or inner(chunk, observe)), env.step
    check_env_quickly(env)
    assert sum(counted) <= 6


class Still(Stateless):
    """Sends one action of zeros."""

    def act(self, features, state, mode, generator):
        action = np.zeros((len(features["state"]), 1, 2), np.float32)
        return ActionOut(action, action, np.zeros(len(action), np.float32)), state


class Poisoned(PointMassEnv):
    """Environment 1 returns a NaN reward, or state, from its third action on."""

    def __init__(self, num_envs, part):
        super().__init__(num_envs)
        self.part = part

    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        bad = (np.arange(self.num_envs) == 1) & (step.obs.time >= 3)
        if self.part == "reward":
            return replace(step, reward=np.where(bad[:, None], np.float32(np.nan), step.reward))
        return replace(step, obs=replace(step.obs, state=np.where(bad[:, None], np.float32(np.nan), step.obs.state)))


@pytest.mark.parametrize("part", ["reward", "state"])
def test_a_nan_of_an_environment_is_blamed_on_the_environment(part):
    driver = Driver(Poisoned(3, part), Still(), None)
    driver.start([5, 6, 7])
    driver.step(), driver.step()
    message = rf"'point_mass' returned a {part} that is not finite in environment 1 \(seed 6, time step 3\)"
    with pytest.raises(ContractError, match=message) as refused:
        driver.step()
    assert not isinstance(refused.value, NonFiniteError), "a rollback and a lower learning rate would not help"
    assert "learning rate" not in str(refused.value)


def test_a_nan_of_a_reset_is_blamed_on_the_environment():
    env = Foreign(reset=changed(state=lambda x: x * np.array([[1], [np.nan]], np.float32)))
    with pytest.raises(ContractError, match=r"a state that is not finite in environment 1 \(seed 9, time step 0\)"):
        Driver(env, Still(), None).start([8, 9])
