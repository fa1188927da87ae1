"""The Franka arm that Genesis brings: where it stands, what drives its joints, and where they are for a position."""

from __future__ import annotations

from math import pi

from torch import Tensor

from sims import franka

MODEL = "xml/franka_emika_panda/panda.xml"  # below Genesis' assets
HAND = "hand"  # the link
BASE = (0.0, 0.5, 0.0)  # metres, in the table's frame
BASE_TURN = -pi / 2  # radians about the vertical: its front faces the camera
ARM = franka.ARM

_PADS = 0.1029  # metres from the hand to the point between the finger pads
PINCH = (0.0, 0.0, _PADS)  # the pinch point in the hand's frame

# Position gains, velocity gains and largest forces (N m, N) of the joints and the fingers.
STIFFNESS = (4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0, 500.0, 500.0)
DAMPING = (300.0, 300.0, 200.0, 200.0, 60.0, 60.0, 60.0, 12.0, 12.0)
FORCE = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0, 12.0, 12.0)


def joints_at(pinch: Tensor) -> Tensor:
    """The seven joints [R,7] (radians) with the pinch point at ``pinch`` [R,3] (metres, within the workspace)."""
    joints: Tensor = franka.joints_at(pinch, BASE[:2], _PADS)
    return joints
