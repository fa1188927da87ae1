"""Lift in Genesis: "pick up the red cube" with a Franka arm, by the rules of ``sims.mujoco.tasks.lift``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sims import catalog, isolated
from sims.mujoco.env import task_spec
from sims.mujoco.tabletop import COLOURS, Instruct
from sims.mujoco.tasks.lift import LiftTask
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.contract.task import declare_task

if TYPE_CHECKING:
    from sims.genesis.env import GenesisEnv
    from sims.genesis.scene import Scene

DEVICES = ("cpu", "cuda")
_MANY = 256  # environments; so many fit wherever Genesis starts, and making two small scenes takes seconds


def spec(
    cubes: int = 3,
    colours: int = 4,
    instruct: Instruct = "target",
    deadline: int | None = None,
    cameras: Sequence[str] = ("front",),
    image_size: int = 64,
    device: str = "cpu",
) -> EnvSpec:
    """The spec of :func:`make` with the same options; Genesis itself is not needed."""
    if device not in DEVICES:
        raise UserError(f"Genesis runs on {' or '.join(map(repr, DEVICES))}, not on {device!r}; choose one of these.")
    task = LiftTask(cubes, colours, instruct, deadline)
    found = task_spec(task, tuple(cameras), image_size)
    return replace(found, name="genesis lift", device=device, profile="tolerant")


def make_in_process(
    num_envs: int,
    cubes: int = 3,
    colours: int = 4,
    instruct: Instruct = "target",
    deadline: int | None = None,
    cameras: Sequence[str] = ("front",),
    image_size: int = 64,
    device: str = "cpu",
) -> GenesisEnv:
    """``num_envs`` environments in one scene of this process, which has to have Genesis.

    cubes, colours, instruct, deadline  those of lift
    cameras, image_size                 "front", "side" and "top", where lift has them
    device                              "cpu" or "cuda", where observations then stay

    Raises UserError when Genesis is not installed, torch finds no GPU for "cuda", or so many environments do not fit
    the memory.
    """
    found = spec(cubes, colours, instruct, deadline, cameras, image_size, device)
    if num_envs < 1:
        raise UserError(f"num_envs={num_envs} leaves nothing to simulate; give at least 1.")
    from sims.genesis.engine import engine

    genesis = engine(device)
    from sims.genesis.cameras import Cameras
    from sims.genesis.env import GenesisEnv
    from sims.genesis.scene import Scene

    task = LiftTask(cubes, colours, instruct, deadline)

    def scene(count: int, cameras: Sequence[str]) -> Scene:
        return Scene(genesis, count, task, list(COLOURS.values())[:colours], Cameras(genesis, cameras, image_size))

    if num_envs >= _MANY:
        _require_memory(scene, num_envs, device)
    return GenesisEnv(task, found, scene(num_envs, cameras))


def _require_memory(scene: Callable[[int, Sequence[str]], Scene], num_envs: int, device: str) -> None:
    """Raise UserError, saying how many fit, when ``num_envs`` environments of a ``scene`` do not.

    What one takes is the difference between a scene of two and one of one, without cameras.
    """
    import torch

    from sims.device_memory import require_memory

    sizes = []
    for count in (1, 2):
        with closing(scene(count, ())) as small:
            sizes.append(small.nbytes())
    require_memory(sizes[1] - sizes[0], num_envs, torch.device(device))


def _spec(workers: int = 0, **options: Any) -> EnvSpec:
    """The spec of :func:`make`, which does not depend on ``workers``."""
    catalog.check_options("genesis", make_in_process, options)
    found = spec(**options)
    if workers and found.device != "cpu":
        raise UserError(
            f"device={found.device!r} with workers={workers} would send every observation through the processor, so "
            "nothing is gained; leave workers at 0, or choose device 'cpu'."
        )
    return found


@declare_task(expert="sims.mujoco.tasks.lift_expert:LiftExpert", spec=_spec)
def make(num_envs: int, workers: int = 0, **options: Any) -> VecEnv:
    """Lift in Genesis; other options as :func:`make_in_process`.

    workers  0: one scene in this process; otherwise processes of Genesis' own installation, each with a scene of its
             share and one core of the processor

    Raises UserError with the commands that install Genesis where it is missing.
    """
    _spec(workers, **options)  # a wrong option is refused before anything starts
    if workers:
        return isolated.make(num_envs, "sims.genesis.lift:make_in_process", options, workers, installation="genesis")
    return make_in_process(num_envs, **options)
