"""Where recipes name something of ``sims`` themselves: imported when it is needed, and typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from vla_rl.contract.env import Observation, VecEnv
from vla_rl.contract.task import Parameter

if TYPE_CHECKING:
    from sims.isolation.remote import Server

Scenes: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""images uint8 [N,h,w,3], tasks int [N], uv float [N,2] (where the named object is, within [-1, 1]), state [N,S]."""

Claim: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""For every environment an instruction (index into ``spec.tasks``), whether its picture shows that fulfilled, and
whether that is known."""
Claims: TypeAlias = Callable[[Observation], Iterable[Claim]]
Progress: TypeAlias = Callable[[Observation], np.ndarray]
"""How far each environment's task has come, float [E] from 0 to 1, as somebody who watches could estimate it."""


@dataclass(frozen=True)
class EnvOptions:
    """The options of an environment that is named already."""

    options: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class NamedEnv:
    """What ``vla-rl inspect NAME`` takes besides the name: ``--env.options JSON``."""

    env: EnvOptions = EnvOptions()


class Expert(Protocol):
    """A scripted expert."""

    def act(self, obs: Observation) -> np.ndarray:
        """The planned actions, float32 [E,H,D], in physical units."""


def make_env(name: str, num_envs: int, **options: object) -> VecEnv:
    """The environment ``name``, of the catalogue or "package.module:make", with its own ``options``."""
    return catalog().make(name, num_envs=num_envs, **options)


def catalog() -> ModuleType:
    """The module that knows the environments by name."""
    from sims import catalog

    return catalog


def installations() -> ModuleType:
    """The module that makes and finds the virtual environments of simulators."""
    from sims import installations

    return installations


def parameters_of(name: str, options: Mapping[str, object] | None = None) -> tuple[Parameter, ...]:
    """What the environment ``randomize`` can vary in environment ``name`` with ``options``."""
    from sims import randomize

    return randomize.parameters_of(name, options)


def env_server(name: str, port: int, host: str, key: str, certificate: str, private_key: str) -> Server:
    """A server of environment ``name`` for other machines, see ``sims/isolation/remote.py``."""
    from sims.isolation.remote import Security, Server

    catalog().find(name)
    return Server(name, port, host, Security(key, certificate, private_key))


def renderers() -> dict[str, str]:
    """The OpenGL backends of this machine, and whether each works."""
    from sims.mujoco.canvas import available_backends

    return available_backends()


def maniskill_driver() -> str:
    """Whether this machine has a Vulkan driver that ManiSkill can use, and what to do where it has none."""
    from sims.maniskill.make import driver_verdict

    return driver_verdict()
