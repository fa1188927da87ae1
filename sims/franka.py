"""A Franka arm whose gripper points straight down at the tabletop: where its joints are for a position.

The arm stands beyond the table and faces the camera, so that it hides no cube.  Its shoulder stays in the vertical
plane through its base and the gripper (joints 3 and 5 at 0), where two links with a right angle at the elbow reach
the wrist: the law of cosines gives the joints, without iterations and for every position the same.
"""

from __future__ import annotations

from math import atan2, hypot, pi

from array_api_compat import array_namespace

from vla_rl.contract.env import Array

ARM = 7  # joints; then two fingers

# From the base to the flange, metres (franka_emika_panda of MuJoCo Menagerie and of ManiSkill).
_SHOULDER, _UPPER, _ELBOW, _LOWER, _WRIST, _FLANGE = 0.333, 0.316, 0.0825, 0.384, 0.088, 0.107
_HAND_TURN = pi / 4  # of the last joint, for fingers that open across the picture when the arm is straight


def joints_at(pinch: Array, base: tuple[float, float], pads: float) -> Array:
    """The seven joints [R,7] (radians) with the pinch point at ``pinch`` [R,3], in the table's frame.

    base  where the arm stands, (x, y)
    pads  from the hand to the point between the finger pads; all in metres
    """
    xp = array_namespace(pinch)
    x, y, z = pinch[:, 0], pinch[:, 1], pinch[:, 2]
    forward, left = base[1] - y, x - base[0]  # in the base's frame
    reach = xp.hypot(forward, left) - _WRIST
    height = z + pads + _FLANGE - _SHOULDER
    upper, lower = hypot(_UPPER, _ELBOW), hypot(_LOWER, _ELBOW)
    distance = xp.hypot(reach, height)
    at_shoulder = xp.acos((distance**2 + upper**2 - lower**2) / (2 * distance * upper))
    at_elbow = xp.acos((upper**2 + lower**2 - distance**2) / (2 * upper * lower))
    turn = xp.atan2(left, forward)
    # The links bend by the elbow's offset: straight lines between the joints are turned by fixed angles.
    bends = atan2(_ELBOW, _UPPER), atan2(_ELBOW, _LOWER)
    shoulder = xp.atan2(reach, height) - at_shoulder - bends[0]
    elbow = at_elbow - pi - sum(bends)
    wrist = shoulder - elbow  # so that the hand points down
    zero = xp.zeros_like(turn)
    return xp.stack([turn, shoulder, zero, elbow, zero, wrist, turn + _HAND_TURN], axis=1)
