"""Builds ManiSkill's environments, and says what is wrong where they cannot be built."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from sims.device_memory import free_bytes, require_memory
from sims.host_memory import process_bytes
from sims.maniskill.env import ManiSkillEnv, ReplayingManiSkillEnv
from sims.maniskill.tasks import instruction_of, registered
from sims.maniskill.world import Simulation, World
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import ArraySpec, EnvSpec

_MAX_CHUNK = 50
_MANY = 256  # environments; so many fit wherever ManiSkill starts
_FEW = 32  # environments whose memory is measured
AnyWorld = TypeVar("AnyWorld", bound=Simulation)


def build(
    num_envs: int,
    task: str,
    chosen: Mapping[str, Any],
    time_limit: int | None,
    ends_at_success: bool,
    device: str,
    arguments: Mapping[str, Any],
) -> VecEnv:
    """The environment of ``sims.maniskill.make:make_in_process``; ``chosen``: its obs, control mode, reward, size."""
    found = registered(task)
    limit = time_limit or found.max_episode_steps
    if not limit:
        raise UserError(
            f"{task} has no time limit in ManiSkill, so its episodes might never end; give the option time_limit, in "
            "actions."
        )
    require_gpu(task, device)
    worlds = worlds_of(num_envs, device, partial(_world, found, chosen, device, arguments))
    return env_of(_spec(worlds[0], found.uid, limit, chosen["obs"], device), worlds, ends_at_success)


def env_of(spec: EnvSpec, worlds: Sequence[Simulation], ends_at_success: bool) -> VecEnv:
    """The environment of ``worlds``; on the processor with snapshots."""
    kind = ReplayingManiSkillEnv if spec.device == "cpu" else ManiSkillEnv
    return kind(spec, worlds, ends_at_success)


def worlds_of(num_envs: int, device: str, make: Callable[[int], AnyWorld]) -> list[AnyWorld]:
    """What ``make(size)`` makes: one of all environments on a GPU, one for each on the processor.

    Raises UserError, saying how many fit, when ``_MANY`` environments or more do not fit the memory.  What one takes is
    the difference between simulations of two sizes on a GPU, and what the process grows by on the processor.
    """
    if device != "cpu" and num_envs >= _MANY:
        require_memory(_on_gpu(make, torch.device(device)), num_envs, torch.device(device))
    sizes = [1] * num_envs if device == "cpu" else [num_envs]
    worlds: list[AnyWorld] = []
    begin = 0
    try:
        for size in sizes:
            if num_envs >= _MANY and len(worlds) == _FEW:
                begin = process_bytes()
            if num_envs >= _MANY and len(worlds) == 2 * _FEW:
                require_memory((process_bytes() - begin) // _FEW, num_envs, torch.device(device))
            worlds.append(make(size))
    except BaseException:
        for world in worlds:
            world.close()
        raise
    return worlds


def _on_gpu(make: Callable[[int], AnyWorld], device: torch.device) -> int:
    """Bytes that one more environment takes on ``device``."""
    taken = []
    for size in (_FEW, 2 * _FEW):
        torch.cuda.empty_cache()
        before = free_bytes(device)
        with contextlib.closing(make(size)):
            taken.append(before - free_bytes(device))
    return max(0, taken[1] - taken[0]) // _FEW


def require_gpu(task: str, device: str) -> None:
    """Raise UserError where ``task`` is to run on a GPU that torch does not find."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"this machine has no GPU that torch can use, so {task} cannot run on {device!r}; use 'cpu'.")


def backends(device: str) -> dict[str, str]:
    """ManiSkill's options for ``device``."""
    return {"sim_backend": device.replace("cuda", "physx_cuda").replace("cpu", "physx_cpu"), "render_backend": device}


def _world(found: Any, chosen: Mapping[str, Any], device: str, arguments: Mapping[str, Any], num_envs: int) -> World:
    whole_state = chosen["obs"] == "state"
    overlaid = hasattr(found.cls, "rgb_overlay_paths")  # photographs behind what is in the foreground
    size = chosen["image_size"]
    options = {
        "num_envs": num_envs,
        "obs_mode": "state_dict" if whole_state else f"rgb+{'segmentation+' if overlaid else ''}state_dict",
        "control_mode": chosen["control_mode"] or None,
        "reward_mode": chosen["reward"] or None,
        "sensor_configs": {} if whole_state else {"width": size, "height": size},
        **backends(device),
        **arguments,
    }
    return World(made(found.uid, chosen, lambda: found.make(**options)), whole_state)


def made(task: str, chosen: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """ManiSkill's environment that ``make`` makes of ``task``, or a sentence about why it does not."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return make()
    except (RuntimeError, NotImplementedError, KeyError, TypeError, OSError, AssertionError, EOFError) as error:
        raise _refusal(task, chosen, error, said.getvalue()) from error


def _refusal(task: str, chosen: Mapping[str, Any], error: BaseException, said: str) -> UserError:
    """The sentence about an ``error`` while ``task`` was built, which had ``said`` something on the way."""
    text = str(error).strip() or type(error).__name__
    if "rendering device" in text or "ErrorIncompatibleDriver" in text or "Vulkan" in text:
        return UserError(
            f"ManiSkill finds no Vulkan driver that it can use ({text.splitlines()[0]}), so {task} cannot be built; "
            "run 'vla-rl inspect', which says what to install."
        )
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text.lower():
        return UserError(
            f"the GPU's memory is too small for these environments of {task} ({text.splitlines()[0]}), so they cannot "
            "be built; give fewer, or smaller pictures."
        )
    words = [*said.strip().splitlines()[-1:], text.splitlines()[0]]
    return UserError(
        f"ManiSkill cannot build {task} with {dict(chosen)} ({'; '.join(words)}), so there is no environment; correct "
        "the options, or download what it names."
    )


def _spec(world: World, task: str, limit: int, obs: str, device: str) -> EnvSpec:
    infinite, names = float("inf"), world.state_names()
    images = world.images() if obs == "rgb" else {}
    privileged = world.privileged().items()
    return EnvSpec(
        name=f"maniskill/{task}",
        images={name: ArraySpec(tuple(one.shape[1:]), "uint8", 0, 255, frame=name) for name, one in images.items()},
        state=ArraySpec((len(names),), "float32", -infinite, infinite, unit="rad, m, s", frame="world", names=names),
        action=world.controls.spec,
        tasks=(instruction_of(task, world.env),),
        control_dt=1 / world.env.control_freq,
        time_limit=limit,
        max_chunk=min(limit, _MAX_CHUNK),
        extras={name: ArraySpec(tuple(one.shape[1:]), "float32", -infinite, infinite) for name, one in privileged},
        success="once" if world.has_success else None,
        device=device,
        can_snapshot=device == "cpu",
        profile="bitwise" if device == "cpu" else "tolerant",
    )
