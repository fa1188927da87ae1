"""so101: "pick up the red cube" with an arm like the SO-101, commanded by joint positions.

An action is the absolute targets of the six joints in radians, the gripper as an opening from 0 (closed) to 1; the
state is their measured positions in the same order, under LeRobot's names ("shoulder_pan.pos", ...).

Success and failure are those of lift (``sims/mujoco/tasks/lift.py``), within ``seconds``: the named cube's centre at
least 6 cm above the table at the end of 5 control steps in a row.
"""

from __future__ import annotations

from typing import Any

from sims.mujoco.env import MujocoEnv, make_env, make_spec
from sims.mujoco.parameters import parameters
from sims.mujoco.so101.robot import So101
from sims.mujoco.tabletop import Instruct
from sims.mujoco.tasks.lift import LiftTask
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import declare_task


class So101Lift(LiftTask):
    """The rules of lift for one red cube, or for more of several colours."""

    name = "so101"
    fewest = (1, 1)

    def __init__(
        self,
        control_hz: int = 25,
        cubes: int = 1,
        colours: int = 1,
        instruct: Instruct = "target",
        deadline: int | None = None,
        seconds: int = 6,
    ) -> None:
        """``seconds``: the longest episode; raises UserError for none."""
        if seconds < 1:
            raise UserError(f"seconds={seconds} leaves no time to pick anything up; give at least 1.")
        super().__init__(cubes, colours, instruct, deadline, robot=So101(control_hz))
        self.time_limit = seconds * control_hz


_OPTIONS = ("control_hz", "cubes", "colours", "instruct", "deadline", "seconds")


def spec(**options: Any) -> EnvSpec:
    """The spec of :func:`make` with the same options."""
    return make_spec(So101Lift, _OPTIONS, options)


@declare_task(
    expert="sims.mujoco.so101.expert:So101Expert",
    scenes="sims.mujoco.so101.scenes:random_scenes",
    progress="sims.mujoco.so101.potential:potential",
    spec=spec,
    parameters=parameters,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The SO-101 environment.

    Options of the task: ``control_hz`` 20, 25, 40 or 50 (25), ``cubes`` 1-4 (1), ``colours`` at least as many and at
    most 6 (1), ``instruct`` "target" or "distractor", ``deadline`` control steps after which an unfinished episode has
    failed (none), ``seconds`` of the longest episode (6).  Cameras are "front" and "wrist"; the rest: see ``make_env``.
    """
    return make_env(So101Lift, _OPTIONS, num_envs, options)
