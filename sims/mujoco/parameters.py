"""What an episode of a tabletop task can vary: poses, colours, cameras, lights, the table's texture, and physics.

Every parameter belongs to one environment of the batch and one episode, masses and friction too: MuJoCo's batch keeps
the model fields that differ per simulation.
"""

from __future__ import annotations

import math
from typing import Any

from sims.mujoco.scene import TEXTURES
from vla_rl.contract.task import Parameter

_TEXTURES = ", ".join(f"{number} {name}" for number, name in enumerate(("plain", *TEXTURES)))

POSES = (
    Parameter("object_x", 0.0, -0.03, 0.03, "m", "shift of all objects to the right; the outermost get out of reach"),
    Parameter("object_y", 0.0, -0.03, 0.03, "m", "shift of all objects away from the front camera"),
    Parameter("object_yaw", 0.0, -math.pi / 4, math.pi / 4, "rad", "turn of every cube about its vertical axis"),
    Parameter("gripper_x", 0.0, -0.1, 0.1, "m", "shift of the gripper's start, kept within its workspace"),
    Parameter("gripper_y", 0.0, -0.1, 0.1, "m", "shift of the gripper's start, kept within its workspace"),
    Parameter("gripper_z", 0.0, -0.05, 0.05, "m", "shift of the gripper's start, kept within its workspace"),
)
LOOKS = (
    Parameter("object_hue", 0.0, -0.4, 0.4, "rad", "turn of the colours of cubes and marks; names still apply"),
    Parameter("object_saturation", 1.0, 0.2, 1.5, "factor", "saturation of the colours of cubes and marks"),
    Parameter("table_brightness", 1.0, 0.3, 1.3, "factor", "brightness of the table's colour"),
    Parameter("table_texture", 0.0, 0.0, float(len(TEXTURES)), "index", _TEXTURES, integer=True),
    Parameter("camera_x", 0.0, -0.06, 0.06, "m", "shift of every camera to its right"),
    Parameter("camera_y", 0.0, -0.06, 0.06, "m", "shift of every camera upwards in its picture"),
    Parameter("camera_z", 0.0, -0.06, 0.06, "m", "shift of every camera backwards"),
    Parameter("camera_yaw", 0.0, -0.1, 0.1, "rad", "turn of every camera to the left"),
    Parameter("camera_pitch", 0.0, -0.1, 0.1, "rad", "turn of every camera upwards"),
    Parameter("camera_roll", 0.0, -0.2, 0.2, "rad", "turn of every camera about its line of sight"),
    Parameter("camera_fovy", 0.0, -0.1, 0.1, "rad", "added to every camera's vertical field of view"),
    Parameter("light_brightness", 1.0, 0.3, 1.7, "factor", "brightness of all lights"),
    Parameter("light_yaw", 0.0, -2.0, 2.0, "rad", "turn of the light's direction about the vertical"),
)
PHYSICS = (
    Parameter("object_mass", 1.0, 0.2, 20.0, "factor", "mass and inertia of every cube (50 g)"),
    Parameter("friction", 1.0, 0.02, 2.0, "factor", "friction of fingers, cubes and table"),
)
PARAMETERS = (*POSES, *LOOKS, *PHYSICS)


def parameters(**options: Any) -> tuple[Parameter, ...]:
    """What every tabletop task can vary, whatever its ``options``."""
    return PARAMETERS
