"""Lift in Genesis: "pick up the red cube" with a Franka arm, by the rules of ``sims.mujoco.tasks.lift``.

Rules, episodes, actions and observations are those of the task in MuJoCo (``sims.mujoco``); the robot and the physics
are other ones.  A seed puts the same cubes at the same places in both.

Between control steps the state of an environment is its row of ``Rows`` and nothing else: the scene writes the rows
into the simulator and reads them back.  So an environment that diverged, or idles, never touches another one, an
episode depends on its own row alone, and a copy of a row is a snapshot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from math import degrees, pi
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims import catalog, isolated
from sims.base import chosen_device, require_memory, require_positive
from sims.mujoco.env import task_spec
from sims.mujoco.scene import CUBE_EDGE, CUBES_QPOS, FINGER_OPEN
from sims.mujoco.tabletop import COLOURS, FRANKA_JOINTS, Instruct, franka_joints
from sims.mujoco.task import Episodes, Task
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from sims.on_device import DeviceTaskEnv
from vla_rl.contract.env import EnvSpec, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import declare_task

DEVICES = ("cpu", "cuda")
_MANY = 256  # environments; so many fit wherever Genesis starts, and making two small scenes takes seconds

# The Franka arm that Genesis brings.
MODEL = "xml/franka_emika_panda/panda.xml"  # below Genesis' assets
HAND = "hand"  # the link
BASE = (0.0, 0.5, 0.0)  # metres, in the table's frame
BASE_TURN = -pi / 2  # radians about the vertical: its front faces the camera

_PADS = 0.1029  # metres from the hand to the point between the finger pads
PINCH = (0.0, 0.0, _PADS)  # the pinch point in the hand's frame

# Position gains, velocity gains and largest forces (N m, N) of the joints and the fingers.
STIFFNESS = (4500.0, 4500.0, 3500.0, 3500.0, 2000.0, 2000.0, 2000.0, 500.0, 500.0)
DAMPING = (300.0, 300.0, 200.0, 200.0, 60.0, 60.0, 60.0, 12.0, 12.0)
FORCE = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0, 12.0, 12.0)

DT, SUBSTEPS = 0.01, 2  # seconds of a step, and into how many it is divided
FINGERS = slice(FRANKA_JOINTS, FRANKA_JOINTS + 2)
CUBES = FRANKA_JOINTS + 2  # first entry of the first cube in qpos; 7 for each: position, quaternion (w,x,y,z)
AWAY = -1.2  # metres; y of the cubes that an episode does not have, behind the camera
_MASS, _FRICTION = 0.05, 1.0  # kg; of a cube, as in MuJoCo's scene
_TABLE, _ARM, _CUBE = 2, 1, 3  # collision bits: the arm meets the cubes, the cubes meet everything

_BACKGROUND, _MAT = (0.80, 0.83, 0.86), (0.86, 0.85, 0.81)
_AMBIENT, _DIFFUSE, _DIRECTION = (0.45, 0.45, 0.45), (1.0, 1.0, 0.96), (0.25, 0.4, -1.0)
_STRENGTH = 2.5  # of the light: colours come out about as bright as MuJoCo's
_MAT_SIZE = (0.29, 0.29, 0.0008)  # metres
_NEAR, _FAR = 0.02, 6.0  # metres


@dataclass(frozen=True)
class _Options:
    """What :func:`make` takes, wherever the environments then run.

    cubes, colours, instruct, deadline  those of lift
    cameras, image_size                 "front", "side" and "top", where lift has them
    device                              "cpu" or "cuda", where observations then stay; "auto": a GPU if there is
                                        one, and no workers
    """

    cubes: int = 3
    colours: int = 4
    instruct: Instruct = "target"
    deadline: int | None = None
    cameras: Sequence[str] = ("front",)
    image_size: int = 64
    device: str = "cpu"

    def task(self) -> LiftTask:
        return LiftTask(self.cubes, self.colours, self.instruct, self.deadline)


def spec(workers: int = 0, **options: Any) -> EnvSpec:
    """The spec of :func:`make` with the same options; Genesis itself is not needed."""
    chosen: _Options = catalog.call("genesis", _Options, options)
    device = "cpu" if workers and chosen.device == "auto" else chosen_device(chosen.device)
    if device not in DEVICES:
        raise UserError(f"Genesis runs on {' or '.join(map(repr, DEVICES))}, not on {device!r}; choose one of these.")
    if workers and device != "cpu":
        raise UserError(
            f"device={device!r} with workers={workers} would send every observation through the processor, so "
            "nothing is gained; leave workers at 0, or choose device 'cpu'."
        )
    found = task_spec(chosen.task(), tuple(chosen.cameras), chosen.image_size)
    return replace(found, name="genesis lift", device=device, profile="tolerant")


def make_in_process(num_envs: int, **options: Any) -> GenesisEnv:
    """``num_envs`` environments in one scene of this process, which has to have Genesis; ``options`` as :func:`make`.

    Raises UserError when Genesis is not installed, torch finds no GPU for "cuda", or so many environments do not fit
    the memory.
    """
    found, chosen = spec(**options), _Options(**options)
    require_positive(num_envs=num_envs)
    genesis, task = engine(found.device), chosen.task()

    def scene(count: int, cameras: Sequence[str]) -> Scene:
        return Scene(genesis, count, task, Cameras(genesis, cameras, chosen.image_size))

    if num_envs >= _MANY:
        _require_memory(scene, num_envs, found.device)
    return GenesisEnv(task, found, scene(num_envs, chosen.cameras))


def _require_memory(scene: Callable[[int, Sequence[str]], Scene], num_envs: int, device: str) -> None:
    """Raise UserError, saying how many fit, when ``num_envs`` environments of a ``scene`` do not.

    What one takes is the difference between a scene of two and one of one, without cameras.
    """
    sizes = []
    for count in (1, 2):
        with closing(scene(count, ())) as small:
            sizes.append(small.nbytes())
    require_memory(sizes[1] - sizes[0], num_envs, torch.device(device))


@declare_task(expert=LiftExpert, spec=spec)
def make(num_envs: int, workers: int = 0, **options: Any) -> VecEnv:
    """Lift in Genesis; other options as ``_Options``.

    workers  0: one scene in this process; otherwise processes of Genesis' own installation, each with a scene of its
             share and one core of the processor

    Raises UserError with the commands that install Genesis where it is missing.
    """
    options |= {"device": spec(workers, **options).device}  # a wrong option is refused before anything starts
    if workers:
        return isolated.make(num_envs, "sims.genesis:make_in_process", options, workers, installation="genesis")
    return make_in_process(num_envs, **options)


def engine(device: str) -> Any:
    """The package ``genesis``, set up for ``device`` ("cpu" or "cuda").

    Raises UserError when it is not installed, when torch cannot use the GPU, and when it runs elsewhere already.
    """
    genesis = _imported()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU, so Genesis cannot simulate on 'cuda'; install NVIDIA's driver ('nvidia-smi' shows it) "
            "and a torch that was built for CUDA ('python -m torch.utils.collect_env'), or choose device 'cpu'."
        )
    backend = getattr(genesis, device)
    if not genesis._initialized:
        # Sizes of arrays are no part of its kernels then, so scenes of any number share what was compiled.
        genesis.init(backend=backend, precision="32", logging_level="error", performance_mode=False)
    elif genesis.backend != backend:
        raise UserError(
            f"Genesis runs on {genesis.backend.name!r} in this process and knows one device at a time, so no "
            f"environment on {device!r} can be made beside it; choose the same device for all."
        )
    return genesis


def _imported() -> Any:
    hook = sys.excepthook
    try:
        import genesis
    except ModuleNotFoundError as error:
        raise UserError(
            f"genesis is not installed beside vla-rl ({error}), so it cannot simulate in this process; run "
            "\"pip install 'vla-rl[genesis]'\", or 'vla-rl sims install genesis' and give the option workers=1."
        ) from error
    finally:
        sys.excepthook = hook  # Genesis' own prints every error twice
    return genesis


# -- the environment --------------------------------------------------------------------------------------------------


class GenesisEnv(DeviceTaskEnv):
    """``E`` environments of one task.

    An environment that diverges ends with the cause "diverged" and shows its last good state; the others go on.
    Genesis reads its own error codes every ten substeps, so more than once a control step.
    """

    def __init__(self, task: Task, spec: EnvSpec, scene: Scene) -> None:
        """``scene`` has ``E`` environments, with a cube of every colour that ``task`` has."""
        self._scene, self._steps = scene, round(spec.control_dt / DT)
        self._rows = scene.rest()
        num_envs = len(self._rows.qpos)
        super().__init__(task, spec, num_envs, self._rows.qpos.device)
        self._rest = scene.rest()[0]
        self._ctrl = self._rows.pinch.new_zeros((num_envs, 4))  # commanded pinch point and finger position, metres
        self._images: dict[str, Tensor] = {}
        self._stale = True  # whether a row was changed since the pictures were made

    def close(self) -> None:
        self._scene.close()

    def _put(self, env_ids: np.ndarray, episodes: Episodes) -> None:
        targets = self._to_device(episodes.ctrl.astype(np.float32))
        poses = episodes.qpos[:, CUBES_QPOS:].reshape(len(env_ids), -1, 7)
        theirs = self._rest.qpos.repeat(len(env_ids), 1)
        theirs[:, :FRANKA_JOINTS], theirs[:, FINGERS] = joints_at(targets[:, :3]), targets[:, 3:]
        cubes, every = theirs[:, CUBES:].view(len(env_ids), -1, 7), np.arange(len(env_ids))[:, None]
        cubes[every, episodes.task_state["colour"]] = self._to_device(poses.astype(np.float32))
        self._rows.qpos[env_ids], self._rows.vel[env_ids] = theirs, 0.0
        self._rows.pinch[env_ids], self._ctrl[env_ids] = targets[:, :3], targets
        self._stale = True

    def _simulate(self, ctrl: Tensor, running: Tensor) -> Tensor:
        self._ctrl = torch.where(running[:, None], ctrl.to(self._ctrl.dtype), self._ctrl)
        after, diverged = self._scene.advance(self._rows, self._ctrl[:, :3], self._ctrl[:, 3], self._steps)
        self._rows, self._stale = after.where(running & ~diverged, self._rows), True
        return diverged

    def _qpos(self) -> Tensor:
        colour = self._task_state["colour"].long().clamp(min=0)
        cubes = self._rows.qpos[:, CUBES:].view(self.num_envs, -1, 7)
        named = cubes[torch.arange(self.num_envs, device=self._device)[:, None], colour]
        return torch.cat([self._rows.pinch, self._rows.qpos[:, FINGERS], named.flatten(1)], 1)

    def _targets(self) -> Tensor:
        return self._ctrl

    def _pictures(self) -> Mapping[str, Tensor]:
        if self._stale:
            self._images, self._stale = self._scene.render(self._rows), False
        return {name: picture.clone() for name, picture in self._images.items()}

    def _restored(self, env_ids: np.ndarray) -> None:
        self._stale = True

    def _physics_arrays(self) -> dict[str, Any]:
        rows = {f"rows/{name}": self._view(value) for name, value in self._rows.arrays().items()}
        return {**rows, "ctrl": self._view(self._ctrl)}


# -- the scene ---------------------------------------------------------------------------------------------------------


def joints_at(pinch: Tensor) -> Tensor:
    """The seven joints [R,7] (radians) with the pinch point at ``pinch`` [R,3] (metres, within the workspace)."""
    return franka_joints(pinch, BASE[:2], _PADS)


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
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Scene:
    """``num_envs`` environments that Genesis simulates together."""

    def __init__(self, genesis: Any, num_envs: int, task: LiftTask, cameras: Cameras) -> None:
        """A cube of each colour that ``task`` names, which has the places of the cameras."""
        self._genesis, self._cameras = genesis, cameras
        self._scene = genesis.Scene(
            show_viewer=False,
            sim_options=genesis.options.SimOptions(dt=DT, substeps=SUBSTEPS),
            rigid_options=genesis.options.RigidOptions(enable_self_collision=False),
            profiling_options=genesis.options.ProfilingOptions(show_FPS=False),
            **cameras.options(),
        )
        plane = genesis.morphs.Plane(contype=_TABLE, conaffinity=_TABLE)
        self._scene.add_entity(plane, surface=genesis.surfaces.Rough(color=(0.72, 0.70, 0.66)))
        arm = genesis.morphs.MJCF(file=MODEL, pos=BASE, euler=(0.0, 0.0, degrees(BASE_TURN)))
        self._arm = self._scene.add_entity(arm, material=genesis.materials.Rigid(gravity_compensation=1.0))
        for number, colour in enumerate(list(COLOURS.values())[: len(task.texts)]):
            self._add_cube(number, colour)
        cameras.add(self._scene, task)
        self._scene.build(n_envs=num_envs)
        self._solver = self._scene.sim.rigid_solver
        self._hand = self._arm.get_link(HAND)
        self._arm.set_dofs_kp(STIFFNESS)
        self._arm.set_dofs_kv(DAMPING)
        self._arm.set_dofs_force_range([-force for force in FORCE], FORCE)
        qpos = self._solver.get_qpos()
        qpos[:, :FRANKA_JOINTS] = joints_at(qpos.new_tensor([[0.0, 0.0, 0.1]]))
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
        self._arm.control_dofs_position(torch.cat([joints_at(pinch), opening[:, None].expand(-1, 2)], 1))
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
        return position + _rotated(turn, position.new_tensor(PINCH).expand_as(position))

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


class Cameras:
    """Pictures of all environments of one scene, of ``size`` x ``size`` pixels.

    On a GPU Genesis' batch renderer makes them at once and they stay there; it needs CUDA.  On the processor its
    rasterizer draws one environment after the other with OpenGL (EGL or OSMesa), which takes as long as that sounds.
    """

    def __init__(self, genesis: Any, names: Sequence[str], size: int) -> None:
        self._genesis, self._names, self._size = genesis, tuple(names), size
        self._batched = genesis.backend == genesis.cuda
        self._cameras: dict[str, Any] = {}

    def options(self) -> dict[str, Any]:
        gs = self._genesis
        if not self._names:
            return {}
        light = {"type": "directional", "dir": _DIRECTION, "color": _DIFFUSE, "intensity": _STRENGTH}
        look = gs.options.VisOptions(
            shadow=False, split_envs=True, background_color=_BACKGROUND, ambient_light=_AMBIENT, lights=[light]
        )
        renderer = gs.renderers.BatchRenderer() if self._batched else gs.renderers.Rasterizer()
        return {"vis_options": look, "renderer": renderer}

    def add(self, scene: Any, task: Task) -> None:
        """Add what is seen only, and the cameras, to a ``scene`` that is not built yet."""
        if not self._names:
            return
        gs = self._genesis
        mat = gs.morphs.Box(size=_MAT_SIZE, fixed=True, collision=False)
        scene.add_entity(mat, surface=gs.surfaces.Rough(color=_MAT))
        if self._batched:
            scene.add_light((-0.3, -0.5, 1.2), _DIRECTION, _DIFFUSE, _STRENGTH, directional=True, castshadow=False)
        for name in self._names:
            camera = task.model.camera(name)
            _, up, backward = camera.mat0.reshape(3, 3).T
            self._cameras[name] = scene.add_camera(
                res=(self._size, self._size),
                pos=tuple(camera.pos),
                lookat=tuple(camera.pos - backward),
                up=tuple(up),
                fov=float(camera.fovy[0]),
                near=_NEAR,
                far=_FAR,
            )

    def render(self) -> dict[str, Tensor]:
        """{camera: uint8 [E,h,w,3]} of what the scene holds."""
        pictures: dict[str, Tensor] = {}
        for name, camera in self._cameras.items():  # the first takes over what was written to the simulator
            picture = camera.render(force_render=not pictures)[0]
            if not isinstance(picture, Tensor):  # of one environment: no axis for it, and a view that is upside down
                picture = torch.from_numpy(np.ascontiguousarray(picture))
            pictures[name] = picture[..., :3].reshape(-1, self._size, self._size, 3)
        return pictures
