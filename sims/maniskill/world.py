"""One simulation of ManiSkill: one environment on the processor, any number on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sims.maniskill.controls import Controls, controls_of
from sims.maniskill.seeds import SeededRows, folded
from vla_rl.contract.env import PRIVILEGED


@dataclass(frozen=True)
class Outcome:
    """What an action led to, each [n] on the device of the simulation.

    reward  float32   ManiSkill's own
    success, failed   bool
    """

    reward: Tensor
    success: Tensor
    failed: Tensor


class Simulation(Protocol):
    """``num_envs`` environments that are simulated together, as ``ManiSkillEnv`` uses them; see ``World``."""

    num_envs: int

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None: ...

    def step(self, action: np.ndarray) -> Outcome: ...

    def state(self) -> Tensor: ...

    def privileged(self) -> dict[str, Tensor]: ...

    def images(self) -> dict[str, Tensor]: ...

    def close(self) -> None: ...


class World:
    """``n`` environments of a task, stepped together; ManiSkill's own reset and step without its autoreset.

    env         ManiSkill's environment, without wrappers
    controls    how its robots take actions
    visible     entries of ManiSkill's observation that it gives with pictures, where objects are to be seen
    """

    def __init__(self, env: Any, whole_state: bool) -> None:
        """``whole_state``: whether :meth:`state` is ManiSkill's state observation, objects included."""
        self.env, self.num_envs = env, int(env.num_envs)
        self.controls: Controls = controls_of(env.agent.controller)
        self._seeds = [0] * self.num_envs
        self._none = torch.zeros(self.num_envs, dtype=torch.bool, device=env.device)
        info = env.get_info()
        self.has_success = "success" in info  # whether the task knows success
        self._extra, self._agent = env._get_obs_extra(info), env._get_obs_agent()
        with _as_pictures_only(env):
            self._visible = set(self._extra) if whole_state else set(env._get_obs_extra(info))

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Start the episodes of ``seeds`` in ``rows``."""
        for row, seed in zip(rows, seeds, strict=True):
            self._seeds[row] = folded(seed)
        whole = len(rows) == self.num_envs
        options = {} if whole else {"env_idx": torch.as_tensor(rows, device=self.env.device)}
        with SeededRows(seeds) if self.num_envs > 1 else contextlib.nullcontext():
            obs, _ = self.env.reset(seed=list(self._seeds), options=options)
        self._agent, self._extra = obs["agent"], obs["extra"]

    def step(self, action: np.ndarray) -> Outcome:
        """Execute ``action`` float32 [n,D], in physical units."""
        env = self.env
        targets = torch.as_tensor(self.controls.theirs(action), device=env.device)
        robots = self.controls.robots
        taken = env._step_action({name: targets[:, own] for name, own in robots.items()} if robots else targets)
        env._elapsed_steps += 1
        info = env.get_info()
        self._agent, self._extra = env._get_obs_agent(), env._get_obs_extra(info)
        reward = env.get_reward(obs={"agent": self._agent, "extra": self._extra}, action=taken, info=info)
        return Outcome(
            torch.as_tensor(reward, dtype=torch.float32, device=env.device).reshape(self.num_envs),
            info.get("success", self._none).bool(),
            info.get("fail", self._none).bool(),
        )

    def state(self) -> Tensor:
        """float32 [n,S]: joints, the controller's own state, and what is visible of the task."""
        return torch.cat([value for _, value in self._shown()], 1)

    def state_names(self) -> tuple[str, ...]:
        """The names of the entries of :meth:`state`."""
        return tuple(
            f"{name}{i}" if value.shape[1] > 1 else name for name, value in self._shown() for i in range(value.shape[1])
        )

    def privileged(self) -> dict[str, Tensor]:
        """{"privileged/NAME": float32 [n,...]}: the rest, poses of objects for instance."""
        hidden = {name: value for name, value in self._extra.items() if name not in self._visible}
        return {PRIVILEGED + name: value for name, value in self._entries(hidden)}

    def images(self) -> dict[str, Tensor]:
        """{camera: uint8 [n,h,w,3]} of this moment."""
        seen = self.env._get_obs_sensor_data()
        return {name: textures["rgb"] for name, textures in seen.items() if "rgb" in textures}

    def close(self) -> None:
        """Free the simulation."""
        self.env.close()

    def _shown(self) -> list[tuple[str, Tensor]]:
        """The parts of :meth:`state`."""
        seen = {name: value for name, value in self._extra.items() if name in self._visible}
        return self._entries({**self._agent, **seen})

    def _entries(self, values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Tensor]]:
        """Every part of ``values`` as float32 [n,k], in the order of ManiSkill's state observation."""
        found: list[tuple[str, Tensor]] = []
        for name, value in values.items():
            if isinstance(value, Mapping):
                found += self._entries(value, f"{prefix}{name}_")
                continue
            tensor = torch.as_tensor(value, dtype=torch.float32, device=self.env.device)
            if tensor.numel():
                found.append((prefix + name, tensor.reshape(self.num_envs, -1)))
        return found


@contextlib.contextmanager
def _as_pictures_only(env: Any) -> Iterator[None]:
    """Inside, ``env`` leaves out of observations what is to be seen in pictures."""
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    mode, struct = env._obs_mode, env.obs_mode_struct
    env._obs_mode, env.obs_mode_struct = "rgb", parse_obs_mode_to_struct("rgb")
    try:
        yield
    finally:
        env._obs_mode, env.obs_mode_struct = mode, struct
