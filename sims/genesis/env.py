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
from vla_rl.contract.env import Array, Observation, Observe, Snapshot, Step, on_host
from vla_rl.contract.rows import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT, EpisodeTracker, restore_rows, select_rows
from vla_rl.contract.spec import EnvSpec


class GenesisEnv:
    """``E`` environments of one task behind the environment contract (``VecEnv`` and ``Snapshots``).

    An environment that diverges ends with the cause "diverged" and shows its last good state; the others go on.  Clocks
    and ends are kept on the host: a control step waits for a GPU once.
    """

    def __init__(self, task: Task, spec: EnvSpec, scene: Scene) -> None:
        """``scene`` has ``E`` environments, with a cube of every colour that ``task`` has."""
        self.spec, self._task, self._scene = spec, task, scene
        self._steps = round(spec.control_dt / DT)
        self._rows = scene.rest()
        num_envs = len(self._rows.qpos)
        self._book = EpisodeTracker(num_envs, task.failures)
        self._rest = scene.rest()[0]
        self._device = self._rows.qpos.device
        self._ctrl = self._rows.pinch.new_zeros((num_envs, 4))  # commanded pinch point and finger position, metres
        start = {name: np.stack([value] * num_envs) for name, value in task.task_state.items()}
        self._task_state = {name: self._output(value) for name, value in start.items()}
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
        return self._observe()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] in metres and grip sign; see ``VecEnv.step``."""
        step = self._book.execute(on_host(chunk), self.spec, observe, self._advance, self._observe)
        return step.mapped(self._output)

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Everything the future of ``env_ids`` depends on, as numeric arrays [R,...]; see ``Snapshots``."""
        index = self._book.index(on_host(env_ids))
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids``, which need not be those it was taken from."""
        self._stale, index = True, self._book.index(on_host(env_ids))
        restore_rows(self._arrays(), index, snapshot)
        return self._observe()

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
            self._task_state[name][index] = self._output(value)

    def _advance(self, index: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One control step of ``index`` [R] with ``action`` [R,4]; see ``EpisodeTracker``.  The others idle."""
        if not index.size:
            return np.zeros(0, np.float32), np.zeros(0, bool), np.zeros(0, int)
        ctrl = self._task.control(self._view(self._ctrl[index]), self._output(action))
        self._ctrl[index] = torch.as_tensor(ctrl, device=self._device, dtype=torch.float32)
        after, diverged = self._scene.advance(self._rows, self._ctrl[:, :3], self._ctrl[:, 3], self._steps)
        good = self._to_device(index)[~diverged[index]]
        self._rows[good] = after[good]
        self._stale = True
        result = self._task.evaluate(self._tabletop(index), self._states(index))
        for name, value in result.task_state.items():
            self._task_state[name][index] = value
        found = (diverged[index], result.success, result.failure, result.reward)
        # The only copy to the host: 0 and 1, codes and rewards are exact in float64.
        broken, success, failure, reward = (
            torch.stack([torch.as_tensor(item, device=self._device).double() for item in found]).cpu().numpy()
        )
        won = (success > 0) & (broken == 0)
        cause = np.where(self._book.time[index] >= self.spec.time_limit, TIME_LIMIT, 0)
        cause = np.where(failure >= 0, FAILURES + failure.astype(int), cause)
        cause = np.where(broken > 0, DIVERGED, np.where(won, SUCCESS, cause))
        return np.where(broken > 0, 0.0, reward).astype(np.float32), won, cause

    def _observe(self) -> Observation:
        """The observation of all environments."""
        if self._images and self._stale:
            self._images, self._stale = self._scene.render(self._rows), False
        every = np.arange(self.num_envs)
        qpos, task_state = self._tabletop(every), self._states(every)
        return Observation(
            {name: self._view(picture.clone()) for name, picture in self._images.items()},
            self._task.proprioception(qpos, self._view(self._ctrl)),
            self._task.instruction(task_state),
            self._output(self._book.time),
            self._task.observe_extras(qpos, task_state),
        )

    def _tabletop(self, index: np.ndarray) -> Array:
        """[R,q]: the state of ``index`` as MuJoCo's tabletop has it, from which the rules follow."""
        rows = self._rows[index]
        colour = torch.as_tensor(self._task_state["colour"][index], device=self._device).long().clamp(min=0)
        cubes = rows.qpos[:, CUBES:].view(len(index), -1, 7)
        named = cubes[torch.arange(len(index), device=self._device)[:, None], colour]
        return self._view(torch.cat([rows.pinch, rows.qpos[:, FINGERS], named.flatten(1)], 1))

    def _states(self, index: np.ndarray) -> dict[str, Array]:
        return {name: value[index] for name, value in self._task_state.items()}

    def _arrays(self) -> dict[str, Any]:
        rows = {f"rows/{name}": self._view(value) for name, value in self._rows.arrays().items()}
        states = {f"task_state/{name}": value for name, value in self._task_state.items()}
        return {**self._book.arrays(), **rows, "ctrl": self._view(self._ctrl), **states}

    def _to_device(self, item: np.ndarray) -> Tensor:
        return torch.from_numpy(item).to(self._device)

    def _view(self, item: Tensor) -> Array:
        """``item`` as the contract has it, sharing its memory: an array on the host, a tensor elsewhere."""
        return item.numpy() if self.spec.device == "cpu" else item

    def _output(self, item: np.ndarray) -> Array:
        """A copy of ``item`` as the contract has it."""
        return item.copy() if self.spec.device == "cpu" else self._to_device(item)
