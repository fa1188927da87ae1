"""One simulation of ManiSkill: one environment on the processor, any number on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vla_rl.contract.env import PRIVILEGED, ArraySpec


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


_POSE = (("x", "y", "z", "rx", "ry", "rz"), ("m", "m", "m", "rad", "rad", "rad"))


@dataclass(frozen=True)
class Controls:
    """Actions of a robot, or of several one after the other, and how ManiSkill wants them.

    spec    bounds, units and names of an action [D]
    offset  float32 [D]  what ManiSkill's 0 means, in the unit of the entry
    scale   float32 [D]  what is added to that by its 1; negative where its sign is the other one
    robots  {name: which entries are its}; {} for a single robot, whose actions ManiSkill takes as they are

    ManiSkill shortens a rotation of ``pd_ee_delta_pose`` whose norm is more than the bound of an entry; the spec's
    bounds are a box around that ball.
    """

    spec: ArraySpec
    offset: np.ndarray
    scale: np.ndarray
    robots: dict[str, slice]

    def theirs(self, action: np.ndarray) -> np.ndarray:
        """``action`` float32 [...,D] in ManiSkill's numbers, which are within -1 and 1 where it normalises."""
        return (action - self.offset) / self.scale


def controls_of(controller: Any) -> Controls:
    """The controls of ``controller``: ManiSkill's ``agent.controller``, a dict of them where there are several robots.

    Bounds are those of the unnormalised controller, so the same action means the same motion in every control mode
    that has its units.
    """
    robots: dict[str, slice] = {}
    parts: list[_Part] = []
    for robot, own in controller.items() if isinstance(controller, dict) else [("", controller)]:
        first = sum(part.size for part in parts)
        parts += [_Part.of(one, f"{robot}_" if robot else "") for one in _leaves(own)]
        if robot:
            robots[robot] = slice(first, sum(part.size for part in parts))
    parts = [part for part in parts if part.size]
    low, high, offset, scale = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("low", "high", "offset", "scale")
    )
    spec = ArraySpec(
        (low.size,),
        "float32",
        tuple(low.tolist()),
        tuple(high.tolist()),
        unit=",".join(unit for part in parts for unit in part.units),
        frame=", ".join(dict.fromkeys(part.frame for part in parts if part.frame)),
        names=tuple(name for part in parts for name in part.names),
    )
    return Controls(spec, offset, scale, robots)


@dataclass(frozen=True)
class _Part:
    """The entries of one controller, for instance those of the gripper."""

    low: np.ndarray
    high: np.ndarray
    offset: np.ndarray
    scale: np.ndarray
    names: tuple[str, ...]
    units: tuple[str, ...]
    frame: str

    @property
    def size(self) -> int:
        return self.low.size

    @classmethod
    def of(cls, controller: Any, prefix: str) -> _Part:
        normalised = bool(getattr(controller.config, "normalize_action", False))
        space = controller._original_single_action_space if normalised else controller.single_action_space
        low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (space.low, space.high))
        offset: np.ndarray = np.zeros_like(low)
        scale: np.ndarray = np.ones_like(low)
        if normalised:
            offset, scale = (high + low) / 2, (high - low) / 2
            if "PDEEPoseController" in _kinds(controller):  # it multiplies rotations by their lower bound
                offset[3:], scale[3:] = 0.0, controller.config.rot_lower
                low[3:], high[3:] = -np.abs(scale[3:]), np.abs(scale[3:])
        names, units = _entries(controller, low.size)
        frame = getattr(controller.config, "frame", "")
        return cls(low, high, offset, scale, tuple(prefix + name for name in names), units, frame)


def _leaves(controller: Any) -> Iterator[Any]:
    """The controllers that ``controller`` is made of, in the order of its actions."""
    parts = getattr(controller, "controllers", None)
    yield from (leaf for part in parts.values() for leaf in _leaves(part)) if parts else [controller]


def _kinds(controller: Any) -> set[str]:
    return {kind.__name__ for kind in type(controller).__mro__}


def _entries(controller: Any, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and units of the entries of a controller; what is not known is in its own units."""
    kinds = _kinds(controller)
    if "PDEEPosController" in kinds:
        return _POSE[0][:size], _POSE[1][:size]
    joints = [controller.joints[i] for i in _controlled(controller)]
    names = tuple(joint.name for joint in joints)
    units = tuple("m" if "prismatic" in str(joint.type) else "rad" for joint in joints)
    rates = tuple(f"{unit}/s" for unit in units)
    if "PDBaseForwardVelController" in kinds:
        return ("forward", "turn"), ("m/s", "rad/s")
    if "PDJointPosVelController" in kinds and size == 2 * len(names):
        return (*names, *(f"{name}_rate" for name in names)), (*units, *rates)
    if size == len(names) and "PDJointVelController" in kinds:
        return names, rates
    if size == len(names) and "PDJointPosController" in kinds:
        return names, units
    return tuple(f"{type(controller).__name__}{i}" for i in range(size)), ("1 (of the controller)",) * size


def _controlled(controller: Any) -> list[int]:
    """Which of its joints a controller takes targets for; the others follow these."""
    chosen = getattr(controller, "control_joint_indices", None)
    return list(range(len(controller.joints))) if chosen is None else [int(i) for i in chosen]


_LIMIT = 2**32  # numpy's seeds are below it


def folded(seed: int) -> int:
    """``seed`` as ManiSkill takes it."""
    return seed % _LIMIT


class SeededRows(TorchFunctionMode):
    """Inside, ``torch.rand``, ``randn`` and ``randint`` of R rows draw row k from a generator of the k-th seed.

    ManiSkill seeds one generator for all environments that it resets at once, so that a scene depends on which others
    are reset with it.  Row k draws the numbers that a reset of that environment alone on the processor draws.  Draws
    of another number of rows are left alone; and where a task repeats draws until every row fits, what a row draws
    afterwards depends on the other rows still.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        super().__init__()
        self._generators = [torch.Generator().manual_seed(folded(seed)) for seed in seeds]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        numbers, size = _split(func, args, given)
        if size is None or not size or size[0] != len(self._generators) or given.get("generator") is not None:
            return func(*args, **(kwargs or {}))
        device = given.pop("device", None)
        rows = [func(*numbers, size[1:], generator=generator, **given) for generator in self._generators]
        return torch.stack(rows).to(device)


def _split(func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """What ``func`` draws between and the size that it is asked for (None: no draw); the size leaves ``given``."""
    if func in (torch.rand, torch.randn):
        if "size" in given:
            return (), tuple(given.pop("size"))
        return (), tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)
    if func is torch.randint:
        ends = tuple(given.pop(name) for name in ("low", "high") if name in given)
        count = sum(isinstance(item, int) for item in args)
        size = given.pop("size", None) if len(args) == count else args[count]
        return (*args[:count], *ends), None if size is None else tuple(size)
    return (), None
