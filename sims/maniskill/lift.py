"""Lift in ManiSkill: "pick up the red cube" in ManiSkill's own PickCube, by the actions and rules of the tabletop.

A policy of ``lift`` acts in it as it is: cameras, proprioception, actions, control rate, instruction and rule of
success are the tabletop's; robot, physics, table, light, the one cube of 4 cm and where it and the arm start are
ManiSkill's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sims import catalog
from sims.maniskill.make import in_workers, require_package
from sims.mujoco.env import task_spec
from sims.mujoco.tasks.lift import LiftTask
from vla_rl.contract.env import ArraySpec, EnvSpec, VecEnv
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.task import declare_task

LOOKS = ("maniskill", "tabletop")


def spec(
    cameras: Sequence[str] = ("front",), image_size: int = 64, looks: str = "maniskill", device: str = "cpu"
) -> EnvSpec:
    """The spec of :func:`make` with the same options; ManiSkill itself is not needed."""
    if looks not in LOOKS:
        raise UserError(f"lift in ManiSkill has no looks {looks!r}, so it cannot be made; {did_you_mean(looks, LOOKS)}")
    task = LiftTask()
    on_host = device == "cpu"
    extras = {"privileged/target": task.place, "privileged/grasped": ArraySpec((1,), "float32", 0.0, 1.0)}
    return replace(
        task_spec(task, tuple(cameras), image_size),
        name="maniskill lift",
        extras=extras,
        device=device,
        can_snapshot=on_host,
        profile="bitwise" if on_host else "tolerant",
    )


def make_in_process(
    num_envs: int,
    cameras: Sequence[str] = ("front",),
    image_size: int = 64,
    looks: str = "maniskill",
    device: str = "cpu",
) -> VecEnv:
    """``num_envs`` environments in this process, which has to have ManiSkill.

    cameras, image_size  "front", "side" and "top", where lift has them
    looks                "maniskill": its own table and light; "tabletop": the colours and light of the tabletop
    device               "cpu": one simulation for each environment; "cuda", "cuda:1": all in one on the GPU

    Raises UserError for what cannot be built.
    """
    found = spec(cameras, image_size, looks, device)
    if num_envs < 1:
        raise UserError(f"num_envs={num_envs} leaves nothing to simulate; give at least 1.")
    require_package()
    from sims.maniskill.pick_cube import build_lift

    return build_lift(num_envs, found, LiftTask(), looks)


def _spec(workers: int = 1, **options: Any) -> EnvSpec:
    """The spec of :func:`make`, which does not depend on ``workers``."""
    catalog.check_options("maniskill_lift", make_in_process, options)
    return spec(**options)


@declare_task(expert="sims.mujoco.tasks.lift_expert:LiftExpert", spec=_spec)
def make(num_envs: int, workers: int = 1, device: str = "cpu", **options: Any) -> VecEnv:
    """Lift in ManiSkill in ``workers`` processes, or with device "cuda" here; other options as :func:`make_in_process`.

    Raises UserError with the commands that install ManiSkill where it is missing.
    """
    found = _spec(device=device, **options)  # a wrong option is refused before anything starts
    if device != "cpu":
        return make_in_process(num_envs, device=device, **options)
    return in_workers(num_envs, "sims.maniskill.lift:make_in_process", options, workers, pictures=bool(found.images))
