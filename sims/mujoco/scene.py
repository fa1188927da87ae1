"""The tabletop: coloured cubes under a robot, a gantry gripper for instance, as MJCF text.

World frame of the gantry: origin on the table top under its centre, x right, y away from the camera, z up; metres.
Slides are built so that ``qpos[0:3]`` is the world position of the pinch point between the fingertips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mujoco
import numpy as np

CUBE_EDGE = 0.036
MARK_RADIUS = 0.04
PHYSICS_DT = 0.005
FINGER_OPEN = 0.034  # metres from the pinch point to one finger pad, fully open
WORKSPACE_LOW = np.array([-0.13, -0.13, 0.014])
WORKSPACE_HIGH = np.array([0.13, 0.13, 0.16])

GANTRY_QPOS = slice(0, 3)
FINGER_QPOS = slice(3, 5)
CUBES_QPOS = 5  # first entry of the first cube; 7 per cube: position, quaternion (w,x,y,z)

# Camera name -> MJCF attributes. "front" looks down at the table with the fingers opening across the picture, so that
# a cube stays visible between them.
CAMERAS = {
    "front": 'pos="0 -0.40 0.42" xyaxes="1 0 0 0 0.67 0.742" fovy="38"',
    "side": 'pos="0.5 -0.2 0.42" xyaxes="0.371 0.928 0 -0.535 0.214 0.816" fovy="38"',
    "top": 'pos="0 0 0.62" xyaxes="1 0 0 0 1 0" fovy="36"',
}

# Patterns that the table can show instead of its plain colour, which they darken in places.
TEXTURES = {
    "checker": 'builtin="checker" rgb1="1 1 1" rgb2="0.55 0.55 0.55"',
    "gradient": 'builtin="gradient" rgb1="1 1 1" rgb2="0.4 0.4 0.4"',
    "speckle": 'builtin="flat" mark="random" random="0.2" rgb1="1 1 1" markrgb="0.3 0.3 0.3"',
}

# Shadows and multisampling make software rendering 50-100 times slower; boxes need no fine tessellation.
# The Newton solver of MuJoCo 4.0.0 is faulty for sparse constraint Jacobians (google-deepmind/mujoco#3767).
_SCENE = """
<mujoco model="{name}">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{dt}" jacobian="dense" integrator="Euler" cone="elliptic" iterations="20">
    <flag autoreset="disable"/>
  </option>
  <visual>
    <quality shadowsize="0" offsamples="0" numslices="{slices}" numstacks="8" numquads="1"/>
    <headlight ambient="0.45 0.45 0.45" diffuse="0.15 0.15 0.15" specular="0 0 0"/>
    <map znear="0.02" zfar="6"/>
    <rgba haze="0.8 0.83 0.86 1"/>
  </visual>
  <statistic extent="0.6" center="0 0 0.05"/>
  <asset>
    {textures}
  </asset>
  <default>
    {defaults}
    <default class="visual"><geom contype="0" conaffinity="0" mass="0"/></default>
    <default class="cube">
      <geom type="box" size="{half} {half} {half}" mass="0.05" friction="1 0.01 0.001" condim="3" solref="0.01 1"/>
    </default>
  </default>
  <worldbody>
    <light pos="-0.3 -0.5 1.2" dir="0.25 0.4 -1" directional="true" diffuse="0.55 0.55 0.53" specular="0 0 0"/>
    <geom name="table" type="plane" size="2 2 0.1" rgba="0.72 0.70 0.66 1" contype="0" conaffinity="1"/>
    <geom class="visual" name="mat" type="box" {mat} rgba="0.86 0.85 0.81 1"/>
    {cameras}
    {robot}
    {cubes}
    {marks}
  </worldbody>
  {actuators}
