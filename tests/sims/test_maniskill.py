"""ManiSkill's controls, seeds, ends and options, which need no ManiSkill; ``make test-sims`` runs the real one."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sims.maniskill import build
from sims.maniskill.build import INSTRUCTIONS, ManiSkillEnv, ReplayingManiSkillEnv, _refusal, instruction_of
from sims.maniskill.make import make_in_process
from sims.maniskill.vulkan import Driver, verdict
from sims.maniskill.world import Outcome, SeededRows, controls_of
from vla_rl.contract.check import check_env
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import UserError

LIMIT = 9
SPEC = EnvSpec(
    name="maniskill/slider",
    images={"front": ArraySpec((4, 4, 3), "uint8", 0, 255)},
    state=ArraySpec((1,), "float32", -100.0, 100.0),
    action=ArraySpec((1,), "float32", -1.0, 1.0),
    tasks=("slide",),
    control_dt=0.05,
    time_limit=LIMIT,
    max_chunk=5,
    extras={"privileged/goal": ArraySpec((1,), "float32", -100.0, 100.0)},
    can_snapshot=True,
)


class Slider:
    """A ``World`` of sliders that all move whenever one does; beyond ``broken`` their position is not a number."""

    def __init__(self, num_envs, goal=100.0, fail=100.0, broken=100.0):
        self.num_envs, self.goal, self.fail, self.broken = num_envs, goal, fail, broken
        self.position, self.pictures, self.closed = torch.zeros(num_envs), 0, 0

    def reset(self, rows, seeds):
        self.position[rows] = torch.tensor(seeds, dtype=torch.float32) % 7 / 10

    def step(self, action):
        self.position = self.position + torch.as_tensor(action)[:, 0] + 0.01
        return Outcome(self.position.clone(), self.position >= self.goal, self.position >= self.fail)

    def state(self):
        return torch.where(self.position >= self.broken, torch.nan, self.position)[:, None]

    def privileged(self):
        return {"privileged/goal": torch.full((self.num_envs, 1), self.goal)}

    def images(self):
        self.pictures += 1
        shade = ((self.position.abs() * 900).round() % 256).to(torch.uint8)  # another one after every step
        return {"front": shade[:, None, None, None].expand(-1, 4, 4, 3)}

    def close(self):
        self.closed += 1


def env_of(*worlds, ends_at_success=True, kind=ReplayingManiSkillEnv):
    return kind(SPEC, worlds, ends_at_success)


# -- ends, and environments that idle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", [0.4, 100.0])
@pytest.mark.parametrize("worlds", [(1, 1, 1), (3,), (1, 2)], ids=str)
def test_it_keeps_the_contract_however_worlds_share_the_rows(worlds, goal):
    """Also where a world moves all its environments although some of them idle."""
    single = worlds == (1, 1, 1)
    spec, kind = replace(SPEC, can_snapshot=single), ReplayingManiSkillEnv if single else ManiSkillEnv
    check_env(kind(spec, [Slider(count, goal) for count in worlds], True), seed=3)


def test_success_failure_time_and_nan_end_episodes():
    env = env_of(Slider(1, goal=1.5), Slider(1, fail=1.5), Slider(1, broken=1.5), Slider(1))
    env.reset(range(4), [0, 0, 0, 0])
    step = env.step(np.full((4, 5, 1), 0.4))
    assert step.cause == ("success", "failed", "diverged", "")
    assert step.terminated.tolist() == [True, True, False, False]
    assert step.truncated.tolist() == [False, False, True, False]
    assert step.success.tolist() == [True, False, False, False] and step.valid.sum(1).tolist() == [4, 4, 4, 5]
    assert step.reward[2, 3] == 0 and np.isfinite(step.obs.state).all()
    assert step.reward[1, 3] == pytest.approx(1.64) and step.obs.state[0, 0] == pytest.approx(1.64)
    assert env.step(np.zeros((4, 4, 1))).cause == ("success", "failed", "diverged", "time_limit")


def test_success_need_not_end_an_episode_and_is_remembered():
    env = env_of(Slider(2, goal=0.5), ends_at_success=False)
    env.reset([0, 1], [0, 0])
    step = env.step(np.array([0.6, 0.1])[:, None, None].repeat(5, 1))
    assert step.success.tolist() == [True, True] and step.cause == ("", "")
    step = env.step(np.full((2, 4, 1), -1.0))
    assert step.success.tolist() == [True, True] and step.cause == ("time_limit", "time_limit")
    env.reset([0], [0])
    assert env.step(np.zeros((2, 1, 1))).success.tolist() == [False, True]


@pytest.mark.parametrize("count", [1, 2])
def test_an_ended_episode_shows_its_end_while_its_world_goes_on(count):
    env = env_of(*[Slider(count, goal=0.5)] * (3 - count) if count == 2 else [Slider(1, goal=0.5) for _ in range(2)])
    env.reset([0, 1], [0, 0])
    step = env.step(np.array([1.0, 0.1])[:, None, None].repeat(3, 1))
    assert step.cause == ("success", "")
    assert step.obs.state[:, 0].tolist() == pytest.approx([1.01, 0.33], abs=1e-6)
    assert step.obs.images["front"][:, 0, 0, 0].tolist() == [909 % 256, 297 % 256]
    later = env.step(np.ones((2, 1, 1)))
    assert later.obs.state[0, 0] == step.obs.state[0, 0] and later.obs.images["front"][0, 0, 0, 0] == 909 % 256


def test_a_snapshot_of_an_ended_episode_shows_its_end_again():
    env = env_of(Slider(1, goal=0.5), Slider(1))
    env.reset([0, 1], [0, 0])
    step = env.step(np.full((2, 3, 1), 0.3))
    saved = env.snapshot([0, 1])
    env.reset([0, 1], [5, 6])
    assert env.restore([0, 1], saved).state.tolist() == step.obs.state.tolist()
    assert env.step(np.full((2, 1, 1), 0.3)).cause == ("success", "")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_too_many_simulations_on_the_processor_are_refused(monkeypatch):
    monkeypatch.setattr(build, "process_bytes", lambda: 10**8 + 3 * 10**6 * len(made))
    monkeypatch.setattr("sims.base.free_bytes", lambda device: 10**9)
    made: list[Slider] = []
    sentence = r"^400 environments of 3\.00 MB each do not fit the 1\.0 GB .*'cpu'.*; 300 fit"
    with pytest.raises(UserError, match=sentence):
        build.worlds_of(400, "cpu", lambda size: made.append(Slider(size)) or made[-1])
    assert len(made) == 64 and all(world.closed == 1 for world in made)
    made.clear()
    assert len(build.worlds_of(300, "cpu", lambda size: made.append(Slider(size)) or made[-1])) == 300


def test_too_many_environments_on_a_gpu_are_refused(monkeypatch):
    made: list[Slider] = []

    def free(device):
        return 10**9 - sum(10**8 + 2 * 10**6 * world.num_envs for world in made if not world.closed)

    for place in ("sims.maniskill.build.free_bytes", "sims.base.free_bytes"):
        monkeypatch.setattr(place, free)
    with pytest.raises(UserError, match=r"^512 environments of 2\.00 MB each do not fit .* 'cuda'.*; 450 fit"):
        build.worlds_of(512, "cuda", lambda size: made.append(Slider(size)) or made[-1])
    assert [world.num_envs for world in made] == [32, 64] and all(world.closed == 1 for world in made)
    made.clear()
    (world,) = build.worlds_of(400, "cuda", lambda size: made.append(Slider(size)) or made[-1])
    assert world.num_envs == 400 and len(made) == 3
    env = env_of(world, kind=ManiSkillEnv)
    env.close(), env.close()
    assert world.closed == 1


# -- actions -----------------------------------------------------------------------------------------------------------


class PDJointPosController:
    pass


class PDJointPosMimicController(PDJointPosController):
    pass


class PDEEPosController(PDJointPosController):
    pass


class PDEEPoseController(PDEEPosController):
    pass


class PDJointVelController:
    pass


def part(kind, low, high, joints=(), normalize_action=True, controlled=None, **config):
    made, bounds = kind(), SimpleNamespace(low=np.float32(low), high=np.float32(high))
    ones = SimpleNamespace(low=-np.ones(len(low), np.float32), high=np.ones(len(low), np.float32))
    made.config = SimpleNamespace(normalize_action=normalize_action, **config)
    made.joints = [SimpleNamespace(name=name, type=[type]) for name, type in joints]
    made.single_action_space = ones if normalize_action else bounds
    if normalize_action:
        made._original_single_action_space = bounds
    if controlled is not None:
        made.control_joint_indices = torch.tensor(controlled)
    return made


FINGERS = (("left", "prismatic"), ("right", "prismatic"))
GRIPPER = {"low": [-0.01], "high": [0.04], "joints": FINGERS, "controlled": [0]}


def combined(**controllers):
    return SimpleNamespace(controllers=controllers)


def test_joints_change_in_radians_and_the_gripper_in_metres():
    arm = part(PDJointPosController, [-0.1, -0.1], [0.1, 0.1], joints=(("a", "revolute"), ("b", "revolute")))
    found = controls_of(combined(arm=arm, gripper=part(PDJointPosMimicController, **GRIPPER)))
    assert found.spec.names == ("a", "b", "left") and found.spec.unit == "rad,rad,m" and found.spec.shape == (3,)
    assert found.spec.low == pytest.approx((-0.1, -0.1, -0.01)) and found.spec.high == pytest.approx((0.1, 0.1, 0.04))
    low, high = np.float32(found.spec.low), np.float32(found.spec.high)
    theirs = found.theirs(np.stack([low, high, (low + high) / 2]))
    np.testing.assert_allclose(theirs, [[-1] * 3, [1] * 3, [0] * 3], atol=1e-6)
    np.testing.assert_allclose(found.theirs(np.float32([0.05, 0.0, 0.0275])), [0.5, 0, 0.5], atol=1e-6)


def test_a_rotation_turns_the_way_that_its_action_says():
    """Although ManiSkill multiplies it by the lower bound."""
    bounds = [-0.1] * 3 + [-0.2] * 3, [0.1] * 3 + [0.2] * 3
    arm = part(PDEEPoseController, *bounds, rot_lower=-0.2, frame="root_translation")
    found = controls_of(arm)
    assert found.spec.names == ("x", "y", "z", "rx", "ry", "rz") and found.spec.unit == "m,m,m,rad,rad,rad"
    assert found.spec.frame == "root_translation" and found.spec.high == pytest.approx((0.1,) * 3 + (0.2,) * 3)
    theirs = found.theirs(np.float32([0.05, -0.1, 0, 0.1, -0.2, 0]))
    np.testing.assert_allclose(theirs, [0.5, -1, 0, -0.5, 1, 0], atol=1e-6)
    np.testing.assert_allclose(theirs[3:] * arm.config.rot_lower, [0.1, -0.2, 0], atol=1e-7)


def test_rates_have_units_of_rates_and_two_robots_are_in_order():
    rates = part(PDJointVelController, [-1], [1], joints=(("a", "revolute"),))
    hand, lift = part(PDJointPosMimicController, **GRIPPER), (("a", "revolute"), ("lift", "prismatic"))
    arm = part(PDJointPosController, [-2.9, 0], [2.9, 0.4], lift, normalize_action=False)  # passed on as it is
    found = controls_of({"one": combined(arm=rates), "two": combined(arm=arm, hand=hand)})
    assert found.spec.names == ("one_a", "two_a", "two_lift", "two_left") and found.spec.unit == "rad/s,rad,m,m"
    assert found.robots == {"one": slice(0, 1), "two": slice(1, 4)}
    assert found.theirs(np.float32([1, 1.5, 0.25, 0.04])).tolist() == [1, 1.5, 0.25, 1]


# -- seeds -------------------------------------------------------------------------------------------------------------

DRAWS = {
    "rand of a shape": lambda rows: torch.rand((rows, 2)),
    "rand of numbers": lambda rows: torch.rand(rows, 2),
    "rand by name": lambda rows: torch.rand(size=(rows, 3), dtype=torch.float64),
    "randn": lambda rows: torch.randn(rows, 2),
    "randn of rows": lambda rows: torch.randn((rows,)),
    "randint up to": lambda rows: torch.randint(1000, (rows, 2)),
    "randint between": lambda rows: torch.randint(5, 1000, (rows,)),
    "randint by name": lambda rows: torch.randint(low=5, high=1000, size=(rows,)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_row_draws_what_it_draws_alone(draw):
    seeds = [7, 2**40 + 3, 7]
    with SeededRows(seeds):
        found, then = draw(3), torch.rand(3)
    assert found.shape[0] == 3 and torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    for row, seed in enumerate(seeds):
        torch.manual_seed(seed % 2**32)
        assert torch.equal(found[row : row + 1], draw(1)) and torch.equal(then[row : row + 1], torch.rand(1))


def test_draws_of_other_sizes_are_left_alone():
    generator = torch.Generator().manual_seed(1)
    with SeededRows([1, 2]):
        torch.manual_seed(5)
        inside = torch.rand(4), torch.rand(()), torch.rand(2, generator=generator), torch.zeros(2)
    torch.manual_seed(5)
    outside = torch.rand(4), torch.rand(()), torch.rand(2, generator=generator.manual_seed(1)), torch.zeros(2)
    assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True))


# -- drivers -----------------------------------------------------------------------------------------------------------


def test_a_driver_too_old_or_missing_is_told_with_its_cure():
    old, new = Driver("llvmpipe", (22, 3), True), Driver("llvmpipe", (25, 0), True)
    gpu = Driver("NVIDIA H200", (0, 0), False)
    for found, sentence in (
        ([], "there is no driver, so ManiSkill cannot build.*backports mesa-vulkan-drivers.*sims install maniskill"),
        ([old], "llvmpipe, Mesa 22.3 is older than 24.3, so ManiSkill cannot build.*backports.*sims install maniskill"),
        ([old, new], r"works \(llvmpipe, Mesa 25.0\)"),
        ([gpu], r"works \(NVIDIA H200\)"),
    ):
        assert re.match(sentence, verdict(found))


# -- words and refusals ------------------------------------------------------------------------------------------------


def test_a_task_says_what_it_asks_for():
    assert instruction_of("PickCube-v1") == INSTRUCTIONS["PickCube-v1"]
    speaking = SimpleNamespace(get_language_instruction=lambda: ["put carrot on plate"])
    assert instruction_of("PutCarrotOnPlateInScene-v1", speaking) == "put carrot on plate"
    assert instruction_of("TurnFaucet-v1") == "turn faucet"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"obs": "rbg"}, r"no obs 'rbg'.*did you mean 'rgb'\?"),
        ({"reward": "dens"}, r"no reward 'dens'.*did you mean 'dense'\?"),
        ({"image_size": 0}, "image_size=0 is less than 1"),
        ({"num_envs": 0}, "num_envs=0 is less than 1"),
        ({}, r"ManiSkill is not installed here.*pip install 'vla-rl\[maniskill\]'"),
    ],
)
def test_a_wrong_option_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make_in_process(**{"num_envs": 1, **options})


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("failed to find a rendering device"), "no Vulkan driver that it can use.*run 'vla-rl inspect'"),
        (RuntimeError("vk::createInstanceUnique: ErrorIncompatibleDriver"), "no Vulkan driver.*run 'vla-rl inspect'"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "memory is too small for these environments.*give fewer"),
        (KeyError("pd_nothing"), r"cannot build PickCube-v1 with .*it said.*pd_nothing.*correct the options"),
    ],
)
def test_what_cannot_be_built_says_why(error, sentence):
    refusal = _refusal("PickCube-v1", {"control_mode": "pd_nothing"}, error, "asked\nit said\n")
    with pytest.raises(UserError, match=sentence):
        raise refusal
