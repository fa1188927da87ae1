"""The scene in Genesis: a Franka arm over cubes, one of every colour, in every environment.

Between control steps the state of an environment is its row of ``Rows`` and nothing else: ``advance`` writes the rows
into the simulator and reads them back.  So an environment that diverged, or idles, never touches another one, an
episode depends on its own row alone, and a copy of a row is a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import degrees
from typing import Any

import torch
from torch import Tensor

from sims.genesis import franka
from sims.genesis.cameras import Cameras
from sims.mujoco.scene import CUBE_EDGE, FINGER_OPEN
from sims.mujoco.task import Task

DT, SUBSTEPS = 0.01, 2  # seconds of a step, and into how many it is divided
FINGERS = slice(franka.ARM, franka.ARM + 2)
CUBES = franka.ARM + 2  # first entry of the first cube in qpos; 7 for each: position, quaternion (w,x,y,z)
AWAY = -1.2  # metres; y of the cubes that an episode does not have, behind the camera
_MASS, _FRICTION = 0.05, 1.0  # kg; of a cube, as in MuJoCo's scene
_TABLE, _ARM, _CUBE = 2, 1, 3  # collision bits: the arm meets the cubes, the cubes meet everything


@dataclass
class Rows:
    """The state of ``R`` environments, float32 tensors.

    qpos   [R,q]  joints, fingers and poses of the cubes; radians and metres
    vel    [R,v]  their velocities
    pinch  [R,3]  the point between the finger pads in the table's frame, which follows from ``qpos``
    """

    qpos: Tensor
    vel: Tensor
    pinch: Tensor

    def __getitem__(self, index: Any) -> Rows:
        return Rows(**{name: value[index] for name, value in self.arrays().items()})

    def where(self, which: Tensor, other: Rows) -> Rows:
        """These rows where ``which`` (bool [R]), those of ``other`` elsewhere."""
        pairs = zip(self.arrays().items(), other.arrays().values(), strict=True)
        return Rows(**{name: torch.where(which[:, None], own, old) for (name, own), old in pairs})

    def arrays(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Scene:
    """``num_envs`` environments that Genesis simulates together."""

    def __init__(
        self, genesis: Any, num_envs: int, task: Task, colours: Sequence[tuple[float, float, float]], cameras: Cameras
    ) -> None:
        """``colours``: of the cubes, one each; ``task`` has the places of the cameras."""
        self._genesis, self._cameras = genesis, cameras
        self._scene = genesis.Scene(
            show_viewer=False,
            sim_options=genesis.options.SimOptions(dt=DT, substeps=SUBSTEPS),
            rigid_options=genesis.options.RigidOptions(enable_self_collision=False),
            profiling_options=genesis.options.ProfilingOptions(show_FPS=False),
            **cameras.options(),
        )
        self._add_table()
        self._arm = self._add_arm()
        for number, colour in enumerate(colours):
            self._add_cube(number, colour)
        cameras.add(self._scene, task)
        self._scene.build(n_envs=num_envs)
        self._solver = self._scene.sim.rigid_solver
        self._hand = self._arm.get_link(franka.HAND)
        self._arm.set_dofs_kp(franka.STIFFNESS)
        self._arm.set_dofs_kv(franka.DAMPING)
        self._arm.set_dofs_force_range([-force for force in franka.FORCE], franka.FORCE)
        qpos = self._solver.get_qpos()
        qpos[:, : franka.ARM] = franka.joints_at(qpos.new_tensor([[0.0, 0.0, 0.1]]))
        qpos[:, FINGERS] = FINGER_OPEN
        self._rest = Rows(qpos, qpos.new_zeros((num_envs, self._solver.n_dofs)), qpos.new_zeros((num_envs, 3)))

    def rest(self) -> Rows:
        """Rows of the arm above the middle of the table and all cubes far away from it."""
        return Rows(**{name: value.clone() for name, value in self._rest.arrays().items()})

    def advance(self, rows: Rows, pinch: Tensor, opening: Tensor, steps: int) -> tuple[Rows, Tensor]:
        """The rows after ``steps`` steps towards pinch points [E,3] and finger positions [E], metres.

        Also bool [E]: which environments diverged; their rows are then of no use.
        """
        solver, diverged = self._solver, ~(_finite(rows.qpos) & _finite(rows.vel))
        solver.set_qpos(torch.where(diverged[:, None], self._rest.qpos, rows.qpos))  # forgets the solver's warm start
        solver.set_dofs_velocity(torch.where(diverged[:, None], self._rest.vel, rows.vel))
        solver.collider.reset()
        self._arm.control_dofs_position(torch.cat([franka.joints_at(pinch), opening[:, None].expand(-1, 2)], 1))
        for _ in range(steps):
            diverged = self._step(diverged)
        after = Rows(solver.get_qpos(), solver.get_dofs_velocity(), self._pinch())
        finite = _finite(after.qpos) & _finite(after.vel) & _finite(after.pinch)
        return after, diverged | solver.get_error_envs_mask() | ~finite

    def render(self, rows: Rows) -> dict[str, Tensor]:
        """{camera: uint8 [E,h,w,3]} of ``rows``."""
        self._solver.set_qpos(rows.qpos)
        return self._cameras.render()

    def nbytes(self) -> int:
        """How much memory the arrays of the solver take."""
        torch_of = self._genesis.utils.misc.qd_to_torch
        arrays = [item.array for item in self._solver.data if hasattr(item, "array")]
        views = [item if isinstance(item, Tensor) else torch_of(item, copy=False) for item in arrays]
        return sum(view.nbytes for view in views)

    def close(self) -> None:
        """Free what Genesis holds for this scene; safe to call twice."""
        if self._scene is not None:
            self._scene.destroy()
            self._scene = None

    def _step(self, diverged: Tensor) -> Tensor:
        """One step; environments that Genesis refuses to continue are put to rest and added to ``diverged``."""
        try:
            self._scene.step(update_visualizer=False)
        except self._genesis.GenesisException:  # raised before anything moves
            broken = self._solver.get_error_envs_mask()
            index = broken.nonzero()[:, 0]
            if not index.numel():
                raise
            self._solver.set_qpos(self._rest.qpos[index], envs_idx=index)
            self._solver.set_dofs_velocity(self._rest.vel[index], envs_idx=index)
            self._scene.step(update_visualizer=False)
            return diverged | broken
        return diverged

    def _pinch(self) -> Tensor:
        """[E,3]: the point between the finger pads in the table's frame, metres."""
        position, turn = self._hand.get_pos(), self._hand.get_quat()
        return position + _rotated(turn, position.new_tensor(franka.PINCH).expand_as(position))

    def _add_table(self) -> None:
        gs = self._genesis
        plane = gs.morphs.Plane(contype=_TABLE, conaffinity=_TABLE)
        self._scene.add_entity(plane, surface=gs.surfaces.Rough(color=(0.72, 0.70, 0.66)))

    def _add_arm(self) -> Any:
        gs = self._genesis
        morph = gs.morphs.MJCF(file=franka.MODEL, pos=franka.BASE, euler=(0.0, 0.0, degrees(franka.BASE_TURN)))
        return self._scene.add_entity(morph, material=gs.materials.Rigid(gravity_compensation=1.0))

    def _add_cube(self, number: int, colour: tuple[float, float, float]) -> None:
        gs = self._genesis
        place = (2 * CUBE_EDGE * number, AWAY, CUBE_EDGE / 2)
        size = (CUBE_EDGE, CUBE_EDGE, CUBE_EDGE)
        morph = gs.morphs.Box(size=size, pos=place, contype=_CUBE, conaffinity=_CUBE)
        material = gs.materials.Rigid(rho=_MASS / CUBE_EDGE**3, friction=_FRICTION)
        self._scene.add_entity(morph, material=material, surface=gs.surfaces.Rough(color=colour))


def _finite(array: Tensor) -> Tensor:
    """bool [E]: every entry of the row is a number."""
    return array.isfinite().all(1)


def _rotated(turn: Tensor, vector: Tensor) -> Tensor:
    """``vector`` [R,3] turned by the quaternions ``turn`` [R,4] (w,x,y,z)."""
    axis = turn[:, 1:]
    across = 2 * torch.linalg.cross(axis, vector)
    return vector + turn[:, :1] * across + torch.linalg.cross(axis, across)
