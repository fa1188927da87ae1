"""The SO-101 on the tabletop: kinematics, servos, rules, expert, pictures."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sims.mujoco.tasks import so101 as arm
from sims.mujoco.tasks.so101 import ROLL, So101, So101Expert, So101Lift, potential
from vla_rl.contract.errors import UserError


@pytest.fixture
def so101(build):
    return lambda num_envs, **options: build("so101", num_envs=num_envs, **{"render": False, "threads": 1, **options})


@pytest.fixture
def scene():
    """The model with one cube, and data that a test may pose."""
    model = So101().build_model(1, 0)
    return model, mujoco.MjData(model)


def play(env, seeds, horizon=1):
    """Let the expert act to the end; the last Step, and the observations before every decision."""
    obs, expert, seen = env.reset(np.arange(len(seeds)), seeds), So101Expert(horizon), []
    while True:
        seen.append(obs)
        step = env.step(expert.act(obs))
        obs = step.obs
        if step.done.all():
            return step, seen


def hold(env, target, steps):
    """The last observation after commanding ``target`` [6] for so many control steps."""
    return env.step(np.tile(np.asarray(target, np.float32), (env.num_envs, steps, 1))).obs


# -- kinematics --------------------------------------------------------------------------------------------------------


def test_the_solver_knows_where_mujoco_puts_the_gripper(scene):
    model, data = scene
    rng = np.random.default_rng(0)
    for joints in rng.uniform(arm.LOW, arm.HIGH, (20, 6)):
        data.qpos[:6] = joints
        mujoco.mj_kinematics(model, data)
        gripper = data.body("gripper")
        there = gripper.xpos + gripper.xmat.reshape(3, 3) @ arm.PINCH
        assert np.allclose(arm.pinch_point(joints[None])[0], there, atol=1e-9)


def test_joints_and_their_limits_are_the_published_ones(scene):
    """Of ``so101_new_calib.xml``, in degrees: 110, 100, 97, 95, -157 to 163, -10 to 100."""
    model, _ = scene
    degrees = np.rad2deg([model.joint(name).range for name in arm.JOINTS])
    expected = [(-110, 110), (-100, 100), (-96.8, 96.8), (-95, 95), (-157.2, 162.8), (-10, 100)]
    assert np.allclose(degrees, expected, atol=0.1)


def test_at_zero_the_arm_reaches_ahead(scene):
    """The published lengths by hand: upper arm up from the shoulder, lower arm and gripper ahead."""
    model, data = scene
    mujoco.mj_kinematics(model, data)
    ahead = 0.0388353 + 0.0303992 + 0.028 + 0.1349 + 0.0611 + 0.0981274
    above = 0.0624 + 0.0542 + 0.11257 + 0.0052
    sideways, up = 0.0, -0.0079  # the jaw's tip lies beside the wrist's axis
    assert np.allclose(data.site("gripperframe").xpos, [ahead, sideways, above + up], atol=1e-3)


def test_solved_joints_reach_their_places_and_point_down():
    away, angle, height = np.meshgrid([0.15, 0.2, 0.25], [-0.6, 0.0, 0.6], [0.018, 0.06, 0.12])
    x = arm.LINKS[0].position[0] + away * np.cos(angle)
    places = np.stack([x, away * np.sin(angle), height], -1).reshape(-1, 3)
    joints = arm.solve(places, ROLL)
    assert np.abs(arm.pinch_point(joints) - places).max() < 1e-4
    assert (joints >= arm.LOW[:5]).all() and (joints <= arm.HIGH[:5]).all()
    down = np.abs(joints[:, 1:4].sum(1) - np.pi / 2) < 1e-4
    assert down[places[:, 2] < 0.02].all() and (down | (joints[:, 3] == arm.HIGH[3])).all()


def test_the_gripper_is_an_opening_from_0_to_1(scene):
    assert arm.closing_angle(0.0) == pytest.approx(arm.LOW[5]) and arm.closing_angle(1.0) == pytest.approx(arm.HIGH[5])
    assert arm.opening_of(arm.closing_angle(0.3)) == pytest.approx(0.3)
    model, data = scene
    for angle in (0.0, 0.35, 1.0):
        data.qpos[5] = angle
        mujoco.mj_kinematics(model, data)
        frame = data.body("gripper").xmat.reshape(3, 3)
        pad = data.geom("moving_jaw")
        face = pad.xpos - pad.xmat.reshape(3, 3)[:, 0] * 0.004  # the side towards the fixed jaw
        gap = (frame.T @ (face - data.body("gripper").xpos))[0] - -0.0079
        assert So101().opening(data.qpos[None])[0] == pytest.approx(gap, abs=1e-4)


# -- commands and measurements -----------------------------------------------------------------------------------------


def test_actions_are_targets_for_what_the_state_measures(so101):
    env = so101(2)
    assert env.spec.action.names == env.spec.state.names
    assert env.spec.state.names[0] == "shoulder_pan.pos" and env.spec.state.names[-1] == "gripper.pos"
    env.reset([0, 1], [1, 2])
    target = [0.3, -0.2, 0.4, 1.2, 1.0, 0.7]
    # The gripper hangs on the longest lever: the sag of a servo stays below half a degree.
    assert np.abs(hold(env, target, 25).state - target).max() < 0.009


def test_a_servo_follows_a_step_in_a_tenth_of_a_second(so101):
    env = so101(1)
    start = env.reset([0], [1]).state[0].copy()
    target = start + np.array([0.15, 0, 0, 0, 0, 0], np.float32)
    after = np.stack([hold(env, target, 1).state[0] for _ in range(6)])[:, 0] - start[0]
    assert 0.02 < after[0] < 0.14 and np.allclose(after[2:], 0.15, atol=0.02)


def test_the_arm_starts_elsewhere_within_reach(so101):
    env = so101(1)
    here = arm.pinch_point(env.reset([0], [3]).state.astype(float))[0]
    values = {"gripper_x": np.array([0.02]), "gripper_y": np.array([-0.03]), "gripper_z": np.array([0.01])}
    moved = arm.pinch_point(env.reset([0], [3], parameters=values).state.astype(float))[0]
    assert np.allclose(moved - here, [0.02, -0.03, 0.01], atol=1e-3)


# -- the task ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_expert_succeeds_in_95_of_100_scenes(so101):
    step, _ = play(so101(100), np.arange(5000, 5100))
    assert step.success.sum() >= 95
    assert 15 < step.obs.time.mean() < 75  # the work of one to three seconds


def test_the_expert_succeeds_in_chunks_among_cubes_and_at_50_hz(so101):
    for options, horizon in (({}, 16), ({"cubes": 2, "colours": 4, "control_hz": 50}, 8)):
        env = so101(10, **options)
        step, seen = play(env, np.arange(10), horizon)
        assert step.success.sum() >= 9, options
        assert env.spec.time_limit == 6 / env.spec.control_dt == 6 * options.get("control_hz", 25)
        first, last = potential(seen[0]), potential(step.obs)[step.success]
        assert (first < 0.4).all() and (last > 0.85).all()


def test_impossible_variants_are_refused():
    assert So101Lift().texts == ("pick up the red cube",)
    with pytest.raises(UserError, match=r"so101 has no variant cubes=0.*give 1 to 4 cubes"):
        So101Lift(cubes=0)
    with pytest.raises(UserError, match=r"control_hz=30 is no whole number of physics steps of 5 ms.*20, 25, 40, 50"):
        So101(30)


def test_lifting_another_cube_is_a_failure(so101):
    env = so101(6, cubes=2, colours=4)
    obs, expert = env.reset(np.arange(6), np.arange(6)), So101Expert()
    while True:
        cubes = obs.extras["privileged/cubes"].reshape(6, 2, 3)
        named = (cubes == obs.extras["privileged/target"][:, None]).all(-1)
        obs.extras["privileged/target"][:] = cubes[~named]
        step = env.step(expert.act(obs))
        obs = step.obs
        if step.done.all():
            break
    assert list(step.cause).count("wrong_object") >= 5 and not step.success.any()


# -- pictures ----------------------------------------------------------------------------------------------------------


def redness(image):
    return (image[..., 0] > 60) & (image[..., 0] > 3 * image[..., 1].astype(int))


def test_the_wrist_camera_sees_the_cube_between_the_jaws(so101):
    env = so101(1, render=True, cameras=("front", "wrist"))
    step, seen = play(env, [3])
    held, start = step.obs.images["wrist"][0], seen[0].images["wrist"][0]
    middle = np.s_[24:60, 16:48]
    assert redness(held)[middle].mean() > 0.3 > redness(start)[middle].mean()
    assert redness(seen[0].images["front"][0]).sum() > 15
