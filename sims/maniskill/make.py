"""ManiSkill 3 (Tao et al. 2024): any task, from its state or from pixels, in processes or as one batch on a GPU.

It renders by Vulkan: a machine without a GPU needs Mesa's software driver of version 24.3 or newer, also for tasks
without pictures.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sims import catalog, isolated
from sims.base import chosen_device, require_positive
from sims.maniskill import vulkan
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.installations import home

OBSERVATIONS = ("state", "rgb")
REWARDS = ("normalized_dense", "dense", "sparse", "none")
_NAME = "maniskill"
_RECYCLE = 40_000  # steps after which a worker is replaced: rendering leaks, and ends a process after 50,000 to 250,000


def make_in_process(
    num_envs: int,
    task: str = "PickCube-v1",
    obs: str = "state",
    control_mode: str = "",
    reward: str = "",
    image_size: int = 128,
    time_limit: int | None = None,
    ends_at_success: bool = True,
    device: str = "cpu",
    arguments: Mapping[str, Any] | None = None,
) -> VecEnv:
    """``num_envs`` environments of a ManiSkill task in this process, which has to have ManiSkill.

    task             its id, "module:ID" for one that another module registers
    obs              "state": ``state`` is ManiSkill's whole state observation, objects included; "rgb": its cameras,
                     ``state`` is what ManiSkill gives with pictures, and the rest is ``privileged/*``
    control_mode     of the robot, "pd_ee_delta_pose" for instance; "" is the robot's first
    reward           "normalized_dense", "dense", "sparse" or "none"; "" is the task's first
    image_size       pixels of both sides of all cameras
    time_limit       actions of an episode; None: ManiSkill's own
    ends_at_success  whether success ends an episode; otherwise it goes on to the time limit, as ManiSkill's baselines
                     train with dense rewards, and ``success`` says whether it ever succeeded
    device           "cpu": one simulation for each environment; "cuda", "cuda:1": all in one simulation on the GPU
    arguments        more of the task, for instance {"robot_uids": "fetch"}

    Raises UserError for what cannot be built.
    """
    require_positive(num_envs=num_envs, image_size=image_size, time_limit=1 if time_limit is None else time_limit)
    for name, value, known in (("obs", obs, OBSERVATIONS), ("reward", reward or REWARDS[0], REWARDS)):
        if value not in known:
            raise UserError(f"ManiSkill has no {name} {value!r}, so nothing can be made; {did_you_mean(value, known)}")
    require_package()
    from sims.maniskill.build import build

    chosen = {"obs": obs, "control_mode": control_mode, "reward": reward, "image_size": image_size}
    return build(num_envs, task, chosen, time_limit, ends_at_success, device, dict(arguments or {}))


def make(num_envs: int, workers: int = 1, device: str = "cpu", **options: Any) -> VecEnv:
    """ManiSkill in ``workers`` processes, or with device "cuda" in this one; options as :func:`make_in_process`.

    Device "auto" is "cuda" where torch sees a GPU.

    The processes run where ManiSkill is: here if it is installed here, otherwise in the installation that "vla-rl sims
    install maniskill" makes.  Raises UserError when it is in neither.  With pictures a process is replaced, between
    episodes where it can be, before what rendering leaks ends it.
    """
    catalog.check_options(_NAME, make_in_process, options)
    if (device := chosen_device(device)) != "cpu":
        return make_in_process(num_envs, device=device, **options)
    env = "sims.maniskill.make:make_in_process"
    return in_workers(num_envs, env, options, workers, pictures=options.get("obs") == "rgb")


def in_workers(num_envs: int, env: str, options: Mapping[str, Any], workers: int, pictures: bool) -> VecEnv:
    """``env`` ("module:make") with ``options`` in ``workers`` processes that have ManiSkill.

    With ``pictures`` they are replaced, between episodes where it can be, before what rendering leaks ends them.
    Raises UserError where ManiSkill is neither here nor installed.
    """
    return isolated.make(
        num_envs,
        env,
        options,
        workers,
        installation="" if _is_here() else _NAME,
        variables=vulkan.variables(_folder()),
        recycle_steps=_RECYCLE if pictures else 0,
    )


def driver_verdict() -> str:
    """Whether this machine has a Vulkan driver that ManiSkill can use, and what to do where it has none."""
    return vulkan.verdict(vulkan.drivers(vulkan.variables(_folder())))


def _folder() -> Path:
    """The folder of the installation, which may not exist."""
    return home() / "sims" / _NAME


def _is_here() -> bool:
    return importlib.util.find_spec("mani_skill") is not None


def require_package() -> None:
    """Raise UserError unless ManiSkill is in this process' environment."""
    if not _is_here():
        raise UserError(
            "ManiSkill is not installed here, so it cannot simulate in this process; run "
            "\"pip install 'vla-rl[maniskill]'\"."
        )
