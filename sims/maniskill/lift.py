"""Lift in ManiSkill: "pick up the red cube" in ManiSkill's own PickCube, by the actions and rules of the tabletop.

A policy of ``lift`` acts in it as it is: cameras, proprioception, actions, control rate, instruction and rule of
success are the tabletop's; robot, physics, table, light, the one cube of 4 cm and where it and the arm start are
ManiSkill's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims import catalog
from sims.base import chosen_device, require_positive
from sims.maniskill.make import in_workers, require_package
from sims.maniskill.world import Outcome, World
from sims.mujoco.env import task_spec
from sims.mujoco.scene import FINGER_OPEN, WORKSPACE_HIGH, WORKSPACE_LOW
from sims.mujoco.tabletop import (
    FRANKA_JOINTS,
    HOLD_STEPS,
    LIFT_HEIGHT,
    Tabletop,
    count_consecutive,
    franka_joints,
)
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from vla_rl.contract.env import PRIVILEGED, ArraySpec, EnvSpec, VecEnv
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.task import declare_task

LOOKS = ("maniskill", "tabletop")
BASE = (0.0, 0.615)  # metres, in the table's frame: where ManiSkill's arm stands
_PADS = 0.1034  # metres from its hand to the point between the finger pads


@dataclass(frozen=True)
class _Options:
    """What :func:`make` takes besides the number of workers.

    cameras, image_size  "front", "side" and "top", where lift has them
    looks                "maniskill": its own table and light; "tabletop": the colours and light of the tabletop
    device               "cpu": one simulation for each environment; "cuda", "cuda:1": all in one on the GPU; "auto": a
                         GPU if there is one
    """

    cameras: Sequence[str] = ("front",)
    image_size: int = 64
    looks: str = "maniskill"
    device: str = "cpu"


def spec(workers: int = 1, **options: Any) -> EnvSpec:
    """The spec of :func:`make` with the same options; ManiSkill itself is not needed."""
    chosen: _Options = catalog.call("maniskill_lift", _Options, options)
    task, looks, device = LiftTask(), chosen.looks, chosen_device(chosen.device)
    if looks not in LOOKS:
        raise UserError(f"lift in ManiSkill has no looks {looks!r}, so it cannot be made; {did_you_mean(looks, LOOKS)}")
    extras = {"privileged/target": task.place, "privileged/grasped": ArraySpec((1,), "float32", 0.0, 1.0)}
    return replace(
        task_spec(task, tuple(chosen.cameras), chosen.image_size),
        name="maniskill lift",
        extras=extras,
        device=device,
        can_snapshot=device == "cpu",
        profile="bitwise" if device == "cpu" else "tolerant",
    )


def make_in_process(num_envs: int, **options: Any) -> VecEnv:
    """``num_envs`` environments in this process, which has to have ManiSkill; ``options`` as :func:`make`.

    Raises UserError for what cannot be built.
    """
    found, looks = spec(**options), _Options(**options).looks
    require_positive(num_envs=num_envs)
    require_package()
    from sims.maniskill.build import env_of, require_gpu, worlds_of
    from sims.maniskill.pick_cube import TASK, pick_cube

    require_gpu(TASK, found.device)
    task = LiftTask()
    worlds = worlds_of(num_envs, found.device, lambda size: LiftWorld(pick_cube(size, found, task.model, looks), task))
    return env_of(found, worlds, ends_at_success=True)


@declare_task(expert=LiftExpert, spec=spec)
def make(num_envs: int, workers: int = 1, **options: Any) -> VecEnv:
    """Lift in ManiSkill in ``workers`` processes, or with device "cuda" here; other options as ``_Options``.

    Raises UserError with the commands that install ManiSkill where it is missing.
    """
    found = spec(**options)  # a wrong option is refused before anything starts
    options |= {"device": found.device}
    if found.device != "cpu":
        return make_in_process(num_envs, **options)
    return in_workers(num_envs, "sims.maniskill.lift:make_in_process", options, workers, pictures=bool(found.images))


class LiftWorld:
    """``n`` environments of PickCube behind the interface of ``World``, with joint targets as its control mode.

    The table's frame is ManiSkill's turned by a quarter: its x, away from the arm, points towards the camera.  Actions
    move a commanded pinch point, from which the targets of the joints follow.
    """

    def __init__(self, world: World, task: Tabletop) -> None:
        """``task`` says what actions and proprioception are."""
        self._world, self._task, self.num_envs = world, task, world.num_envs
        self._device = world.env.device
        self._ctrl = torch.zeros((self.num_envs, 4), device=self._device)  # commanded pinch point, finger; metres
        self._held = torch.zeros(self.num_envs, dtype=torch.int16, device=self._device)
        self._low, self._high = (
            torch.as_tensor(x, device=self._device).float() for x in (WORKSPACE_LOW, WORKSPACE_HIGH)
        )

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Start the episodes of ``seeds`` in ``rows``; the arm is commanded to stay, within the workspace, and open."""
        self._world.reset(rows, seeds)
        index = torch.as_tensor(rows, device=self._device)
        self._ctrl[index, :3] = self._pinch()[index].clamp(self._low, self._high)
        self._ctrl[index, 3], self._held[index] = FINGER_OPEN, 0

    def step(self, action: np.ndarray) -> Outcome:
        """Execute ``action`` float32 [n,4]: displacement of the commanded pinch point in metres, grip sign."""
        self._ctrl = self._task.control(self._ctrl, torch.as_tensor(action, device=self._device)).float()
        joints = franka_joints(self._ctrl[:, :3], BASE, _PADS)
        self._world.step(torch.cat([joints, self._ctrl[:, 3:]], 1).cpu().numpy())
        self._held = count_consecutive(self._cube()[:, 2] >= LIFT_HEIGHT, self._held)
        success = self._held >= HOLD_STEPS
        return Outcome(success.float(), success, torch.zeros_like(success))

    def state(self) -> Tensor:
        """float32 [n,8], as the tabletop's."""
        fingers = self._world.env.agent.robot.get_qpos()[:, FRANKA_JOINTS:]
        return self._task.proprioception(torch.cat([self._pinch(), fingers], 1), self._ctrl)

    def privileged(self) -> dict[str, Tensor]:
        """Where the cube is, metres in the table's frame, and whether ManiSkill says that it is grasped."""
        env = self._world.env
        grasped = env.agent.is_grasping(env.cube).float()[:, None]
        return {PRIVILEGED + "target": self._cube(), PRIVILEGED + "grasped": grasped}

    def images(self) -> dict[str, Tensor]:
        return self._world.images()

    def close(self) -> None:
        self._world.close()

    def _pinch(self) -> Tensor:
        return to_table(self._world.env.agent.tcp.pose.p)

    def _cube(self) -> Tensor:
        return to_table(self._world.env.cube.pose.p)


def to_table(position: Tensor) -> Tensor:
    """``position`` [n,3] of ManiSkill in the table's frame."""
    return torch.stack([position[:, 1], -position[:, 0], position[:, 2]], 1)
