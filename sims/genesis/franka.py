"""The Franka arm that Genesis brings: where its joints are for a gripper that points straight down.

The arm stands beyond the table and faces the camera, so that it hides no cube.  Its shoulder stays in the vertical
plane through its base and the gripper (joints 3 and 5 at 0), where two links with a right angle at the elbow reach
the wrist: the law of cosines gives the joints, without iterations and for every position the same.
"""

from __future__ import annotations

from math import atan2, hypot, pi

import torch
from torch import Tensor

MODEL = "xml/franka_emika_panda/panda.xml"  # below Genesis' assets
HAND = "hand"  # the link
BASE = (0.0, 0.5, 0.0)  # metres, in the table's frame
BASE_TURN = -pi / 2  # radians about the vertical: its front faces the camera
ARM = 7  # joints; then two fingers

# From the base to the gripper, metres (franka_emika_panda of MuJoCo Menagerie, which Genesis brings).
_SHOULDER, _UPPER, _ELBOW, _LOWER, _WRIST = 0.333, 0.316, 0.0825, 0.384, 0.088
_FLANGE, _PADS = 0.107, 0.1029  # from the wrist to the hand, and from the hand to the point between the finger pads
PINCH = (0.0, 0.0, _PADS)  # the pinch point in the hand's frame
_HAND_TURN = pi / 4  # of the last joint, for fingers that open across the picture when the arm is straight

# Position gains, velocity gains and largest forces (N m, N) of the joints and the fingers.
STIFFNESS = (4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0, 500.0, 500.0)
DAMPING = (300.0, 300.0, 200.0, 200.0, 60.0, 60.0, 60.0, 12.0, 12.0)
FORCE = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0, 12.0, 12.0)


def joints_at(pinch: Tensor) -> Tensor:
    """The seven joints [R,7] (radians) with the pinch point at ``pinch`` [R,3] (metres, within the workspace)."""
    x, y, z = pinch.unbind(1)
    forward, left = BASE[1] - y, x - BASE[0]  # in the base's frame
    reach = torch.hypot(forward, left) - _WRIST
    height = z + _PADS + _FLANGE - _SHOULDER
    upper, lower = hypot(_UPPER, _ELBOW), hypot(_LOWER, _ELBOW)
    distance = torch.hypot(reach, height)
    at_shoulder = torch.acos((distance**2 + upper**2 - lower**2) / (2 * distance * upper))
    at_elbow = torch.acos((upper**2 + lower**2 - distance**2) / (2 * upper * lower))
    turn = torch.atan2(left, forward)
    # The links bend by the elbow's offset: straight lines between the joints are turned by fixed angles.
    bends = atan2(_ELBOW, _UPPER), atan2(_ELBOW, _LOWER)
    shoulder = torch.atan2(reach, height) - at_shoulder - bends[0]
    elbow = at_elbow - pi - sum(bends)
    wrist = shoulder - elbow  # so that the hand points down
    zero = torch.zeros_like(turn)
    return torch.stack([turn, shoulder, zero, elbow, zero, wrist, turn + _HAND_TURN], dim=1)
