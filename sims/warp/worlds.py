"""The physics of many copies of one MuJoCo model on one device, with their state as torch tensors that share memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from sims.device_memory import require_memory
from sims.warp.memory import allocated
from vla_rl.contract.errors import UserError

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


class Worlds:
    """``E`` worlds of ``model`` on ``device``.

    ``qpos`` [E,nq], ``qvel``, ``qacc_warmstart``, ``ctrl`` [E,nu]: float32 tensors that share the simulator's memory;
    what is written there is simulated from.  They are all that the future of a world depends on.
    """

    def __init__(self, model: mujoco.MjModel, num_envs: int, device: str, substeps: int, pixels: int = 0) -> None:
        """A call of :meth:`step` is ``substeps`` steps of physics; one is recorded as a graph (CUDA's on a GPU).

        ``pixels`` of the pictures of one world count towards its memory.
        """
        _require_driver(device)
        self.device, self.num_envs, self._substeps = torch.device(device), num_envs, substeps
        host = copy.copy(model)
        host.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)  # Warp has none that could be disabled
        room = {"nconmax": CONTACTS, "njmax": CONSTRAINTS}
        with wp.ScopedDevice(device):
            each = int(_WITH_SOLVER * allocated(mjw.make_data(host, nworld=1, **room))) + pixels * _BYTES_PER_PIXEL
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
        """``substeps`` steps of physics in every world."""
        self._overflow.zero_()
        with self.on_stream():
            for _ in range(self._substeps):
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
        """One step of physics as a graph, which spares the processor a hundred launches from Python.

        A first run compiles the kernels.
        """
        with self.on_stream():
            mjw.step(self.model, self.data)
        with wp.ScopedDevice(str(self.device)), wp.ScopedCapture() as capture:
            mjw.step(self.model, self.data)
        for item, start in zip(self.state(), self._start, strict=True):
            item.copy_(start)
        return capture.graph


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
