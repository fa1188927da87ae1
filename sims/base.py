"""Bases of environments: what all of them repeat, and two ways to write one.

``NumpyEnv`` is for rules in numpy, ``SideBySide`` for simulators of one environment each.  Both stand on ``BaseEnv``,
as do the simulators that move many environments at once.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.env import ArraySpec, EnvSpec, Observation, Observe, Snapshot, Step, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.contract.task import Parameter, parameter_rows
from vla_rl.contract.tracker import DIVERGED, SUCCESS, TIME_LIMIT, EpisodeTracker, one_each, restore_rows, select_rows

SHARE = 0.9  # of the free memory; the rest is for what is allocated while simulating
_MAX_CHUNK = 50
_MAX_GEOMS = 4000  # in a picture of a simulator that somebody else wrote


class BaseEnv:
    """``E`` environments (``VecEnv``): arguments are checked, and seeds, clocks and ends kept, in ``_book``."""

    spec: EnvSpec
    _book: Any  # an EpisodeTracker

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        index, seed = self._checked(env_ids, seeds)
        self._book.begin(index, seed)
        self._start(index)
        return self._observe()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        return self._book.execute(chunk, self.spec, observe, self._execute, self._observe)

    def close(self) -> None:
        """Free all resources; safe to call twice."""

    def _checked(self, env_ids: Any, seeds: Any) -> tuple[np.ndarray, np.ndarray]:
        """``env_ids`` and ``seeds`` as int [R]; raises ContractError for others, before anything changes."""
        index = self._book.index(on_host(env_ids))
        return index, self._book.seeds(index, on_host(seeds))

    def _start(self, env_ids: np.ndarray) -> None:
        """Begin the episodes of the seeds ``_book.seed`` in ``env_ids`` [R]."""
        raise NotImplementedError

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One action in ``env_ids``; see ``vla_rl.contract.tracker.Advance``."""
        raise NotImplementedError

    def _observe(self) -> Observation:
        raise NotImplementedError


