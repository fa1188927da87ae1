"""Environments of one task of the tabletop on MuJoCo-Warp.

Scenes, rules, actions and instructions are those of ``sims.mujoco``: an episode of a seed begins equally in both, and
as long as nothing touches it goes on equally within float32.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from torch import Tensor

from sims.base import VariedEnv, require_memory, require_positive
from sims.mujoco.env import LOOKS, PHYSICS, POSES
from sims.mujoco.render import recolour
from sims.mujoco.task import Episodes, Task
from sims.on_device import DeviceTaskEnv
from vla_rl.contract.env import EnvSpec, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import Parameter

# What an episode can vary: what does not change how the renderer was compiled.
PARAMETERS = (*POSES, *(item for item in LOOKS if item.name in ("object_hue", "object_saturation")), *PHYSICS)
# Room for contacts and constraints of one world: four cubes on the table (4 contacts each, 3 rows), two of them in a
# stack, and two fingers that touch a cube with 4 contacts of 4 rows.  Cubes that touch everything fit twice.
CONTACTS, CONSTRAINTS = 64, 256
_LOST = mjw.OverflowType.NEFC | mjw.OverflowType.BROADPHASE | mjw.OverflowType.NARROWPHASE | mjw.OverflowType.CCD
_WITH_SOLVER = 1.5  # times the state: the solver's arrays come with the first step (lift: 63 kB, then 88 kB a world)
_BYTES_PER_PIXEL = 4 + 3  # as the ray caster packs them, and as an observation holds them
# What differs between worlds: colours, and what follows from the mass of free bodies (power of the mass).
_MASSES = {"body_mass": 1, "body_inertia": 1, "body_subtreemass": 1, "body_invweight0": -1}
_VARIED = ("geom_rgba", "geom_friction", "dof_invweight0", *_MASSES)
_STATE = ("qpos", "qvel", "qacc_warmstart", "ctrl")

wp.config.log_level = wp.LOG_WARNING  # without a line for every kernel
_log = logging.getLogger(__name__)


def parameters(**options: Any) -> tuple[Parameter, ...]:
    """What every task can vary, whatever its ``options``; cameras, lights and the table stay as they are."""
    return PARAMETERS


class WarpEnv(VariedEnv, DeviceTaskEnv):
    """``E`` environments of one task; worlds whose state is not finite, or whose contacts found no room, diverge."""

    def __init__(self, task: Task, spec: EnvSpec, num_envs: int) -> None:
        """``spec``: that of ``task`` on MuJoCo, with the device on which to simulate."""
        require_positive(num_envs=num_envs)
        self._size = max((image.shape[0] for image in spec.images.values()), default=0)  # of pictures, in pixels
        pixels = sum(image.shape[0] * image.shape[1] for image in spec.images.values())
        self._worlds = Worlds(task.model, num_envs, spec.device, task.substeps, pixels)
        super().__init__(task, spec, num_envs, self._worlds.device)
        self._declare(PARAMETERS)
        self._cameras: dict[tuple[tuple[str, ...], int], Cameras] = {}  # by their names and the size of pictures

    def render_rows(self, env_ids: Any, size: int, camera: str = "front") -> np.ndarray:
        """Pictures of the current state of ``env_ids`` for videos: uint8 [R,size,size,3]."""
        return on_host(self._seen((camera,), size)[camera])[self._book.index(on_host(env_ids))]

    def _varied(self, env_ids: np.ndarray, episodes: Episodes) -> Episodes:
        return self.task.vary_poses(episodes, self._columns(env_ids)) if self._any_varied else episodes

    def _put(self, env_ids: np.ndarray, episodes: Episodes) -> None:
        self._worlds.begin(*map(self._to_device, (env_ids, episodes.qpos, episodes.ctrl)))

    def _simulate(self, ctrl: Tensor, running: Tensor) -> Tensor:
        worlds = self._worlds
        before = tuple(item.clone() for item in worlds.state())
        worlds.ctrl.copy_(ctrl)
        worlds.step()
        sound = worlds.sound()
        worlds.put_back(before, ~(running & sound))
        return ~sound

    def _qpos(self) -> Tensor:
        return self._worlds.qpos

    def _targets(self) -> Tensor:
        return self._worlds.ctrl

    def _pictures(self) -> Mapping[str, Tensor]:
        return self._seen(tuple(self.spec.images), self._size)

    def _seen(self, names: tuple[str, ...], size: int) -> dict[str, Tensor]:
        """{camera: uint8 [E,size,size,3]} of the present state."""
        task, task_state = self.task, self._task_state
        if (names, size) not in self._cameras:
            self._cameras[names, size] = Cameras(self._worlds, task, names, size)
        rgba, positions = task.colours(task_state), task.mark_positions(task_state)
        if self._any_varied:
            hue, saturation = (self._to_device(self._parameter(f"object_{part}")) for part in ("hue", "saturation"))
            rgba = recolour(rgba, hue, saturation)
        return self._cameras[names, size].pictures(rgba, positions)

    def _set_physics(self, env_ids: np.ndarray) -> None:
        factors = (self._to_device(self._parameter(name)[env_ids]) for name in ("object_mass", "friction"))
        self._worlds.set_physics(self._to_device(env_ids), self.task.movable, *factors)

    def _physics_arrays(self) -> dict[str, Any]:
        physics = {f"physics/{name}": self._view(getattr(self._worlds, name)) for name in _STATE}
        return {"parameters": self._parameters, **physics}


class Cameras:
    """Square uint8 pictures by some cameras of every world.

    The colours of the task's painted geoms and the positions of the placed ones, which are fixed to the world, differ
    between worlds.  No shadows, no antialiasing: as ``sims.mujoco.render`` draws, but edges may differ by a pixel.
    """

    def __init__(self, worlds: Worlds, task: Task, names: Sequence[str], size: int) -> None:
        """``size`` in pixels."""
        self._worlds, self._names, self._size = worlds, tuple(names), size
        with wp.ScopedDevice(str(worlds.device)):
            self._context: Any = mjw.create_render_context(
                worlds.host,
                nworld=worlds.num_envs,
                cam_res=(size, size),
                render_rgb=True,
                render_depth=False,
                render_seg=False,
                use_textures=False,
                cam_active=list(names),
                enable_specular=False,
                enable_emission=False,
            )
            packed = self._context.rgb_data  # uint32 [E,pixels of all cameras]
            self._bytes = wp.to_torch(
                wp.array(ptr=packed.ptr, dtype=wp.uint8, shape=(*packed.shape, 4), device=packed.device)
            )
            compile_kernels("pictures", self._render)
        self._rgba, self._geoms = wp.to_torch(worlds.model.geom_rgba), wp.to_torch(worlds.data.geom_xpos)
        geoms = (torch.tensor(ids, dtype=torch.int64, device=worlds.device) for ids in (task.painted, task.placed))
        self._painted, self._placed = geoms

    def pictures(self, rgba: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """{camera: uint8 [E,size,size,3]} of the present state.

        ``rgba`` [E,painted,4]; ``positions`` [E,placed,3] in metres.
        """
        self._rgba[:, self._painted] = rgba
        self._geoms[:, self._placed] = positions.to(self._geoms.dtype)
        with self._worlds.on_stream():
            self._render()
        bgra = self._bytes.reshape(self._worlds.num_envs, len(self._names), self._size, self._size, 4)
        return {name: bgra[:, i, ..., :3].flip(-1) for i, name in enumerate(self._names)}

    def _render(self) -> None:
        model, data = self._worlds.model, self._worlds.data
        mjw.kinematics(model, data)
        mjw.camlight(model, data)
        mjw.refit_bvh(model, data, self._context)
        mjw.render(model, data, self._context)


class Worlds:
    """``E`` worlds of ``model`` on ``device``.

    ``qpos`` [E,nq], ``qvel``, ``qacc_warmstart``, ``ctrl`` [E,nu]: float32 tensors that share the simulator's memory;
    what is written there is simulated from.  They are all that the future of a world depends on.
    """

    def __init__(self, model: mujoco.MjModel, num_envs: int, device: str, substeps: int, pixels: int = 0) -> None:
        """A call of :meth:`step` is ``substeps`` steps of physics, recorded as one graph (CUDA's on a GPU).

        ``pixels`` of the pictures of one world count towards its memory.
        """
        _require_driver(device)
        self.device, self.num_envs, self._substeps = torch.device(device), num_envs, substeps
        host = copy.copy(model)
        host.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)  # Warp has none that could be disabled
        room = {"nconmax": CONTACTS, "njmax": CONSTRAINTS}
        with wp.ScopedDevice(device):
            each = int(_WITH_SOLVER * _allocated(mjw.make_data(host, nworld=1, **room))) + pixels * _BYTES_PER_PIXEL
            require_memory(each, num_envs, self.device)
            self.host, self.model = host, mjw.put_model(host, batch_sizes=dict.fromkeys(_VARIED, num_envs))
            self.data = mjw.make_data(host, nworld=num_envs, **room)
            self.model.opt.warn_overflow = 0  # ``sound`` reports it
        self.qpos, self.qvel, self.qacc_warmstart, self.ctrl = (
            wp.to_torch(getattr(self.data, name)) for name in _STATE
        )
        self._overflow = wp.to_torch(self.data.overflow)
        self._start = tuple(item.clone() for item in self.state())
        self._graph = self._recorded()

    def state(self) -> tuple[Tensor, ...]:
        """The tensors [E,...] that a world's future depends on, sharing memory; see the class."""
        return self.qpos, self.qvel, self.qacc_warmstart, self.ctrl

    def put_back(self, before: tuple[Tensor, ...], which: Tensor) -> None:
        """Give the worlds ``which`` (bool [E]) the state ``before``."""
        for item, old in zip(self.state(), before, strict=True):
            item.copy_(torch.where(which[:, None], old, item))

    def begin(self, env_ids: Tensor, qpos: Tensor, ctrl: Tensor) -> None:
        """Put the worlds ``env_ids`` [R] at rest at ``qpos`` [R,nq] with the targets ``ctrl`` [R,nu]."""
        for item, start in zip(self.state(), self._start, strict=True):
            item[env_ids] = start[env_ids]
        self.qpos[env_ids], self.ctrl[env_ids] = qpos.float(), ctrl.float()

    def set_physics(self, env_ids: Tensor, movable: Sequence[int], mass: Tensor, friction: Tensor) -> None:
        """Scale the masses of the free bodies ``movable`` by ``mass`` [R], all friction by ``friction`` [R], both > 0.

        What MuJoCo derives from masses (``mj_setConst``) is scaled as well.
        """
        bodies = list(movable)
        dofs = [int(self.host.body_dofadr[body]) + i for body in bodies for i in range(self.host.body_dofnum[body])]
        for name, power in _MASSES.items():
            self._scale(name, env_ids, bodies, mass**power)
        self._scale("dof_invweight0", env_ids, dofs, 1 / mass)
        self._scale("geom_friction", env_ids, list(range(self.host.ngeom)), friction)

    def _scale(self, name: str, env_ids: Tensor, entries: list[int], factor: Tensor) -> None:
        """Give ``entries`` of the model's field ``name`` in ``env_ids`` [R] their nominal values times ``factor``."""
        field, index = wp.to_torch(getattr(self.model, name)), torch.tensor(entries, device=self.device)
        nominal = torch.tensor(getattr(self.host, name)[entries], dtype=field.dtype, device=self.device)
        scaled = factor.to(field.dtype).reshape(-1, *(1,) * nominal.ndim) * nominal
        field[env_ids[:, None], index] = scaled

    def step(self) -> None:
        self._overflow.zero_()
        with self.on_stream():
            wp.capture_launch(self._graph)

    def sound(self) -> Tensor:
        """bool [E]: the state is finite, and no contact of the last :meth:`step` found no room."""
        finite = torch.isfinite(torch.cat(self.state(), dim=1)).all(1)
        return finite & ((self._overflow & int(_LOST)) == 0)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Launches of Warp within wait for torch's, and torch's later ones for them."""
        with ExitStack() as stack:
            stack.enter_context(wp.ScopedDevice(str(self.device)))
            if self.device.type == "cuda":
                stream = wp.stream_from_torch(torch.cuda.current_stream(self.device))
                stack.enter_context(wp.ScopedStream(stream))
            yield

    def _recorded(self) -> Any:
        """The steps of physics as one graph, which spares the processor a hundred launches of each from Python."""
        with self.on_stream():
            compile_kernels("physics", lambda: mjw.step(self.model, self.data))
            mjw.step(self.model, self.data)
        with wp.ScopedDevice(str(self.device)), wp.ScopedCapture() as capture:
            for _ in range(self._substeps):
                mjw.step(self.model, self.data)
        for item, start in zip(self.state(), self._start, strict=True):
            item.copy_(start)
        return capture.graph


def compile_kernels(what: str, run: Callable[[], None]) -> None:
    """Compile the kernels that ``run`` launches on the present device, several at once, and log how many are done.

    Warp compiles a module when one of its kernels is launched, one after the other.  So ``run`` is gone through without
    a launch first; of loops and branches that the device decides, every body once.  Warp keeps what it has compiled for
    later processes.
    """
    found: dict[tuple[int, int | None], Any] = {}  # by module and threads in a block

    def note(kernel: Any, dim: Any, inputs: Any = (), outputs: Any = (), *more: Any, **options: Any) -> None:
        if kernel.is_generic:
            kernel = wp.overload(kernel, kernel.infer_argument_types([*inputs, *outputs]))
        if np.prod(dim):
            found[id(kernel.module), options.get("block_dim")] = kernel.module

    def decide(condition: Any, *bodies: Any, stream: Any = None, **options: Any) -> None:
        named = [options.pop(name, None) for name in ("on_true", "on_false", "while_body")]
        for body in filter(None, (*bodies, *named)):
            body(**options)

    fakes: Any = {"launch": note, "launch_tiled": note, "capture_if": decide, "capture_while": decide}
    with mock.patch.multiple(wp, **fakes):
        run()
    device = wp.get_device()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(wp.force_load, device, [module], block) for (_, block), module in found.items()]
        for done, job in enumerate(as_completed(jobs), start=1):
            job.result()
            _log.info("%d of %d kernels for %s", done, len(jobs), what)


def _require_driver(device: str) -> None:
    """Raise UserError for a ``device`` that torch or Warp cannot compute on."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(
            f"device={device!r} is none that torch knows, so nothing can be simulated; give 'cpu' or 'cuda'."
        ) from error
    if kind not in ("cpu", "cuda"):
        raise UserError(
            f"MuJoCo-Warp does not compute on {device!r}, so nothing can be simulated; give 'cpu' or 'cuda'."
        )
    if kind == "cuda" and not (torch.cuda.is_available() and wp.is_cuda_available()):
        raise UserError(
            f"no NVIDIA driver was found, so {device!r} cannot simulate; install one (nvidia-smi has to list the GPU) "
            "and torch for CUDA, or give device='cpu'."
        )


def _allocated(data: Any) -> int:
    """Bytes of all arrays of a dataclass, those of nested ones included."""
    values = [getattr(data, item.name) for item in dataclasses.fields(data)]
    nested = sum(map(_allocated, filter(dataclasses.is_dataclass, values)))
    return nested + sum(value.capacity for value in values if isinstance(value, wp.array))
