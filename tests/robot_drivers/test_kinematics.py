"""Forward kinematics against MuJoCo and the published lengths."""

from __future__ import annotations

import numpy as np
import pytest

from robot_drivers.kinematics import so101
from vla_rl.contract.errors import ContractError

SO101 = so101()


def mjcf(chain):
    """The chain as a MuJoCo model with a site at each point."""
    text = ""
    for number, link in reversed(list(enumerate(chain.links))):
        sites = "".join(
            f'<site name="{p.name}" pos="{" ".join(map(str, p.at))}"/>' for p in chain.points if p.link == number
        )
        place = f'pos="{" ".join(map(str, link.offset))}" quat="{" ".join(map(str, link.rotation))}"'
        joint = f'<joint name="{link.joint}" axis="{" ".join(map(str, link.axis))}"/><geom size=".01"/>'
        text = f"<body {place}>{joint}{sites}{text}</body>"
    return f"<mujoco><worldbody>{text}</worldbody></mujoco>"


def test_points_are_where_mujoco_puts_them():
    mujoco = pytest.importorskip("mujoco")
    model = mujoco.MjModel.from_xml_string(mjcf(SO101))
    data, poses = mujoco.MjData(model), np.random.default_rng(0).uniform(-1.6, 1.6, (5, 6))
    for angles, points in zip(poses, SO101.positions(poses), strict=True):
        data.qpos[:] = [link.zero + link.turn * q for link, q in zip(SO101.links, angles, strict=True)]
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(points[1:], [data.site(point.name).xpos for point in SO101.points[1:]], atol=1e-9)
        np.testing.assert_array_equal(points[0], SO101.points[0].at)


def test_the_so101_is_stretched_out_forward_at_zero():
    """39 cm before its base and 23 cm above it, by the published frames."""
    np.testing.assert_allclose(SO101.positions(np.zeros((1, 6)))[0, -1], [0.3914, 0.0, 0.2265], atol=1e-4)


def test_the_simulated_so101_is_the_same_arm():
    arm = pytest.importorskip("sims.mujoco.tasks.so101")
    for link, simulated in zip(SO101.links, arm.LINKS, strict=True):
        np.testing.assert_allclose(link.offset, simulated.position, atol=1e-6)
        np.testing.assert_allclose(link.rotation, simulated.quaternion, atol=1e-6)
    gripper = SO101.links[-1]
    assert (gripper.zero, gripper.zero + gripper.turn) == pytest.approx((arm.LOW[5], arm.HIGH[5]), abs=1e-5)
    assert SO101.joints == arm.JOINTS and SO101.points[-1].at == arm.FRAME


def test_kinematics_of_another_arm_are_refused():
    with pytest.raises(ContractError, match="wrist_flex, wrist_roll, gripper"):
        SO101.columns(("shoulder_pan", "shoulder_lift", "elbow_flex"))