class SnapshotEnv(BaseEnv):
    """The same with ``Snapshots``: copies of the arrays on which the future depends."""

    def snapshot(self, env_ids: Any) -> Snapshot:
        """Everything the future of ``env_ids`` depends on, as numeric arrays [R,...]; see ``Snapshots``."""
        index = self._book.index(on_host(env_ids))
        self._book.require_started(index)
        return select_rows(self._arrays(), index)

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``env_ids``, which need not be those it was taken from."""
        index = self._book.index(on_host(env_ids))
        restore_rows(self._arrays(), index, snapshot)
        self._restored(index)
        return self._observe()

    def _arrays(self) -> dict[str, Any]:
        """{name: [E,...]} of all that a snapshot holds, to be read and written."""
        raise NotImplementedError

    def _restored(self, env_ids: np.ndarray) -> None:
        """The arrays of ``env_ids`` [R] were written."""


class VariedEnv(SnapshotEnv):
    """The same with parameters that differ between episodes (``VariableEnv``); a subclass calls :meth:`_declare`.

    What is not varied costs nothing: ``_set_physics`` is not called before the first parameter is given.
    """

    _parameters: np.ndarray  # float64 [E,P], part of a subclass' snapshots
    _any_varied = False  # whether a parameter was ever given

    def _declare(self, parameters: Sequence[Parameter]) -> None:
        self._declared, self._names = parameters, tuple(parameter.name for parameter in parameters)
        self._parameters = parameter_rows(parameters, {}, np.arange(self.num_envs))

    def reset(self, env_ids: Any, seeds: Any, parameters: Mapping[str, Any] | None = None) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R], not negative); see ``VariableEnv``."""
        index, seed = self._checked(env_ids, seeds)
        self._parameters[index] = parameter_rows(self._declared, parameters, index)
        self._vary(index, bool(parameters))
        return super().reset(index, seed)

    def _restored(self, env_ids: np.ndarray) -> None:
        nominal = parameter_rows(self._declared, {}, env_ids)
        self._vary(env_ids, not np.array_equal(self._parameters[env_ids], nominal))
        super()._restored(env_ids)

    def _vary(self, env_ids: np.ndarray, varied: bool) -> None:
        self._any_varied |= varied
        if self._any_varied and env_ids.size:
            self._set_physics(env_ids)

    def _set_physics(self, env_ids: np.ndarray) -> None:
        """The physics of ``env_ids`` [R] from ``_parameters``."""
        raise NotImplementedError

    def _values(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """{parameter: value} of each of ``env_ids`` [R]."""
        return [dict(zip(self._names, row, strict=True)) for row in self._parameters[env_ids].tolist()]

    def _columns(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """{parameter: values [R] in ``env_ids`` [R]}."""
        return dict(zip(self._names, self._parameters[env_ids].T, strict=True))

    def _parameter(self, name: str) -> np.ndarray:
        """float64 [E]: parameter ``name`` of every environment."""
        return self._parameters[:, self._names.index(name)]


class ReplayingEnv(SnapshotEnv):
    """The same for simulators whose state cannot be read: a snapshot is a seed and the actions since the reset.

    ``restore`` replays them.  This is exact where episodes depend on seed and actions only, and takes as long as they
    took.  A subclass implements ``_replay``.
    """

    @cached_property
    def _actions(self) -> np.ndarray:
        """[E,T,D]: the actions of all episodes."""
        return np.zeros((self.num_envs, self.spec.time_limit, self.spec.action_dim), self.spec.action.dtype)

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        self._actions[self._checked(env_ids, seeds)[0]] = 0
        return super().reset(env_ids, seeds)

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._actions[env_ids, self._book.time[env_ids] - 1] = action
        return super()._execute(env_ids, action)

    def _arrays(self) -> dict[str, Any]:
        return self._book.arrays() | {"actions": self._actions}

    def _restored(self, env_ids: np.ndarray) -> None:
        self._start(env_ids)
        for env_id in env_ids.tolist():
            for action in self._actions[env_id, : self._book.time[env_id]]:
                self._replay(env_id, action)

    def _replay(self, env_id: int, action: np.ndarray) -> object:
        """Execute ``action`` [D] in one environment, apart from its clock and ends."""
        raise NotImplementedError


# -- rules in numpy ----------------------------------------------------------------------------------------------------


class NumpyEnv(SnapshotEnv):
    """``E`` environments in numpy (``VecEnv`` and ``Snapshots``); subclasses implement the task.

    Those are ``_begin``, ``_advance`` and ``_state``; ``sims/toy/point_mass.py`` is a complete example.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, task_state: dict[str, np.ndarray]) -> None:
        """``task_state`` {name: [E,...]}: the arrays that the subclass changes; snapshots hold them."""
        self.spec = spec
        self._book = EpisodeTracker(num_envs)
        self._task_state = task_state
        self._time, self._seed = self._book.time, self._book.seed

    def _begin(self, env_id: int, seed: int) -> None:
        """Draw the initial state of environment ``env_id`` from ``seed``."""
        raise NotImplementedError

    def _advance(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Execute ``action`` [R,D], which ``_time`` counts already: reward [R], success [R], time limit reached [R]."""
        raise NotImplementedError

    def _state(self) -> np.ndarray:
        """float32 [E,S]: proprioception."""
        raise NotImplementedError

    def _images(self) -> Mapping[str, np.ndarray]:
        return {}

    def _instruction(self) -> np.ndarray:
        return np.zeros(self.num_envs, np.int64)

    def _start(self, env_ids: np.ndarray) -> None:
        for env_id in env_ids.tolist():
            self._begin(env_id, int(self._seed[env_id]))

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        reward, success, late = one_each(self._advance(env_ids, action), len(env_ids))
        return reward, success, np.select([success, late], [SUCCESS, TIME_LIMIT], 0)

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = self._book.arrays()
        return arrays | {f"task_state/{name}": value for name, value in self._task_state.items()}

    def _observe(self) -> Observation:
        return Observation(self._images(), self._state(), self._instruction(), self._time.copy())


# -- simulators of one environment each --------------------------------------------------------------------------------


class Simulator:
    """One simulated environment, whose episodes follow from seed and actions alone."""

    def reset(self, seed: int) -> int:
        """Start the episode of ``seed``; returns the index of its instruction in ``spec.tasks``."""
        raise NotImplementedError

    def act(self, action: np.ndarray) -> tuple[float, bool]:
        """Execute ``action`` float32 [D]: its reward, and whether the task is fulfilled."""
        raise NotImplementedError

    def state(self) -> np.ndarray:
        """float32 [S]: proprioception."""
        raise NotImplementedError

    def extras(self) -> Mapping[str, np.ndarray]:
        return {}

    def images(self) -> Mapping[str, np.ndarray]:
        """{camera: uint8 [h,w,3]} at this moment; called for observations that are handed out only."""
        return {}

    def close(self) -> None:
        """Free all resources."""


class SideBySide(ReplayingEnv):
    """``E`` simulators behind the environment contract (``VecEnv`` and ``Snapshots``), side by side in one process.

    Success terminates an episode ("success"), ``spec.time_limit`` truncates it ("time_limit"), and so does a state or
    reward that is not finite ("diverged", reward 0; the last finite observation is returned).
    """

    def __init__(self, spec: EnvSpec, simulators: Sequence[Simulator]) -> None:
        """``simulators`` are equal and owned by this object."""
        self.spec, self._simulators = spec, simulators
        count = len(simulators)
        self._book = EpisodeTracker(count)
        self._task = np.zeros(count, np.int64)
        self._state = np.zeros((count, *spec.state.shape), np.float32)
        self._extras = {name: np.zeros((count, *one.shape), one.dtype) for name, one in spec.extras.items()}
        self._images = {name: np.zeros((count, *one.shape), np.uint8) for name, one in spec.images.items()}
        self._stale = np.zeros(count, bool)  # environments that have moved since their pictures were taken

    def close(self) -> None:
        for simulator in self._simulators:
            simulator.close()
        self._simulators = ()

    def _start(self, env_ids: np.ndarray) -> None:
        for env_id in env_ids.tolist():
            self._task[env_id] = self._simulators[env_id].reset(int(self._book.seed[env_id]))
            self._read(env_id, self._simulators[env_id].state())

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._actions[env_ids, self._book.time[env_ids] - 1] = action
        reward, success, cause = (np.zeros(env_ids.size, kind) for kind in (np.float32, bool, np.int8))
        for k, env_id in enumerate(env_ids.tolist()):
            reward[k], success[k], cause[k] = self._replay(env_id, action[k])
        return reward, success, cause

    def _replay(self, env_id: int, action: np.ndarray) -> tuple[float, bool, int]:
        """Execute ``action`` [D]: the reward, whether it succeeded, and the code of the cause of its end (0: none)."""
        reward, success = self._simulators[env_id].act(action)
        state = self._simulators[env_id].state()
        if not (np.isfinite(state).all() and math.isfinite(reward)):
            return 0.0, False, DIVERGED
        self._read(env_id, state)
        late = self._book.time[env_id] >= self.spec.time_limit
        return float(reward), bool(success), SUCCESS if success else TIME_LIMIT if late else 0

    def _read(self, env_id: int, state: np.ndarray) -> None:
        self._state[env_id], self._stale[env_id] = state, True
        for name, value in self._simulators[env_id].extras().items():
            self._extras[name][env_id] = value

    def _observe(self) -> Observation:
        for env_id in np.flatnonzero(self._stale).tolist() if self._images else ():
            for name, image in self._simulators[env_id].images().items():
                self._images[name][env_id] = image
        self._stale[:] = False
        images, extras = ({name: value.copy() for name, value in part.items()} for part in (self._images, self._extras))
        return Observation(images, self._state.copy(), self._task.copy(), self._book.time.copy(), extras)


class CameraRig:
    """Pictures by the cameras of simulators that somebody else wrote on MuJoCo, by one canvas for each task.

    MuJoCo is imported with the first picture.  A canvas holds the meshes and textures of its task, once for all
    environments that play it, so the one that was used longest ago is closed when there are more than ``most``.
    """

    def __init__(self, cameras: Sequence[str], size: int, most: int, hidden_groups: Sequence[int] = ()) -> None:
        """Pictures of ``size`` x ``size`` pixels; geoms of ``hidden_groups`` are not drawn."""
        self._cameras, self._size, self._most, self._hidden_groups = cameras, size, most, hidden_groups
        self._canvases: OrderedDict[str, Any] = OrderedDict()  # the one that was used longest ago first

    def images(self, task: str, model: Any, data: Any) -> dict[str, np.ndarray]:
        """{camera: uint8 [h,w,3]} of an environment that plays ``task``."""
        if not self._cameras:
            return {}
        from sims.mujoco.canvas import Canvas, simplify, view_of

        if task not in self._canvases:
            if len(self._canvases) >= self._most:
                self._canvases.popitem(last=False)[1].close()
            simplify(model)
            self._canvases[task] = Canvas(model, self._size, self._size, _MAX_GEOMS, self._hidden_groups)
        self._canvases.move_to_end(task)
        canvas = self._canvases[task]
        canvas.gl.make_current()
        return {name: canvas.draw(model, data, view_of(model, name)).copy() for name in self._cameras}

    def close(self) -> None:
        while self._canvases:
            self._canvases.popitem()[1].close()


class TaskPool:
    """Environments of many tasks, made when they are first needed; the idle ones are bounded in number.

    A simulator whose scene is written into its model needs one of its own for every environment and task.
    """

    def __init__(self, make: Callable[[str], Any], most_idle: int) -> None:
        self._make, self._most_idle = make, most_idle
        self._idle: OrderedDict[int, tuple[str, Any]] = OrderedDict()  # longest idle first

    def take(self, task: str) -> Any:
        """An environment of ``task``, which belongs to the caller."""
        for key, (other, env) in reversed(self._idle.items()):
            if other == task:
                del self._idle[key]
                return env
        return self._make(task)

    def give_back(self, task: str, env: Any) -> None:
        """The caller needs ``env`` no more."""
        self._idle[id(env)] = (task, env)
        if len(self._idle) > self._most_idle:
            _, (_, oldest) = self._idle.popitem(last=False)
            oldest.close()

    def close(self) -> None:
        while self._idle:
            self._idle.popitem()[1][1].close()


class PooledSimulator(Simulator):
    """A simulator that plays, by its seed, one of several ``tasks``, each in an environment of a pool.

    task  the one that is played; "" before the first reset
    env   its environment, ``None`` before
    """

    def __init__(self, tasks: Sequence[str], rig: CameraRig, pool: TaskPool) -> None:
        """Owns ``rig`` and ``pool`` together with the others that share them."""
        self._tasks, self._rig, self._pool = tasks, rig, pool
        self.task = ""
        self.env: Any = None

    def choose(self, seed: int) -> int:
        """Play task number ``seed % len(tasks)``, which is returned."""
        number = seed % len(self._tasks)
        if self._tasks[number] != self.task:
            self._give_back()
            self.task = self._tasks[number]
            self.env = self._pool.take(self.task)
        return number

    def close(self) -> None:
        self._give_back()
        self._pool.close()
        self._rig.close()

    def _give_back(self) -> None:
        if self.env is not None:
            self._pool.give_back(self.task, self.env)
            self.env = None


def require_positive(**given: int) -> None:
    """Raise UserError for an option that is not at least 1."""
    for name, value in given.items():
        if value < 1:
            raise UserError(f"{name}={value} is less than 1, so no episode can be played; give at least 1.")


def simulator_spec(name: str, cameras: Sequence[str], size: int, time_limit: int, **rest: Any) -> EnvSpec:
    """The spec of a :class:`SideBySide` with square pictures uint8 [size,size,3]; ``rest`` as of ``EnvSpec``."""
    images = {camera: ArraySpec((size, size, 3), "uint8", 0, 255, frame=camera) for camera in cameras}
    chunk = min(time_limit, _MAX_CHUNK)
    return EnvSpec(name, images, time_limit=time_limit, max_chunk=chunk, can_snapshot=True, **rest)


# -- memory ------------------------------------------------------------------------------------------------------------


def chosen_device(name: str) -> str:
    """``name``; of "auto" the GPU that torch sees, "cpu" if there is none."""
    if name != "auto":
        return name
    return "cuda" if load("torch.cuda:is_available")() else "cpu"  # named, as not every simulator needs torch


def free_bytes(device: Any = "cpu") -> int:
    """Bytes that can still be allocated on ``device``, as torch names it."""
    if str(device).startswith("cuda"):  # named, not imported: what computes on the processor needs no torch
        return load("torch.cuda:mem_get_info")(device)[0]
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable") * 1024


def process_bytes(pid: int | str = "self") -> int:
    """Bytes of process ``pid`` that are its own: without files that it has mapped, which it shares with others."""
    status = Path(f"/proc/{pid}/status")
    return (_kilobytes(status, "RssAnon") + _kilobytes(status, "RssShmem")) * 1024


def require_memory(each: int, num_envs: int, device: Any) -> None:
    """Raise UserError, saying how many fit, when ``num_envs`` environments of ``each`` bytes do not fit ``device``."""
    free = free_bytes(device)
    if num_envs * each > SHARE * free:
        raise UserError(
            f"{num_envs} environments of {each / 1e6:.2f} MB each do not fit the {free / 1e9:.1f} GB that are free on "
            f"{str(device)!r}, so none was made; {int(SHARE * free / each)} fit."
        )


def _kilobytes(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 0  # a process that has ended has none
