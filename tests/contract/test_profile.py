"""Profiles of check_env: simulators repeat themselves bit for bit or within a tolerance; robots are never moved."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from sims.catalog import make
from sims.toy.counting import CountingEnv
from vla_rl.cli import inspect
from vla_rl.contract.check import PROFILES, Profile, check_env, check_policy, loosest, profile_of
from vla_rl.contract.errors import ContractError
from vla_rl.contract.foreign import check_env_quickly
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes import inspect as inspecting


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


def test_a_tolerant_environment_may_differ_in_its_last_digits_and_a_bitwise_one_not_at_all():
    assert len(check_env(Trembling("tolerant", 1e-5))) == 7
    for profile, size in (("bitwise", 1e-5), ("tolerant", 0.1)):
        with pytest.raises(ContractError, match="the same seed and actions give another episode"):
            check_env(Trembling(profile, size))


def test_pictures_may_differ_on_average_by_a_share_of_their_range_and_indices_never():
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
    with pytest.raises(ContractError, match="time counts although no action was executed"):
        check(Robot(clock=1))
    robot.obs = replace(robot.obs, state=robot.obs.state * 1e6)
    with pytest.raises(ContractError, match="outside its declared range"):
        check(robot)


def test_a_policy_is_tried_on_a_robot_without_moving_it():
    robot = Robot()
    policy = FunctionPolicy(robot.spec, lambda obs: np.zeros((1, 1, 2), np.float32))
    assert [one.name for one in check_policy(policy, robot, torch.Generator())] == ["encode", "act"]


def test_inspect_does_not_move_a_robot(monkeypatch):
    monkeypatch.setattr(inspecting.sims, "make_env", lambda name, num_envs, **options: Robot())
    console = Console(record=True, width=120, file=io.StringIO())
    inspect.inspect("point_mass", console)
    printed = console.export_text()
    assert "nothing was moved" in printed and "hardware" in printed


def test_environments_as_one_have_the_loosest_profile():
    specs = [replace(CountingEnv(1).spec, profile=name) for name in ("bitwise", "hardware", "tolerant")]
    assert loosest(specs) == "hardware" and loosest(specs[:1]) == "bitwise" and loosest(specs[::2]) == "tolerant"


def test_an_unknown_profile_is_refused():
    with pytest.raises(ContractError, match=r"names the profile 'loose'.*choose one of bitwise, tolerant, hardware"):
        profile_of(replace(CountingEnv(1).spec, profile="loose"))
