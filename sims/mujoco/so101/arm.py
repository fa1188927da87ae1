"""The SO-101's kinematics, in numpy: where the gripper is, and which joints bring it somewhere.

Lengths, axes and joint limits are those of the published model, TheRobotStudio/SO-ARM100
``Simulation/SO101/so101_new_calib.xml`` (every joint's zero is the middle of its range).  World frame: that of the
robot's base, x ahead, z up; metres and radians.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LOW = np.array([-1.91986, -1.74533, -1.69, -1.65806, -2.74385, -0.174533])
HIGH = np.array([1.91986, 1.74533, 1.69, 1.65806, 2.84121, 1.745329])


class Link(NamedTuple):
    """The frame of a body in that of the body before it; its joint turns it about its z axis."""

    name: str
    position: tuple[float, float, float]
    quaternion: tuple[float, float, float, float]  # w, x, y, z


_H = float(np.sqrt(0.5))
LINKS = (
    Link("shoulder", (0.0388353, 0.0, 0.0624), (0.0, 0.0, 1.0, 0.0)),
    Link("upper_arm", (-0.0303992, -0.0182778, -0.0542), (0.5, -0.5, -0.5, -0.5)),
    Link("lower_arm", (-0.11257, -0.028, 0.0), (_H, 0.0, 0.0, _H)),
    Link("wrist", (-0.1349, 0.0052, 0.0), (_H, 0.0, 0.0, -_H)),
    Link("gripper", (0.0, -0.0611, 0.0181), (0.0172091, -0.0172091, 0.706897, 0.706897)),
    Link("moving_jaw", (0.0202, 0.0188, -0.0234), (_H, _H, 0.0, 0.0)),
)
FRAME = (-0.0079, -0.000218121, -0.0981274)  # the published "gripperframe", in the gripper's frame: its fixed jaw's tip
PINCH = np.array([0.0101, -0.0002, -0.0885])  # in the gripper's frame: the centre of a cube that it holds
_STEPS, _DAMPING, _LONGEST = 12, 1e-6, 0.3  # of the solver; its longest step in radians


def closing_angle(opening: Any) -> Any:
    """The gripper joint's angle in radians for an ``opening`` from 0 (closed) to 1: an array or a number."""
    return float(LOW[5]) + opening * float(HIGH[5] - LOW[5])


def opening(angle: Any) -> Any:
    """The opening of the gripper, of which :func:`closing_angle` is the angle."""
    return (angle - float(LOW[5])) / float(HIGH[5] - LOW[5])


def pinch_point(joints: np.ndarray) -> np.ndarray:
    """[E,3]: where a cube's centre is held, for ``joints`` [E,5 or more] in radians."""
    rotation, origin, _, _ = _forward(joints)
    return np.asarray(origin + rotation @ PINCH)


def solve(places: np.ndarray, roll: float = 0.0) -> np.ndarray:
    """[E,5]: joints that bring the pinch point to ``places`` [E,3] with the gripper pointing down, or nearly.

    Damped least squares (Wampler 1986) from a pose in the middle, for three coordinates and the gripper's pitch, which
    is the sum of three joints.  Where the wrist cannot bend as far, the gripper points ahead; a place out of reach is
    approached.
    """
    joints = np.tile(_MIDDLE, (len(places), 1))
    joints[:, 0], joints[:, 4] = -np.arctan2(places[:, 1], places[:, 0] - LINKS[0].position[0]), roll
    for _ in range(_STEPS):
        rotation, origin, axes, origins = _forward(joints)
        point = origin + rotation @ PINCH
        pitch = _DOWN - joints[:, 1:4].sum(1)
        free = (joints[:, 3] < HIGH[3]) | (pitch < 0)  # to bend the wrist further
        missing = np.concatenate([places - point, (pitch * free)[:, None]], axis=1)
        jacobian = np.zeros((len(places), 4, 4))
        jacobian[:, :3] = np.cross(axes[:, :4], point[:, None] - origins[:, :4]).transpose(0, 2, 1)
        jacobian[:, 3, 1:] = free[:, None]
        jacobian[:, :, 3] *= free[:, None]
        transposed = jacobian.transpose(0, 2, 1)
        step = transposed @ np.linalg.solve(jacobian @ transposed + _DAMPING * np.eye(4), missing[..., None])
        joints[:, :4] += np.clip(step[..., 0], -_LONGEST, _LONGEST)
        joints[:, :4] = np.clip(joints[:, :4], LOW[:4], HIGH[:4])
    return joints


def _forward(joints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The gripper's rotation [E,3,3] and origin [E,3]; axes and origins [E,5,3] of the five joints before the jaw."""
    rotation, origin = np.tile(np.eye(3), (len(joints), 1, 1)), np.zeros((len(joints), 3))
    axes, origins = np.empty((len(joints), 5, 3)), np.empty((len(joints), 5, 3))
    for i, link in enumerate(LINKS[:5]):
        origin = origin + rotation @ np.array(link.position)
        rotation = rotation @ _matrix(link.quaternion)
        axes[:, i], origins[:, i] = rotation[:, :, 2], origin
        cos, sin = np.cos(joints[:, i]), np.sin(joints[:, i])
        turn = np.zeros((len(joints), 3, 3))
        turn[:, 0, 0], turn[:, 0, 1], turn[:, 1, 0], turn[:, 1, 1], turn[:, 2, 2] = cos, -sin, sin, cos, 1.0
        rotation = rotation @ turn
    return rotation, origin, axes, origins


def _matrix(quaternion: tuple[float, float, float, float]) -> np.ndarray:
    w, x, y, z = np.array(quaternion) / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


_DOWN = np.pi / 2
_MIDDLE = np.array([0.0, 0.0, 0.0, np.pi / 2, 0.0])
