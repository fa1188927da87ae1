"""Environments of one task of the tabletop on MuJoCo-Warp.

Scenes, rules, actions and instructions are those of ``sims.mujoco``: an episode of a seed begins equally in both, and
as long as nothing touches it goes on equally within float32.  Physics, rules and pictures are computed on one device
for all environments at once; ended ones are put back after every control step, so they stay as they are.  Seeds, clocks
and ends are kept on the host, which waits for the device once a decision (``vla_rl.contract.tracker``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from torch import Tensor

from sims.mujoco.looks import recolour
from sims.mujoco.task import Task
from sims.warp.parameters import PARAMETERS
from sims.warp.worlds import Worlds
from vla_rl.contract.env import EnvSpec, Observation, Observe, Snapshot, Step, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import parameter_rows
from vla_rl.contract.tracker import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT, DeviceTracker, restore_rows, select_rows


class WarpEnv:
    """``E`` environments of one task behind the environment contract (``VecEnv`` and ``Snapshots``).

    On "cpu" observations are numpy arrays, elsewhere tensors of that device.  Worlds whose state is not finite, or
    whose contacts found no room, are put back and end with the cause "diverged".
    """

    def __init__(self, task: Task, spec: EnvSpec, num_envs: int) -> None:
        """``spec``: that of ``task`` on MuJoCo, with the device on which to simulate."""
        if num_envs < 1:
            raise UserError(f"num_envs={num_envs} leaves nothing to simulate; give at least 1.")
        self.spec, self._task = spec, task
        self._size = max((image.shape[0] for image in spec.images.values()), default=0)  # of pictures, in pixels
        pixels = sum(image.shape[0] * image.shape[1] for image in spec.images.values())
        self._worlds = Worlds(task.model, num_envs, spec.device, task.substeps, pixels)
        self._device = self._worlds.device
        self._book = DeviceTracker(num_envs, self._tensor, task.failures)
        self._parameters = parameter_rows(PARAMETERS, {}, np.arange(num_envs))
        self._varied = False  # whether a parameter was ever given: what is not varied costs nothing
        self._cameras: dict[tuple[tuple[str, ...], int], Cameras] = {}  # by their names and the size of pictures
        self._task_state = {name: self._tensor(np.stack([value] * num_envs)) for name, value in task.task_state.items()}

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    @property
    def task(self) -> Task:
        """What is simulated: the model, its scenes and rules."""
        return self._task

    def reset(self, env_ids: Any, seeds: Any, parameters: Mapping[str, Any] | None = None) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R], not negative); see ``VariableEnv``."""
        index = self._book.index(on_host(env_ids))
        seed = self._book.seeds(index, on_host(seeds))
        self._parameters[index] = parameter_rows(PARAMETERS, parameters, index)
        self._set_physics(index, varied=bool(parameters))
        if index.size:
            episodes = [self._task.sample_episode(np.random.Generator(np.random.PCG64(int(value)))) for value in seed]
            if self._varied:
                values = [dict(zip(_NAMES, row, strict=True)) for row in self._parameters[index].tolist()]
                episodes = [self._task.vary_poses(*pair) for pair in zip(episodes, values, strict=True)]
            rows = self._tensor(index)
            qpos, ctrl = (np.stack([getattr(item, name) for item in episodes]) for name in ("qpos", "ctrl"))
            self._worlds.begin(rows, self._tensor(qpos), self._tensor(ctrl))
            for name, value in self._task_state.items():
                value[rows] = self._tensor(np.stack([item.task_state[name] for item in episodes])).to(value.dtype)
        self._book.begin(index, seed)
        return self._book.begun(self._observe(self._tensor(self._book.time)))

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] in metres and grip sign; see ``VecEnv.step``."""
        return self._book.execute_there(chunk, self.spec, observe, self._advance, self._observe).mapped(self._output)

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Everything the future of ``env_ids`` depends on, as numeric arrays [R,...]; see ``Snapshots``."""
        index = self._book.index(on_host(env_ids))
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids``, which need not be those it was taken from."""
        index = self._book.index(on_host(env_ids))
        restore_rows(self._arrays(), index, snapshot)
        nominal = parameter_rows(PARAMETERS, {}, index)
        self._set_physics(index, varied=not np.array_equal(self._parameters[index], nominal))
        return self._observe(self._tensor(self._book.time))

    def render_rows(self, env_ids: Any, size: int, camera: str = "front") -> np.ndarray:
        """Pictures of the current state of ``env_ids`` for videos: uint8 [R,size,size,3]."""
        index = self._book.index(on_host(env_ids))
        return on_host(self._pictures((camera,), size)[camera])[index]

    def close(self) -> None:
        """Nothing is held beyond this object."""

    # -- one control step -------------------------------------------------------------------------------------------

    def _advance(self, action: Tensor, running: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """One control step of the ``running`` worlds; see ``AdvanceThere``."""
        worlds, task = self._worlds, self._task
        if self._device.type == "cpu" and not running.any():  # a GPU would have to be waited for to be asked
            return torch.zeros(self.num_envs), torch.zeros(self.num_envs, dtype=torch.int8)
        before = tuple(item.clone() for item in worlds.state())
        worlds.ctrl.copy_(task.control(worlds.ctrl, action))
        worlds.step()
        sound = worlds.sound()
        worlds.put_back(before, ~(running & sound))
        result = task.evaluate(worlds.qpos, self._task_state)
        for name, value in result.task_state.items():
            old = self._task_state[name]
            if value is not old:
                old.copy_(torch.where(running.reshape(-1, *(1,) * (old.ndim - 1)), value, old))
        cause = torch.where(time >= task.time_limit, TIME_LIMIT, 0)
        cause = torch.where(result.failure >= 0, FAILURES + result.failure, cause)
        cause = torch.where(sound, torch.where(result.success, SUCCESS, cause), DIVERGED)
        reward = torch.where(running & sound, result.reward, 0.0)
        return reward, torch.where(running, cause, 0).to(torch.int8)

    # -- observations and snapshots ---------------------------------------------------------------------------------

    def _observe(self, time: Tensor) -> Observation:
        task, qpos, ctrl = self._task, self._worlds.qpos, self._worlds.ctrl
        extras = task.observe_extras(qpos, self._task_state)
        images = self._pictures(tuple(self.spec.images), self._size) if self.spec.images else {}
        return Observation(
            {name: self._output(image) for name, image in images.items()},
            self._output(task.proprioception(qpos, ctrl)),
            self._output(task.instruction(self._task_state)),
            self._output(time.clone()),
            {name: self._output(item) for name, item in extras.items()},
        )

    def _pictures(self, names: tuple[str, ...], size: int) -> dict[str, Tensor]:
        """{camera: uint8 [E,size,size,3]} of the present state."""
        task = self._task
        if (names, size) not in self._cameras:
            self._cameras[names, size] = Cameras(self._worlds, names, size, task.painted, task.placed)
        rgba, positions = task.colours(self._task_state), task.mark_positions(self._task_state)
        if self._varied:
            rgba = recolour(rgba, self._values("object_hue"), self._values("object_saturation"))
        return self._cameras[names, size].pictures(rgba, positions)

    def _set_physics(self, env_ids: np.ndarray, varied: bool) -> None:
        """Masses and friction of ``env_ids``; until anything was ``varied`` they are those of the model."""
        self._varied |= varied
        if self._varied and env_ids.size:
            mass, friction = (self._values(name)[env_ids] for name in ("object_mass", "friction"))
            self._worlds.set_physics(self._tensor(env_ids), self._task.movable, mass, friction)

    def _values(self, name: str) -> Tensor:
        """float64 [E]: parameter ``name`` of every environment."""
        return self._tensor(self._parameters[:, _NAMES.index(name)])

    def _arrays(self) -> dict[str, Any]:
        names = ("qpos", "qvel", "qacc_warmstart", "ctrl")
        arrays = {f"physics/{name}": getattr(self._worlds, name) for name in names}
        arrays |= {f"task_state/{name}": item for name, item in self._task_state.items()}
        tensors = {name: self._output(item) for name, item in arrays.items()}
        return self._book.arrays() | {"parameters": self._parameters} | tensors

    def _tensor(self, item: np.ndarray) -> Tensor:
        """A copy of ``item`` on the device; the host does not wait for it."""
        return torch.from_numpy(np.array(item)).to(self._device, non_blocking=True)

    def _output(self, item: Any) -> Any:
        """``item`` as the contract has it: an array on the host, which shares its memory, a tensor elsewhere."""
        if self._device.type == "cpu":
            return item.numpy() if isinstance(item, Tensor) else item
        return torch.as_tensor(item, device=self._device)


_NAMES = tuple(parameter.name for parameter in PARAMETERS)


class Cameras:
    """Square uint8 pictures by some cameras of every world.

    The colours of the ``painted`` geoms and the positions of the ``placed`` ones, which are fixed to the world, differ
    between worlds.  No shadows, no antialiasing: as ``sims.mujoco.render`` draws, but edges may differ by a pixel.
    """

    def __init__(
        self, worlds: Worlds, names: Sequence[str], size: int, painted: Sequence[int], placed: Sequence[int]
    ) -> None:
        """``size`` in pixels; ``painted`` and ``placed`` are ids of geoms."""
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
        self._rgba, self._geoms = wp.to_torch(worlds.model.geom_rgba), wp.to_torch(worlds.data.geom_xpos)
        geoms = (torch.tensor(ids, dtype=torch.int64, device=worlds.device) for ids in (painted, placed))
        self._painted, self._placed = geoms

    def pictures(self, rgba: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """{camera: uint8 [E,size,size,3]} of the present state.

        ``rgba`` [E,painted,4]; ``positions`` [E,placed,3] in metres.
        """
        self._rgba[:, self._painted] = rgba
        self._geoms[:, self._placed] = positions.to(self._geoms.dtype)
        model, data = self._worlds.model, self._worlds.data
        with self._worlds.on_stream():
            mjw.kinematics(model, data)
            mjw.camlight(model, data)
            mjw.refit_bvh(model, data, self._context)
            mjw.render(model, data, self._context)
        bgra = self._bytes.reshape(self._worlds.num_envs, len(self._names), self._size, self._size, 4)
        return {name: bgra[:, i, ..., :3].flip(-1) for i, name in enumerate(self._names)}