</mujoco>
"""

_GANTRY = """<body name="bridge_x" gravcomp="1">
      <inertial pos="0 0 0" mass="0.1" diaginertia="1e-4 1e-4 1e-4"/>
      <joint class="gantry" name="x" axis="1 0 0"/>
      <body name="bridge_y" gravcomp="1">
        <inertial pos="0 0 0" mass="0.1" diaginertia="1e-4 1e-4 1e-4"/>
        <joint class="gantry" name="y" axis="0 1 0"/>
        <body name="hand" gravcomp="1">
          <inertial pos="0 0 0.08" mass="0.3" diaginertia="2e-4 2e-4 2e-4"/>
          <joint class="gantry" name="z" axis="0 0 1"/>
          <geom class="visual" type="box" size="0.044 0.010 0.008" pos="0 0 0.068" rgba="0.30 0.32 0.36 1"/>
          <geom class="visual" type="box" size="0.008 0.008 0.15" pos="0 0 0.225" rgba="0.42 0.44 0.48 1"/>
          {fingers}
        </body>
      </body>
    </body>"""

_GANTRY_ACTUATORS = """<tendon>
    <fixed name="grip"><joint joint="left" coef="0.5"/><joint joint="right" coef="0.5"/></fixed>
  </tendon>
  <equality><joint joint1="left" joint2="right" solref="0.01 1"/></equality>
  <actuator>
    <position joint="x" kp="1300" kv="50" forcerange="-60 60"/>
    <position joint="y" kp="1000" kv="44" forcerange="-60 60"/>
    <position joint="z" kp="900" kv="38" forcerange="-40 40"/>
    <position tendon="grip" kp="500" kv="12" ctrlrange="0 {open}" forcerange="-12 12"/>
  </actuator>"""

# A finger's joint is 0 when its pad touches the pinch plane x = 0 and grows as it opens.
_FINGER = """<body name="{name}" pos="{offset} 0 0" gravcomp="1">
            <joint name="{name}" type="slide" axis="{sign} 0 0" range="0 {limit}" damping="0.5" armature="0.01"/>
            <geom type="box" size="0.004 0.009 0.036" pos="0 0 0.026" mass="0.04" rgba="0.16 0.17 0.20 1"
              contype="0" conaffinity="1" friction="1.2 0.02 0.001" condim="4" solref="0.01 1"/>
          </body>"""

_CUBE = """<body name="cube{i}" pos="{x} 0 {half}">
      <freejoint/><geom class="cube" name="cube{i}" rgba="0.8 0.8 0.8 1"/>
    </body>"""


_TEXTURE = """<texture name="{name}" type="2d" width="64" height="64" {pattern}/>
    <material name="{name}" texture="{name}" texrepeat="8 8" texuniform="true"/>"""

# A plate, or the target of a push: visible and without contact.
_MARK = (
    """<geom class="visual" name="mark{i}" type="cylinder" size="{radius} 0.0006" pos="0 0 0.001" rgba="0 0 0 0"/>"""
)


@dataclass(frozen=True)
class RobotText:
    """What a scene needs to know of its robot, as MJCF text.

    ``cameras`` {name: attributes}; ``mat``: size and position of the mat under the cubes; ``defaults``: its classes.
    """

    name: str
    cameras: Mapping[str, str]
    mat: str
    defaults: str
    body: str
    actuators: str


def compile_scene(robot: RobotText, cubes: int, marks: int) -> mujoco.MjModel:
    """The compiled scene of ``robot`` with cubes ``cube0``, ... and flat marks ``mark0``, ...

    Colours, and the positions of the marks, are set per episode.
    """
    half = CUBE_EDGE / 2
    text = _SCENE.format(
        name=robot.name,
        dt=PHYSICS_DT,
        half=half,
        slices=24 if marks else 8,  # only marks are round
        textures="\n    ".join(_TEXTURE.format(name=name, pattern=pattern) for name, pattern in TEXTURES.items()),
        defaults=robot.defaults,
        mat=robot.mat,
        cameras="\n    ".join(f'<camera name="{name}" {pose}/>' for name, pose in robot.cameras.items()),
        robot=robot.body,
        cubes="\n    ".join(_CUBE.format(i=i, x=0.08 * i, half=half) for i in range(cubes)),
        marks="\n    ".join(_MARK.format(i=i, radius=MARK_RADIUS) for i in range(marks)),
        actuators=robot.actuators,
    )
    return mujoco.MjModel.from_xml_string(text)


def build_model(cubes: int, marks: int = 0) -> mujoco.MjModel:
    """The scene under the gantry."""
    fingers = "\n          ".join(
        _FINGER.format(name=name, sign=sign, offset=sign * 0.004, limit=FINGER_OPEN + 0.001)
        for name, sign in (("left", -1), ("right", 1))
    )
    gantry = RobotText(
        "tabletop",
        CAMERAS,
        'size="0.145 0.145 0.0004"',
        '<default class="gantry"><joint type="slide" damping="0" armature="0.02"/></default>',
        _GANTRY.format(fingers=fingers),
        _GANTRY_ACTUATORS.format(open=FINGER_OPEN),
    )
    return compile_scene(gantry, cubes, marks)
