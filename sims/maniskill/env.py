"""ManiSkill 3: any of its tasks, from its state or from pixels, on the processor or as one batch on a GPU.

A seed draws ManiSkill's own scene of that seed.  It renders by Vulkan; a machine without a GPU needs Mesa's software
driver of version 24.3 or newer also for tasks without pictures (``vla-rl inspect`` finds out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.maniskill.world import Outcome, Simulation
from vla_rl.contract.env import Observation, Observe, Snapshot, Step, on_host
from vla_rl.contract.rows import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT, EpisodeTracker, restore_rows, select_rows
from vla_rl.contract.spec import EnvSpec


class ManiSkillEnv:
    """``E`` environments of one task behind the environment contract (``VecEnv``), in one ``World`` or several.

    Success ("success") and ManiSkill's "fail" ("failed") terminate an episode, ``spec.time_limit`` truncates it, and so
    does a state or reward that is not finite ("diverged", reward 0; the last finite observation is returned).

    Clocks, seeds and ends are kept on the host: rewards and ends come there once for every action.  State, privileged
    entries and pictures stay on ``spec.device``.  A world on a GPU moves all its environments; what it does with those
    that idle is never shown.
    """

    def __init__(self, spec: EnvSpec, worlds: Sequence[Simulation], ends_at_success: bool) -> None:
        """Owns ``worlds``, whose environments follow each other."""
        self.spec, self._worlds, self._ends_at_success = spec, worlds, ends_at_success
        ends = np.cumsum([world.num_envs for world in worlds])
        count = int(ends[-1])
        self._rows = [slice(int(end) - world.num_envs, int(end)) for end, world in zip(ends, worlds, strict=True)]
        self._book = EpisodeTracker(count, ("failed",))
        self._state = self._zeros(count, spec.state.shape, torch.float32)
        self._extras = {name: self._zeros(count, one.shape, torch.float32) for name, one in spec.extras.items()}
        self._images = {name: self._zeros(count, one.shape, torch.uint8) for name, one in spec.images.items()}
        self._stale = np.zeros(count, bool)  # environments that have moved since their pictures were taken

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R], not negative)."""
        index = self._book.index(on_host(env_ids))
        seed = self._book.seeds(index, on_host(seeds))
        self._book.begin(index, seed)
        self._begin(index)
        return self._observe()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D]; see ``VecEnv.step``."""
        step = self._book.execute(on_host(chunk), self.spec, observe, self._execute, self._observe)
        return step if self.spec.device == "cpu" else step.mapped(self._to_device)

    def close(self) -> None:
        """Close every simulation; safe to call twice."""
        for world in self._worlds:
            world.close()
        self._worlds = ()

    # -- one moment ---------------------------------------------------------------------------------------------------

    def _begin(self, env_ids: np.ndarray) -> None:
        for world, rows in zip(self._worlds, self._rows, strict=True):
            own = _within(env_ids, rows)
            if own.size:
                world.reset((own - rows.start).tolist(), self._book.seed[own].tolist())
                self._keep(rows, own, world.state(), world.privileged())

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if env_ids.size == self.num_envs:
            reward, success, failed, sound = self._move(env_ids, action)
        else:
            every = np.zeros((self.num_envs, self.spec.action_dim), np.float32)
            every[env_ids] = action
            reward, success, failed, sound = self._move(env_ids, every)[:, env_ids]
        late = self._book.time[env_ids] >= self.spec.time_limit
        succeeded = (success > 0) | self._book.success[env_ids]
        if sound.all() and not (success.any() or failed.any() or late.any()):
            return reward, succeeded, np.zeros(env_ids.size, int)
        cause = np.where(failed > 0, FAILURES, np.where(late, TIME_LIMIT, 0))
        cause = np.where(success > 0, SUCCESS, cause) if self._ends_at_success else cause
        cause = np.where(sound > 0, cause, DIVERGED)
        ended = env_ids[cause > 0]
        if ended.size and self._images:  # their worlds go on
            self._look(ended)
        return np.where(sound > 0, reward, np.float32(0)), succeeded & (sound > 0), cause

    def _move(self, env_ids: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Execute ``action`` [E,D] and keep what ``env_ids`` show: float32 [4,E] of reward, success, failed, sound."""
        found = np.zeros((4, self.num_envs), np.float32)
        for world, rows in zip(self._worlds, self._rows, strict=True):
            own = _within(env_ids, rows)
            if not own.size:
                continue
            outcome = world.step(action[rows])
            state, hidden = world.state(), world.privileged()
            found[:, rows] = self._read(outcome, [state, *hidden.values()])
            self._keep(rows, own[found[3, own] > 0], state, hidden)
        return found

    def _read(self, outcome: Outcome, shown: Sequence[Tensor]) -> np.ndarray:
        """float32 [4,n] on the host, of reward, success, failed, and whether these and ``shown`` are finite."""
        parts = [outcome.reward, outcome.success, outcome.failed]
        read = torch.cat([torch.stack(parts, 1), *(one.flatten(1) for one in shown)], 1)
        flags = torch.cat([read[:, :3], read.isfinite().all(1, keepdim=True)], 1)
        return flags.cpu().numpy().T

    def _keep(self, rows: slice, env_ids: np.ndarray, state: Tensor, hidden: Mapping[str, Tensor]) -> None:
        """Take over what ``env_ids`` show of ``state`` and ``hidden``, those of all ``rows`` of their world."""
        whole = env_ids.size == rows.stop - rows.start
        places, chosen = (rows, slice(None)) if whole else (env_ids, env_ids - rows.start)
        self._state[places] = state[chosen]
        for name, value in hidden.items():
            self._extras[name][places] = value[chosen]
        self._stale[env_ids] = True

    def _look(self, env_ids: np.ndarray) -> None:
        """Take pictures of ``env_ids``."""
        for world, rows in zip(self._worlds, self._rows, strict=True):
            own = _within(env_ids, rows)
            for name, image in world.images().items() if own.size else ():
                self._images[name][own] = image[own - rows.start].to(self._images[name].device)
        self._stale[env_ids] = False

    def _observe(self) -> Observation:
        if self._images:
            self._look(np.flatnonzero(self._stale))
        images = {name: self._output(one) for name, one in self._images.items()}
        extras = {name: self._output(one) for name, one in self._extras.items()}
        task, time = (self._to_device(part) for part in (np.zeros(self.num_envs, np.int64), self._book.time))
        return Observation(images, self._output(self._state), task, time, extras)

    # -- host and device ----------------------------------------------------------------------------------------------

    def _zeros(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros((count, *shape), dtype=dtype, device=self.spec.device)

    def _output(self, tensor: Tensor) -> Any:
        """A copy in the form that callers get: numpy on the host."""
        return tensor.numpy().copy() if self.spec.device == "cpu" else tensor.clone()

    def _to_device(self, array: np.ndarray) -> Any:
        return array.copy() if self.spec.device == "cpu" else torch.as_tensor(array.copy(), device=self.spec.device)


class ReplayingManiSkillEnv(ManiSkillEnv):
    """A ``ManiSkillEnv`` of worlds of one environment, with ``Snapshots``: a seed and the actions since.

    ``restore`` replays them, which takes as long as they took.
    """

    def __init__(self, spec: EnvSpec, worlds: Sequence[Simulation], ends_at_success: bool) -> None:
        super().__init__(spec, worlds, ends_at_success)
        self._actions = np.zeros((self.num_envs, spec.time_limit, spec.action_dim), np.float32)

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        obs = super().reset(env_ids, seeds)
        self._actions[self._book.index(env_ids)] = 0
        return obs

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Seeds, clocks, ends and the actions since the reset, as numeric arrays [R,...]; see ``Snapshots``."""
        index = self._book.index(env_ids)
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids`` by replaying its actions."""
        index = self._book.index(env_ids)
        restore_rows(self._arrays(), index, snapshot)
        self._begin(index)
        for env_id in index.tolist():
            for action in self._actions[env_id, : self._book.time[env_id]]:
                self._move(np.array([env_id]), np.tile(action, (self.num_envs, 1)))
        return self._observe()

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._actions[env_ids, self._book.time[env_ids] - 1] = action
        return super()._execute(env_ids, action)

    def _read(self, outcome: Outcome, shown: Sequence[Tensor]) -> np.ndarray:
        # A small operation takes numpy a third of torch's time.
        reward = outcome.reward.numpy()
        sound = np.isfinite(reward)
        for one in shown:
            sound &= np.isfinite(one.numpy()).reshape(len(sound), -1).all(1)
        return np.array([reward, outcome.success.numpy(), outcome.failed.numpy(), sound], np.float32)

    def _arrays(self) -> dict[str, np.ndarray]:
        return self._book.arrays() | {"actions": self._actions}


def _within(env_ids: np.ndarray, rows: slice) -> np.ndarray:
    """Those of ``env_ids`` that are in ``rows``."""
    found: np.ndarray = env_ids[(env_ids >= rows.start) & (env_ids < rows.stop)]
    return found
