"""Lift in Genesis: "pick up the red cube" with a Franka arm, by the rules of ``sims.mujoco.tasks.lift``.

The Genesis environment: the rules of a tabletop task, applied to what Genesis simulates.

Rules, episodes, actions and observations are those of the task in MuJoCo (``sims.mujoco``); the robot and the physics
are other ones.  A seed puts the same cubes at the same places in both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims import catalog, isolated
from sims.genesis import franka
from sims.genesis.scene import CUBES, DT, FINGERS, Scene
from sims.mujoco.env import task_spec
from sims.mujoco.scene import CUBES_QPOS
from sims.mujoco.tabletop import COLOURS, Instruct
from sims.mujoco.task import Episode, Task
from sims.mujoco.tasks.lift import LiftTask
from vla_rl.contract.env import Array, EnvSpec, Observation, Observe, Snapshot, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import declare_task
from vla_rl.contract.tracker import DIVERGED, FAILURES, SUCCESS, TIME_LIMIT, DeviceTracker, restore_rows, select_rows

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

    genesis = engine(device)
    from sims.genesis.cameras import Cameras
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


def engine(device: str) -> Any:
    """The package ``genesis``, set up for ``device`` ("cpu" or "cuda").

    Raises UserError when it is not installed, when torch cannot use the GPU, and when it runs elsewhere already.
    """
    genesis = _imported()
    if device == "cuda":
        _require_gpu()
    backend = getattr(genesis, device)
    if not genesis._initialized:
        # Sizes of arrays are no part of its kernels then, so scenes of any number share what was compiled.
        genesis.init(backend=backend, precision="32", logging_level="error", performance_mode=False)
    elif genesis.backend != backend:
        raise UserError(
            f"Genesis runs on {genesis.backend.name!r} in this process and knows one device at a time, so no "
            f"environment on {device!r} can be made beside it; choose the same device for all."
        )
    return genesis


def _imported() -> Any:
    hook = sys.excepthook
    try:
        import genesis
    except ModuleNotFoundError as error:
        raise UserError(
            f"genesis is not installed beside vla-rl ({error}), so it cannot simulate in this process; run "
            "\"pip install 'vla-rl[genesis]'\", or 'vla-rl sims install genesis' and give the option workers=1."
        ) from error
    finally:
        sys.excepthook = hook  # Genesis' own prints every error twice
    return genesis


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "torch finds no GPU, so Genesis cannot simulate on 'cuda'; install NVIDIA's driver ('nvidia-smi' shows it) "
            "and a torch that was built for CUDA ('python -m torch.utils.collect_env'), or choose device 'cpu'."
        )


class GenesisEnv:
    """``E`` environments of one task behind the environment contract (``VecEnv`` and ``Snapshots``).

    An environment that diverges ends with the cause "diverged" and shows its last good state; the others go on.  The
    host reads ends once a decision (``vla_rl.contract.tracker``), but Genesis reads its own error codes every ten
    substeps, so more than once a control step.
    """

    def __init__(self, task: Task, spec: EnvSpec, scene: Scene) -> None:
        """``scene`` has ``E`` environments, with a cube of every colour that ``task`` has."""
        self.spec, self._task, self._scene = spec, task, scene
        self._steps = round(spec.control_dt / DT)
        self._rows = scene.rest()
        num_envs = len(self._rows.qpos)
        self._device = self._rows.qpos.device
        self._book = DeviceTracker(num_envs, self._to_device, task.failures)
        self._rest = scene.rest()[0]
        self._ctrl = self._rows.pinch.new_zeros((num_envs, 4))  # commanded pinch point and finger position, metres
        start = {name: np.stack([value] * num_envs) for name, value in task.task_state.items()}
        self._task_state = {name: self._to_device(value) for name, value in start.items()}
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
        return self._book.begun(self._observe(self._to_device(self._book.time)))

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] in metres and grip sign; see ``VecEnv.step``."""
        return self._book.execute_there(chunk, self.spec, observe, self._advance, self._observe).mapped(self._view)

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Everything the future of ``env_ids`` depends on, as numeric arrays [R,...]; see ``Snapshots``."""
        index = self._book.index(on_host(env_ids))
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids``, which need not be those it was taken from."""
        self._stale, index = True, self._book.index(on_host(env_ids))
        restore_rows(self._arrays(), index, snapshot)
        return self._observe(self._to_device(self._book.time))

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
            self._task_state[name][index] = self._to_device(value).to(self._task_state[name].dtype)

    def _advance(self, action: Tensor, running: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """One control step of the ``running`` environments; see ``AdvanceThere``."""
        if self._device.type == "cpu" and not running.any():  # a GPU would have to be waited for to be asked
            return action.new_zeros(self.num_envs), action.new_zeros(self.num_envs)
        ctrl = self._tensor(self._task.control(self._view(self._ctrl), self._view(action)))
        self._ctrl = torch.where(running[:, None], ctrl.to(self._ctrl.dtype), self._ctrl)
        after, diverged = self._scene.advance(self._rows, self._ctrl[:, :3], self._ctrl[:, 3], self._steps)
        good = running & ~diverged
        self._rows, self._stale = after.where(good, self._rows), True
        result = self._task.evaluate(self._tabletop(), self._states())
        for name, value in result.task_state.items():
            old = self._task_state[name]
            new = self._tensor(value).to(old.dtype)
            self._task_state[name] = torch.where(running.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
        success, failure, reward = (self._tensor(item) for item in (result.success, result.failure, result.reward))
        cause = torch.where(time >= self.spec.time_limit, TIME_LIMIT, 0)
        cause = torch.where(failure >= 0, FAILURES + failure, cause)
        cause = torch.where(diverged, DIVERGED, torch.where(success, SUCCESS, cause))
        return torch.where(good, reward, 0.0), torch.where(running, cause, 0)

    def _observe(self, time: Tensor) -> Observation:
        """The observation of all environments, whose clocks are ``time``."""
        if self._images and self._stale:
            self._images, self._stale = self._scene.render(self._rows), False
        qpos, task_state = self._tabletop(), self._states()
        return Observation(
            {name: self._view(picture.clone()) for name, picture in self._images.items()},
            self._task.proprioception(qpos, self._view(self._ctrl)),
            self._task.instruction(task_state),
            self._view(time.clone()),
            self._task.observe_extras(qpos, task_state),
        )

    def _tabletop(self) -> Array:
        """[E,q]: the state as MuJoCo's tabletop has it, from which the rules follow."""
        colour = self._task_state["colour"].long().clamp(min=0)
        cubes = self._rows.qpos[:, CUBES:].view(self.num_envs, -1, 7)
        named = cubes[torch.arange(self.num_envs, device=self._device)[:, None], colour]
        return self._view(torch.cat([self._rows.pinch, self._rows.qpos[:, FINGERS], named.flatten(1)], 1))

    def _states(self) -> dict[str, Array]:
        return {name: self._view(value) for name, value in self._task_state.items()}

    def _arrays(self) -> dict[str, Any]:
        rows = {f"rows/{name}": self._view(value) for name, value in self._rows.arrays().items()}
        states = {f"task_state/{name}": value for name, value in self._states().items()}
        return {**self._book.arrays(), **rows, "ctrl": self._view(self._ctrl), **states}

    def _to_device(self, item: np.ndarray) -> Tensor:
        """A copy of ``item`` on the device; the host does not wait for it."""
        return torch.from_numpy(np.array(item)).to(self._device, non_blocking=True)

    def _tensor(self, item: Array) -> Tensor:
        """What a rule has computed, as a tensor that shares its memory."""
        return torch.as_tensor(item, device=self._device)

    def _view(self, item: Tensor) -> Array:
        """``item`` as the contract has it, sharing its memory: an array on the host, a tensor elsewhere."""
        return item.numpy() if self.spec.device == "cpu" else item
