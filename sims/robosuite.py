"""robosuite 1.5: tasks of one or two arms with many robots and cameras (Zhu et al. 2020, arXiv 2009.12293).

It works with mujoco up to 3.9 and numpy below 2, so it runs in a virtual environment of its own:
``vla-rl sims install robosuite``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sims import catalog, isolated
from sims.base import CameraRig, SideBySide, Simulator, require_positive, simulator_spec
from sims.isolated import IsolatedEnv
from vla_rl.contract.env import PRIVILEGED, ArraySpec, EnvSpec
from vla_rl.contract.errors import UserError, did_you_mean

INSTRUCTIONS = {
    "Lift": "lift the red cube",
    "Stack": "stack the red cube on the green cube",
    "NutAssembly": "put each nut on its peg",
    "NutAssemblySquare": "put the square nut on the square peg",
    "NutAssemblyRound": "put the round nut on the round peg",
    "PickPlace": "put each object into its bin",
    "PickPlaceMilk": "put the milk into its bin",
    "PickPlaceBread": "put the bread into its bin",
    "PickPlaceCereal": "put the cereal into its bin",
    "PickPlaceCan": "put the can into its bin",
    "Door": "open the door",
    "Wipe": "wipe the table clean",
    "ToolHang": "assemble the frame and hang the tool on it",
    "TwoArmLift": "lift the pot with both arms",
    "TwoArmPegInHole": "put the peg into the hole",
    "TwoArmHandover": "hand the hammer over",
    "TwoArmTransport": "carry the hammer to the other bin",
}
ROBOTS = ("IIWA", "Jaco", "Kinova3", "Panda", "Sawyer", "UR5e", "XArm7")
"""Those of one arm on a fixed base."""
_OBJECTS = PRIVILEGED + "objects"
_COLLISION_GROUP = 0  # geoms that robosuite hides in pictures
_FREQUENCY = 20.0  # actions per second


class Robosuite(Simulator):
    """One robosuite environment."""

    def __init__(self, env: Any, rig: CameraRig) -> None:
        self._env, self._rig = env, rig
        self._values: Mapping[str, np.ndarray] = env._get_observations(force_update=True)
        self._arms = range(len(env.robots))

    def reset(self, seed: int) -> int:
        # Robots, objects and samplers all hold this one generator, so its state is set, not the object.
        self._env.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        np.random.seed(seed % 2**32)  # what else robosuite draws comes from the global generators
        random.seed(seed)
        self._values = self._env.reset()
        return 0

    def act(self, action: np.ndarray) -> tuple[float, bool]:
        self._values, reward, _, _ = self._env.step(action.astype(np.float64))
        return float(reward), bool(self._env._check_success())

    def state(self) -> np.ndarray:
        return np.concatenate([part for arm in self._arms for part in self._of_arm(arm)]).astype(np.float32)

    def state_names(self) -> tuple[str, ...]:
        names: list[str] = []
        for arm in self._arms:
            fingers = self._values.get(f"robot{arm}_gripper_qpos", np.zeros(0)).size
            own = ("x", "y", "z", "qw", "qx", "qy", "qz", *(f"finger{i}" for i in range(fingers)))
            names += [f"robot{arm}_{name}" for name in own]
        return tuple(names)

    def extras(self) -> Mapping[str, np.ndarray]:
        return {_OBJECTS: self._values["object-state"].astype(np.float32)}

    def images(self) -> Mapping[str, np.ndarray]:
        return self._rig.images("", self._env.sim.model._model, self._env.sim.data._data)

    def close(self) -> None:
        self._env.close()
        self._rig.close()

    def _of_arm(self, arm: int) -> list[np.ndarray]:
        quaternion = np.roll(self._values[f"robot{arm}_eef_quat"], 1)  # robosuite's has its real part last
        fingers = self._values.get(f"robot{arm}_gripper_qpos", np.zeros(0))
        return [self._values[f"robot{arm}_eef_pos"], quaternion, fingers]


def make_in_process(
    num_envs: int,
    task: str = "Lift",
    robots: str | Sequence[str] = "Panda",
    cameras: Sequence[str] = ("agentview", "robot0_eye_in_hand"),
    image_size: int = 64,
    time_limit: int = 200,
    shaped: bool = True,
    arguments: Mapping[str, Any] | None = None,
) -> SideBySide:
    """``num_envs`` robosuite environments in this process, which has to have robosuite.

    task       of ``INSTRUCTIONS``
    robots     one of ``ROBOTS``, or two for the tasks that are called TwoArm
    cameras    of the task ("agentview", "frontview") or of a robot ("robot0_eye_in_hand")
    shaped     whether rewards guide towards success, otherwise they are robosuite's sparse ones
    arguments  more of ``robosuite.make``, for instance {"controller_configs": {...}}

    state: for each robot the position of its gripper (metres), its orientation (w, x, y, z) and its fingers.  Actions
    are those of the robot's default controller at 20 per second, within -1 to 1.
    """
    require_positive(image_size=image_size, time_limit=time_limit)
    chosen = [robots] if isinstance(robots, str) else list(robots)
    _check_task(task, chosen)
    suite = _robosuite()
    options = {
        "env_name": task,
        "robots": chosen,
        "has_renderer": False,
        "has_offscreen_renderer": False,
        "use_camera_obs": False,
        "control_freq": _FREQUENCY,
        "reward_shaping": shaped,
        "ignore_done": True,
        "seed": 0,  # a generator of its own, which reset sets
        **(arguments or {}),
    }
    rig = CameraRig(cameras, image_size, 1, (_COLLISION_GROUP,))
    simulators = [Robosuite(suite.make(**options), rig) for _ in range(num_envs)]
    return SideBySide(_spec(simulators[0], task, cameras, image_size, time_limit), simulators)


def make(num_envs: int, workers: int = 1, **options: Any) -> IsolatedEnv:
    """robosuite in ``workers`` processes of its own installation; other options as :func:`make_in_process`.

    Raises UserError with the command that installs it when it is not installed.
    """
    catalog.check_options("robosuite", make_in_process, options)
    return isolated.make(num_envs, "sims.robosuite:make_in_process", options, workers, installation="robosuite")


def _check_task(task: str, robots: Sequence[str]) -> None:
    """Raise UserError for an unknown task or robot, and for another number of robots than the task needs."""
    if task not in INSTRUCTIONS:
        raise UserError(f"robosuite has no task {task!r}, so it cannot be played; {did_you_mean(task, INSTRUCTIONS)}")
    for robot in robots:
        if robot not in ROBOTS:
            raise UserError(
                f"{robot!r} is no robot of robosuite with one arm on a fixed base, so its state could not be read; "
                f"{did_you_mean(robot, ROBOTS)}"
            )
    needed = 2 if task.startswith("TwoArm") else 1
    if len(robots) != needed:
        example = {1: '"Panda"', 2: '["Panda", "Panda"]'}[needed]
        raise UserError(
            f"{task} is played by {needed} robot(s) of one arm, not by {list(robots)}, so it cannot be built; give "
            f"robots={example}."
        )


def _spec(one: Robosuite, task: str, cameras: Sequence[str], size: int, time_limit: int) -> EnvSpec:
    env, names, infinite = one._env, one.state_names(), float("inf")
    for camera in cameras:
        if camera not in env.sim.model.camera_names:
            known = env.sim.model.camera_names
            raise UserError(f"{task} has no camera {camera!r}, so it takes no pictures; {did_you_mean(camera, known)}")
    low, high = (tuple(map(float, bound)) for bound in env.action_spec)
    return simulator_spec(
        f"robosuite/{task}",
        cameras,
        size,
        time_limit,
        state=ArraySpec((len(names),), "float32", -infinite, infinite, unit="m", frame="world", names=names),
        action=ArraySpec((len(low),), "float32", low, high, unit="1 (of the controller)"),
        tasks=(INSTRUCTIONS[task],),
        control_dt=1 / _FREQUENCY,
        extras={_OBJECTS: ArraySpec(one.extras()[_OBJECTS].shape, "float32", -infinite, infinite)},
    )


def _robosuite() -> Any:
    """The package, without its warnings about parts that are not used here."""
    logging.disable(logging.WARNING)
    try:
        import robosuite
    finally:
        logging.disable(logging.NOTSET)
    robosuite.ROBOSUITE_DEFAULT_LOGGER.setLevel(logging.ERROR)
    return robosuite
