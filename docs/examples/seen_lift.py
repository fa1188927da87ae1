"""Lift, with the place of the named cube measured, as a tracker over the table would: LeRobot's environment state.

Policies that read no instruction, such as LeRobot's ACT and diffusion policy, learn here which cube is meant.
"""

from __future__ import annotations

from typing import Any

from sims.mujoco.env import MujocoEnv, make_env
from sims.mujoco.task import TaskState
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from vla_rl.contract.env import Array
from vla_rl.contract.task import declare_task

MEASURED = "environment_state"  # recorded as observation.environment_state


class SeenLift(LiftTask):
    """``environment_state`` float32 [3]: the centre of the named cube, metres; everybody may read it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.extras = {**self.extras, MEASURED: self.place}

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        extras = super().observe_extras(qpos, task_state)
        return {**extras, MEASURED: extras["privileged/target"]}


@declare_task(expert=LiftExpert)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """What ``--env seen_lift:make`` names; the options are those of lift, and of ``make_env``."""
    return make_env(SeenLift, num_envs, options)
