"""Environments and policies of a user are checked before training; a NaN names the environment it came from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.toy.counting import CountingEnv
from sims.toy.point_mass import PointMassEnv
from vla_rl.contract.check import check_env_quickly, check_policy_quickly, check_spec
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.contract.policy import ActionOut
from vla_rl.experience.driver import Driver
from vla_rl.policies.feed_forward import GaussianPolicy

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


def policy_without(name):
    class Incomplete(GaussianPolicy):
        pass

    setattr(Incomplete, name, None)
    return Incomplete(SPEC)


@pytest.mark.parametrize("name", ["encode", "act", "reset_state", "save_pretrained"])
def test_a_policy_without_a_method_is_named(name):
    with pytest.raises(ContractError, match=f"policy 'Incomplete' has no '{name}'"):
        check_policy_quickly(policy_without(name), PointMassEnv(2), torch.Generator())


class Still:
    """Sends one action of zeros."""

    version = 0

    def encode(self, obs):
        return {"state": obs.state}

    def initial_state(self, num_envs):
        return {}

    def reset_state(self, state, env_ids):
        return state

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
