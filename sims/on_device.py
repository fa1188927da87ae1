"""Tasks of the tabletop in simulators that compute on a device, of which MuJoCo-Warp and Genesis are two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.base import SnapshotEnv
from sims.mujoco.generators import Generators
from sims.mujoco.task import Episodes, Task, TaskResult
from vla_rl.contract.env import Array, EnvSpec, Observation, Observe, Step
from vla_rl.contract.tracker import DeviceTracker


class DeviceTaskEnv(SnapshotEnv):
    """``E`` environments of one task behind the environment contract (``VecEnv`` and ``Snapshots``).

    Physics, rules and pictures are computed on one device for all environments at once; ended ones stay as they are.
    Seeds, clocks and ends are kept on the host, which waits for the device once a decision
    (``contract/tracker.py``).  On "cpu" observations are numpy arrays, elsewhere tensors of the device.  Actions are
    in metres and grip sign.
    """

    def __init__(self, task: Task, spec: EnvSpec, num_envs: int, device: torch.device) -> None:
        self.spec, self.task, self._device = spec, task, device
        self._book = DeviceTracker(num_envs, self._to_device, task.failures)
        start = {name: np.stack([value] * num_envs) for name, value in task.task_state.items()}
        self._task_state = {name: self._to_device(value) for name, value in start.items()}

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        return self._book.begun(super().reset(env_ids, seeds))

    def _start(self, env_ids: np.ndarray) -> None:
        if not env_ids.size:
            return
        episodes = self._varied(env_ids, self.task.sample_episodes(Generators.of_seeds(self._book.seed[env_ids])))
        rows = self._to_device(env_ids)
        self._put(env_ids, episodes)
        for name, value in self._task_state.items():
            value[rows] = self._to_device(episodes.task_state[name]).to(value.dtype)

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        step: Step = self._book.execute_there(chunk, self.spec, observe, self._advance, self._observe)
        return step.mapped(self._view)

    # -- what a simulator implements -----------------------------------------------------------------------------------

    def _varied(self, env_ids: np.ndarray, episodes: Episodes) -> Episodes:
        """``episodes`` [R] with the poses that the parameters of ``env_ids`` say."""
        return episodes

    def _put(self, env_ids: np.ndarray, episodes: Episodes) -> None:
        """Put the initial states of ``episodes`` [R] into ``env_ids`` [R]."""
        raise NotImplementedError

    def _simulate(self, ctrl: Tensor, running: Tensor) -> Tensor:
        """A control step of the ``running`` environments to the targets ``ctrl`` [E,nu]; returns which diverged [E].

        Those, and the others, are as before.
        """
        raise NotImplementedError

    def _qpos(self) -> Tensor:
        """[E,nq]: the state as MuJoCo's tabletop has it, from which the rules follow."""
        raise NotImplementedError

    def _targets(self) -> Tensor:
        """[E,nu]: the targets of the actuators."""
        raise NotImplementedError

    def _pictures(self) -> Mapping[str, Tensor]:
        """{camera: uint8 [E,h,w,3]} of the present state, not to be changed by callers or later."""
        raise NotImplementedError

    def _physics_arrays(self) -> dict[str, Any]:
        """{name: [E,...]} of what the future depends on besides clocks, ends and the task's state."""
        raise NotImplementedError

    # -- one control step ----------------------------------------------------------------------------------------------

    def _advance(self, action: Tensor, running: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """One control step of the ``running`` environments; see ``AdvanceThere``."""
        if self._device.type == "cpu" and not running.any():  # a GPU would have to be waited for to be asked
            return action.new_zeros(self.num_envs), action.new_zeros(self.num_envs)
        ctrl = self._tensor(self.task.control(self._view(self._targets()), self._view(action)))
        diverged = self._simulate(ctrl, running)
        result = self.task.evaluate(self._view(self._qpos()), self._states())
        self._keep(result, running)
        cause = self._tensor(result.causes(self._view(time >= self.spec.time_limit), self._view(diverged)))
        reward = torch.where(running & ~diverged, self._tensor(result.reward), 0.0)
        return reward, torch.where(running, cause, 0)

    def _keep(self, result: TaskResult, running: Tensor) -> None:
        for name, value in result.task_state.items():
            old = self._task_state[name]
            new = self._tensor(value).to(old.dtype)
            self._task_state[name] = torch.where(running.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    def _observe(self, time: Tensor | None = None) -> Observation:
        """The observation of all environments, whose clocks are ``time``, those of the host unless given."""
        time = self._to_device(self._book.time) if time is None else time.clone()
        qpos, task_state = self._view(self._qpos()), self._states()
        return Observation(
            {name: self._view(picture) for name, picture in self._pictures().items()} if self.spec.images else {},
            self.task.proprioception(qpos, self._view(self._targets())),
            self.task.instruction(task_state),
            self._view(time),
            self.task.observe_extras(qpos, task_state),
        )

    def _arrays(self) -> dict[str, Any]:
        states = {f"task_state/{name}": value for name, value in self._states().items()}
        return {**self._book.arrays(), **self._physics_arrays(), **states}

    # -- host and device -----------------------------------------------------------------------------------------------

    def _states(self) -> dict[str, Array]:
        return {name: self._view(value) for name, value in self._task_state.items()}

    def _to_device(self, item: np.ndarray) -> Tensor:
        """A copy of ``item`` on the device; the host does not wait for it."""
        return torch.from_numpy(np.array(item)).to(self._device, non_blocking=True)

    def _tensor(self, item: Array) -> Tensor:
        """What a rule has computed, as a tensor that shares its memory."""
        return torch.as_tensor(item, device=self._device)

    def _view(self, item: Any) -> Array:
        """``item`` as the contract has it, sharing its memory: an array on the host, a tensor elsewhere."""
        return item.numpy() if isinstance(item, Tensor) and self.spec.device == "cpu" else item
