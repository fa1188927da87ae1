"""ManiSkill's PickCube with the tabletop's actions, proprioception and rule of success."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sims import franka
from sims.maniskill.world import Outcome, World
from sims.mujoco.scene import FINGER_OPEN, WORKSPACE_HIGH, WORKSPACE_LOW
from sims.mujoco.tabletop import HOLD_STEPS, LIFT_HEIGHT, Tabletop, count_consecutive
from vla_rl.contract.env import PRIVILEGED

BASE = (0.0, 0.615)  # metres, in the table's frame: where ManiSkill's arm stands
_PADS = 0.1034  # metres from its hand to the point between the finger pads


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
        joints = franka.joints_at(self._ctrl[:, :3], BASE, _PADS)
        self._world.step(torch.cat([joints, self._ctrl[:, 3:]], 1).cpu().numpy())
        self._held = count_consecutive(self._cube()[:, 2] >= LIFT_HEIGHT, self._held)
        success = self._held >= HOLD_STEPS
        return Outcome(success.float(), success, torch.zeros_like(success))

    def state(self) -> Tensor:
        """float32 [n,8], as the tabletop's."""
        fingers = self._world.env.agent.robot.get_qpos()[:, franka.ARM :]
        found: Tensor = self._task.proprioception(torch.cat([self._pinch(), fingers], 1), self._ctrl)
        return found

    def privileged(self) -> dict[str, Tensor]:
        """Where the cube is, metres in the table's frame, and whether ManiSkill says that it is grasped."""
        env = self._world.env
        grasped = env.agent.is_grasping(env.cube).float()[:, None]
        return {PRIVILEGED + "target": self._cube(), PRIVILEGED + "grasped": grasped}

    def images(self) -> dict[str, Tensor]:
        """{camera: uint8 [n,h,w,3]} of this moment."""
        return self._world.images()

    def close(self) -> None:
        """Free the simulation."""
        self._world.close()

    def _pinch(self) -> Tensor:
        return to_table(self._world.env.agent.tcp.pose.p)

    def _cube(self) -> Tensor:
        return to_table(self._world.env.cube.pose.p)


def to_table(position: Tensor) -> Tensor:
    """``position`` [n,3] of ManiSkill in the table's frame."""
    return torch.stack([position[:, 1], -position[:, 0], position[:, 2]], 1)
