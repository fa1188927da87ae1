"""ManiSkill's PickCube seen by the tabletop's cameras, on its own table or on one that looks like the tabletop's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sapien
from mani_skill.envs.tasks.tabletop.pick_cube import PickCubeEnv
from mani_skill.sensors.camera import CameraConfig

from sims.maniskill.build import backends, made
from sims.maniskill.world import World
from vla_rl.contract.env import EnvSpec

_NEAR, _FAR = 0.01, 100.0  # metres, as ManiSkill's own
_AMBIENT, _LIGHT = 0.5, 2.2  # with which the table comes out as bright as MuJoCo's
_DIRECTION = (-0.4, 0.25, -1.0)  # of the tabletop's light, in ManiSkill's frame
_FILM = 1e-4  # metres: half the thickness of what is seen only
_GAMMA = 2.2  # SAPIEN takes linear colours, MuJoCo those of the screen


class PickCube(PickCubeEnv):
    """ManiSkill's own scene, seen by ``views``: cameras of the tabletop's ``model``, in the table's frame."""

    def __init__(self, *args: Any, model: Any, views: Sequence[str], view_size: int, **options: Any) -> None:
        """``view_size``: pixels on both sides."""
        self._model, self._views, self._view_size = model, views, view_size
        super().__init__(*args, **options)

    @property
    def _default_sensor_configs(self) -> list[Any]:
        size = self._view_size
        return [
            CameraConfig(one.name, _pose(one), size, size, np.deg2rad(float(one.fovy[0])), _NEAR, _FAR)
            for one in map(self._model.camera, self._views)
        ]


class PickCubeOnTabletop(PickCube):
    """The same with the colours and the light of the tabletop; what is touched stays ManiSkill's."""

    def _load_scene(self, options: dict[str, Any]) -> None:
        super()._load_scene(options)
        for name, height in (("table", _FILM), ("mat", 3 * _FILM)):
            geom = self._model.geom(name)
            colour = [*(np.asarray(geom.rgba[:3]) ** _GAMMA).tolist(), 1.0]
            paint = sapien.render.RenderMaterial(base_color=colour, roughness=1.0, specular=0.0, metallic=0.0)
            builder = self.scene.create_actor_builder()
            builder.add_box_visual(half_size=[*geom.size[:2].tolist(), _FILM], material=paint)
            builder.initial_pose = sapien.Pose([0.0, 0.0, height])
            builder.build_kinematic(name)

    def _load_lighting(self, options: dict[str, Any]) -> None:
        self.scene.set_ambient_light([_AMBIENT] * 3)
        self.scene.add_directional_light(_DIRECTION, [_LIGHT, _LIGHT, 0.96 * _LIGHT])


def _pose(camera: Any) -> Any:
    """The pose of a ``camera`` of the table's frame in SAPIEN's: x forward, y left, z up."""
    turned = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # the table's frame in ManiSkill's
    right, up, backward = (turned @ axis for axis in camera.mat0.reshape(3, 3).T)
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = np.stack([-backward, -right, up], 1), turned @ camera.pos
    return sapien.Pose(pose)


TASK = "PickCube-v1"
_KINDS = {"maniskill": PickCube, "tabletop": PickCubeOnTabletop}


def pick_cube(num_envs: int, spec: EnvSpec, model: Any, looks: str) -> World:
    """``num_envs`` environments simulated together, with joint targets as their control mode.

    Cameras, sizes and control rate are those of ``spec``; ``model`` says where the cameras are.
    """
    options: dict[str, Any] = {
        "num_envs": num_envs,
        "obs_mode": "rgb+state_dict" if spec.images else "state_dict",
        "control_mode": "pd_joint_pos",
        "reward_mode": "none",
        "model": model,
        "views": tuple(spec.images),
        "view_size": next((one.shape[0] for one in spec.images.values()), 0),
        **backends(spec.device),
    }
    env = made(TASK, {"cameras": list(spec.images)}, lambda: _KINDS[looks](**options))
    env._sim_steps_per_control = round(spec.control_dt * env.sim_freq)  # ManiSkill takes whole Hertz only
    return World(env, whole_state=False)
