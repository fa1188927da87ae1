"""The Genesis environment: the rules of a tabletop task, applied to what Genesis simulates.

Rules, episodes, actions and observations are those of the task in MuJoCo (``sims.mujoco``); the robot and the physics
are other ones.  A seed puts the same cubes at the same places in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.genesis import franka
from sims.genesis.scene import CUBES, DT, FINGERS, Scene
from sims.mujoco.scene import CUBES_QPOS
from sims.mujoco.task import Episode, Task
from vla_rl.contract.device import DeviceTracker
from vla_rl.contract.env import Array, Observation, Observe, Snapshot, Step, on_host
from vla_rl.contract.rows import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT, restore_rows, select_rows
from vla_rl.contract.spec import EnvSpec


class GenesisEnv:
    """``E`` environments of one task behind the environment contract (``VecEnv`` and ``Snapshots``).

    An environment that diverges ends with the cause "diverged" and shows its last good state; the others go on.  The
    host reads ends once a decision (``vla_rl.contract.device``), but Genesis reads its own error codes every ten
    substeps, so more than once a control step.
    """

    def __init__(self, task: Task, spec: EnvSpec, scene: Scene) -> None:
        """``scene`` has ``E`` environments, with a cube of every colour that ``task`` has."""
        self.spec, self._task, self._scene = spec, task, scene
        self._steps = round(spec.control_dt / DT)
        self._rows = scene.rest()
        num_envs = len(self._rows.qpos)
        self._device = self._rows.qpos.device
        self._book = DeviceTracker(num_envs, self._to_device, task.failures)
        self._rest = scene.rest()[0]
        self._ctrl = self._rows.pinch.new_zeros((num_envs, 4))  # commanded pinch point and finger position, metres
        start = {name: np.stack([value] * num_envs) for name, value in task.task_state.items()}
        self._task_state = {name: self._to_device(value) for name, value in start.items()}
        shape = (num_envs, *next(iter(spec.images.values())).shape) if spec.images else ()
        self._images = {name: torch.zeros(shape, dtype=torch.uint8, device=self._device) for name in spec.images}
        self._stale = True  # whether a row was changed since the pictures were made

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R], not negative)."""
        index = self._book.index(on_host(env_ids))
        seed = self._book.seeds(index, on_host(seeds))
        if index.size:
            generators = (np.random.Generator(np.random.PCG64(int(value))) for value in seed)
            self._begin(index, [self._task.sample_episode(generator) for generator in generators])
            self._book.begin(index, seed)
            self._stale = True
        return self._book.begun(self._observe(self._to_device(self._book.time)))

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] in metres and grip sign; see ``VecEnv.step``."""
        return self._book.execute_there(chunk, self.spec, observe, self._advance, self._observe).mapped(self._view)

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Everything the future of ``env_ids`` depends on, as numeric arrays [R,...]; see ``Snapshots``."""
        index = self._book.index(on_host(env_ids))
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids``, which need not be those it was taken from."""
        self._stale, index = True, self._book.index(on_host(env_ids))
        restore_rows(self._arrays(), index, snapshot)
        return self._observe(self._to_device(self._book.time))

    def close(self) -> None:
        """Free the scene; safe to call twice."""
        self._scene.close()

    def _begin(self, index: np.ndarray, episodes: list[Episode]) -> None:
        """Put the initial states of ``episodes`` [R] into the environments ``index``."""
        ctrl = self._to_device(np.stack([episode.ctrl for episode in episodes]).astype(np.float32))
        task_state = {name: np.stack([episode.task_state[name] for episode in episodes]) for name in self._task_state}
        poses = np.stack([episode.qpos for episode in episodes])[:, CUBES_QPOS:].reshape(len(index), -1, 7)
        qpos = self._rest.qpos.repeat(len(index), 1)
        qpos[:, : franka.ARM], qpos[:, FINGERS] = franka.joints_at(ctrl[:, :3]), ctrl[:, 3:]
        cubes, every = qpos[:, CUBES:].view(len(index), -1, 7), np.arange(len(index))[:, None]
        cubes[every, task_state["colour"]] = self._to_device(poses.astype(np.float32))
        self._rows.qpos[index], self._rows.vel[index] = qpos, 0.0
        self._rows.pinch[index], self._ctrl[index] = ctrl[:, :3], ctrl
        for name, value in task_state.items():
            self._task_state[name][index] = self._to_device(value).to(self._task_state[name].dtype)

    def _advance(self, action: Tensor, running: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """One control step of the ``running`` environments; see ``AdvanceThere``."""
        if self._device.type == "cpu" and not running.any():  # a GPU would have to be waited for to be asked
            return action.new_zeros(self.num_envs), action.new_zeros(self.num_envs)
        ctrl = self._tensor(self._task.control(self._view(self._ctrl), self._view(action)))
        self._ctrl = torch.where(running[:, None], ctrl.to(self._ctrl.dtype), self._ctrl)
        after, diverged = self._scene.advance(self._rows, self._ctrl[:, :3], self._ctrl[:, 3], self._steps)
        good = running & ~diverged
        self._rows, self._stale = after.where(good, self._rows), True
        result = self._task.evaluate(self._tabletop(), self._states())
        for name, value in result.task_state.items():
            old = self._task_state[name]
            new = self._tensor(value).to(old.dtype)
            self._task_state[name] = torch.where(running.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
        success, failure, reward = (self._tensor(item) for item in (result.success, result.failure, result.reward))
        cause = torch.where(time >= self.spec.time_limit, TIME_LIMIT, 0)
        cause = torch.where(failure >= 0, FAILURES + failure, cause)
        cause = torch.where(diverged, DIVERGED, torch.where(success, SUCCESS, cause))
        return torch.where(good, reward, 0.0), torch.where(running, cause, 0)

    def _observe(self, time: Tensor) -> Observation:
        """The observation of all environments, whose clocks are ``time``."""
        if self._images and self._stale:
            self._images, self._stale = self._scene.render(self._rows), False
        qpos, task_state = self._tabletop(), self._states()
        return Observation(
            {name: self._view(picture.clone()) for name, picture in self._images.items()},
            self._task.proprioception(qpos, self._view(self._ctrl)),
            self._task.instruction(task_state),
            self._view(time.clone()),
            self._task.observe_extras(qpos, task_state),
        )

    def _tabletop(self) -> Array:
        """[E,q]: the state as MuJoCo's tabletop has it, from which the rules follow."""
        colour = self._task_state["colour"].long().clamp(min=0)
        cubes = self._rows.qpos[:, CUBES:].view(self.num_envs, -1, 7)
        named = cubes[torch.arange(self.num_envs, device=self._device)[:, None], colour]
        return self._view(torch.cat([self._rows.pinch, self._rows.qpos[:, FINGERS], named.flatten(1)], 1))

    def _states(self) -> dict[str, Array]:
        return {name: self._view(value) for name, value in self._task_state.items()}

    def _arrays(self) -> dict[str, Any]:
        rows = {f"rows/{name}": self._view(value) for name, value in self._rows.arrays().items()}
        states = {f"task_state/{name}": value for name, value in self._states().items()}
        return {**self._book.arrays(), **rows, "ctrl": self._view(self._ctrl), **states}

    def _to_device(self, item: np.ndarray) -> Tensor:
        """A copy of ``item`` on the device; the host does not wait for it."""
        return torch.from_numpy(np.array(item)).to(self._device, non_blocking=True)

    def _tensor(self, item: Array) -> Tensor:
        """What a rule has computed, as a tensor that shares its memory."""
        return torch.as_tensor(item, device=self._device)

    def _view(self, item: Tensor) -> Array:
        """``item`` as the contract has it, sharing its memory: an array on the host, a tensor elsewhere."""
        return item.numpy() if self.spec.device == "cpu" else item
