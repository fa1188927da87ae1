"""Builds ManiSkill's PickCube as the tabletop's lift."""

from __future__ import annotations

from typing import Any

from sims.maniskill.build import backends, env_of, made, require_gpu, worlds_of
from sims.maniskill.lift_world import LiftWorld
from sims.maniskill.pick_cube import PickCube, PickCubeOnTabletop
from sims.maniskill.world import World
from sims.mujoco.tasks.lift import LiftTask
from vla_rl.contract.env import VecEnv
from vla_rl.contract.spec import EnvSpec

_TASK = "PickCube-v1"
_KINDS = {"maniskill": PickCube, "tabletop": PickCubeOnTabletop}


def build_lift(num_envs: int, spec: EnvSpec, task: LiftTask, looks: str) -> VecEnv:
    """The environment of ``sims.maniskill.lift:make_in_process``."""
    require_gpu(_TASK, spec.device)

    def world(size: int) -> LiftWorld:
        options: dict[str, Any] = {
            "num_envs": size,
            "obs_mode": "rgb+state_dict" if spec.images else "state_dict",
            "control_mode": "pd_joint_pos",
            "reward_mode": "none",
            "model": task.model,
            "views": tuple(spec.images),
            "view_size": next((one.shape[0] for one in spec.images.values()), 0),
            **backends(spec.device),
        }
        env = made(_TASK, {"cameras": list(spec.images)}, lambda: _KINDS[looks](**options))
        env._sim_steps_per_control = round(spec.control_dt * env.sim_freq)  # ManiSkill takes whole Hertz only
        return LiftWorld(World(env, whole_state=False), task)

    return env_of(spec, worlds_of(num_envs, spec.device, world), ends_at_success=True)
