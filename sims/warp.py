"""``warp``: a task of the tabletop on MuJoCo-Warp, with the scenes, rules, cameras and seeds that it has on MuJoCo.

The task is an environment of the catalogue, or "package.module:make", that is a ``MujocoEnv``; its expert, scenes,
swapped instruction and claims apply here too.  Neither torch nor MuJoCo-Warp is imported before something is built.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sims import catalog
from sims.base import chosen_device
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import declare_task

if TYPE_CHECKING:
    from sims.warp_env import WarpEnv


def warp_spec(spec: EnvSpec, device: str) -> EnvSpec:
    """``spec`` of a task on MuJoCo as that on MuJoCo-Warp.

    On a GPU sums have no fixed order, so an episode repeats itself within a tolerance; on a processor bit for bit.
    """
    return replace(spec, device=device, profile="bitwise" if device == "cpu" else "tolerant")


def spec(env: str = "lift", device: str = "cpu", **options: Any) -> EnvSpec:
    """The spec of :func:`make` with the same options."""
    return warp_spec(catalog.spec_of(env, **options), chosen_device(device))


@declare_task(spec=spec, parameters="sims.warp_env:parameters", wraps=True)
def make(num_envs: int, env: str = "lift", device: str = "cpu", **options: Any) -> WarpEnv:
    """``num_envs`` environments of the task of ``env`` with its ``options`` on MuJoCo-Warp.

    device   "cpu", or a GPU as torch names it: "cuda", "cuda:1"; observations are tensors there; "auto" if there is one
    options  as of ``env``; ``threads`` has no meaning here

    Raises UserError when ``env`` is no task of the tabletop, a package or the driver is missing, or so many
    environments do not fit the memory.
    """
    from sims.mujoco.env import MujocoEnv

    on_mujoco = catalog.make(env, num_envs=1, **options)
    on_mujoco.close()
    if not isinstance(on_mujoco, MujocoEnv):
        raise UserError(
            f"environment {env!r} has no MuJoCo model of the tabletop, so MuJoCo-Warp cannot simulate it; give lift, "
            "place, push, mixed or a task of your own that make_env of sims.mujoco.env makes."
        )
    try:
        from sims.warp_env import WarpEnv
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed, so MuJoCo-Warp simulates nothing; pip install 'vla-rl[warp]'."
        ) from error
    return WarpEnv(on_mujoco.task, warp_spec(on_mujoco.spec, chosen_device(device)), num_envs)
