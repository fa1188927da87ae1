"""Lift in Genesis: "pick up the red cube" with a Franka arm, by the rules of ``sims.mujoco.tasks.lift``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sims.mujoco.env import task_spec
from sims.mujoco.tabletop import COLOURS, Instruct
from sims.mujoco.tasks.lift import LiftTask
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.contract.task import declare_task

if TYPE_CHECKING:
    from sims.genesis.env import GenesisEnv


def spec(
    cubes: int = 3, colours: int = 4, instruct: Instruct = "target", deadline: int | None = None, device: str = "cpu"
) -> EnvSpec:
    """The spec of :func:`make` with the same options; Genesis itself is not needed."""
    task = LiftTask(cubes, colours, instruct, deadline)
    return replace(task_spec(task, ()), name="genesis lift", device=device, profile="tolerant")


@declare_task(expert="sims.mujoco.tasks.lift_expert:LiftExpert", spec=spec)
def make(
    num_envs: int,
    cubes: int = 3,
    colours: int = 4,
    instruct: Instruct = "target",
    deadline: int | None = None,
    device: str = "cpu",
) -> GenesisEnv:
    """``num_envs`` environments in one scene of Genesis.

    ``cubes``, ``colours``, ``instruct`` and ``deadline`` are those of lift.  Raises UserError when Genesis is not
    installed or cannot use ``device`` ("cpu" or "cuda").
    """
    found = spec(cubes, colours, instruct, deadline, device)
    if num_envs < 1:
        raise UserError(f"num_envs={num_envs} leaves nothing to simulate; give at least 1.")
    from sims.genesis.engine import engine
    from sims.genesis.env import GenesisEnv
    from sims.genesis.scene import Scene

    task = LiftTask(cubes, colours, instruct, deadline)
    scene = Scene(engine(device), num_envs, list(COLOURS.values())[:colours])
    return GenesisEnv(task, found, scene, num_envs)
