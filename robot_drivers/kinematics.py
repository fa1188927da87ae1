"""Where the points of an arm are: forward kinematics of a serial chain of revolute joints, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vla_rl.contract.errors import ContractError

Vector = tuple[float, float, float]


@dataclass(frozen=True)
class Link:
    """A joint and the rigid body that it turns.

    ``offset`` [3] (m) and ``rotation`` (unit quaternion w, x, y, z) place the joint's frame in that of the link
    before, at angle 0; ``axis`` [3] is in the joint's own frame.
    """

    joint: str
    offset: Vector
    rotation: tuple[float, float, float, float]
    axis: Vector = (0.0, 0.0, 1.0)
    zero: float = 0.0
    turn: float = 1.0


@dataclass(frozen=True)
class Point:
    """A ball of ``radius`` (m) around ``at`` [3] (m) in the frame of link number ``link``; -1 is the base."""

    name: str
    link: int
    at: Vector
    radius: float = 0.0


@dataclass(frozen=True)
class Chain:
    """Links, each on the one before, the first on the base; and the points that stand for the arm's shape.

    The last point is the tool: what "the position of the gripper" means.  ``apart`` names pairs of points whose balls
    may not touch.
    """

    links: tuple[Link, ...]
    points: tuple[Point, ...]
    apart: tuple[tuple[str, str], ...] = ()

    @property
    def joints(self) -> tuple[str, ...]:
        """The names of the joints, in the order of the angles [J]."""
        return tuple(link.joint for link in self.links)

    def columns(self, names: Sequence[str]) -> tuple[int, ...]:
        """Where the joints are among ``names``; raises ContractError where one is missing."""
        missing = [joint for joint in self.joints if joint not in names]
        if missing:
            raise ContractError(
                f"The kinematics have the joints {', '.join(missing)}, which are not among {', '.join(names)}, so "
                "nobody knows where the arm is; give the kinematics of this arm."
            )
        return tuple(list(names).index(joint) for joint in self.joints)

    @cached_property
    def _placed(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Of each link: offset [3], rotation [3, 3], the cross product with its axis [3, 3] and its square."""
        crosses = [_cross(link.axis) for link in self.links]
        return [
            (np.asarray(link.offset), _matrix(link.rotation), cross, cross @ cross)
            for link, cross in zip(self.links, crosses, strict=True)
        ]

    def positions(self, angles: np.ndarray) -> np.ndarray:
        """The points [N, P, 3] (m, in the base's frame) at positions ``angles`` [N, J] of the joints."""
        turns = np.array([link.turn for link in self.links])
        angles = np.array([link.zero for link in self.links]) + np.asarray(angles, np.float64) * turns
        base = np.broadcast_to(np.eye(3), (len(angles), 3, 3))
        origin, rotation = np.zeros((len(angles), 3)), base
        origins, rotations = [], []
        for joint, (offset, placed, cross, square) in enumerate(self._placed):
            sine, cosine = np.sin(angles[:, joint])[:, None, None], np.cos(angles[:, joint])[:, None, None]
            turned = np.eye(3) + sine * cross + (1 - cosine) * square  # Rodrigues
            origin, rotation = origin + rotation @ offset, rotation @ placed @ turned
            origins.append(origin)
            rotations.append(rotation)
        links = [point.link for point in self.points]  # the base is number -1, the last
        at = np.asarray([point.at for point in self.points])
        of_links = np.stack([*rotations, base], 1)[:, links]
        return np.stack([*origins, np.zeros((len(angles), 3))], 1)[:, links] + np.einsum("npij,pj->npi", of_links, at)


def _cross(axis: Vector) -> np.ndarray:
    x, y, z = axis
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]], np.float64)


def _matrix(quaternion: tuple[float, float, float, float]) -> np.ndarray:
    w, x, y, z = np.asarray(quaternion) / np.linalg.norm(quaternion)
    cross = _cross((x, y, z))
    return np.asarray(np.eye(3) + 2 * w * cross + 2 * cross @ cross)


_HALF = 0.7071067811865476


def so101() -> Chain:
    """The SO-101 (follower).

    Lengths and frames: TheRobotStudio/SO-ARM100, ``Simulation/SO101/so101_new_calib.xml``, in which the zero of every
    joint is the middle of its range, as in LeRobot's calibration.  The radii of the points are ours: half of a servo's
    diagonal along the arm, a finger's thickness at the tips; so are base, shoulder and the moving jaw's tip.
    """
    return Chain(
        links=(
            Link("shoulder_pan", (0.0388353, 0.0, 0.0624), (0.0, 0.0, 1.0, 0.0)),
            Link("shoulder_lift", (-0.0303992, -0.0182778, -0.0542), (0.5, -0.5, -0.5, -0.5)),
            Link("elbow_flex", (-0.11257, -0.028, 0.0), (_HALF, 0.0, 0.0, _HALF)),
            Link("wrist_flex", (-0.1349, 0.0052, 0.0), (_HALF, 0.0, 0.0, -_HALF)),
            Link("wrist_roll", (0.0, -0.0611, 0.0181), (0.0172091, -0.0172091, 0.706897, 0.706897)),
            Link("gripper", (0.0202, 0.0188, -0.0234), (_HALF, _HALF, 0.0, 0.0), zero=-0.174533, turn=1.919862),
        ),
        points=(
            Point("base", -1, (0.01, 0.0, 0.03), 0.035),
            Point("shoulder", 0, (-0.0304, 0.0, -0.0542), 0.03),
            Point("elbow", 1, (-0.11257, -0.028, 0.0182), 0.03),
            Point("forearm", 2, (-0.0675, -0.013, 0.0182), 0.03),
            Point("wrist", 2, (-0.1349, 0.0052, 0.0182), 0.03),
            Point("gripper", 4, (0.0, 0.0, -0.0234), 0.03),
            Point("jaw", 5, (-0.0156, -0.0775, 0.0188), 0.01),
            Point("tool", 4, (-0.0079, -0.000218121, -0.0981274), 0.005),
        ),
        apart=tuple((moved, fixed) for moved in ("gripper", "jaw", "tool") for fixed in ("base", "shoulder")),
    )
