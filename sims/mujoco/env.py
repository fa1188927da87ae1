"""The MuJoCo environment: ``E`` environments of one task, stepped together on MuJoCo's thread pool."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import mujoco
import numpy as np
from mujoco.batch import Batch

from sims.base import VariedEnv, require_positive
from sims.catalog import check_names
from sims.mujoco.generators import Generators
from sims.mujoco.render import Renderer, recolour
from sims.mujoco.scene import TEXTURES
from sims.mujoco.task import Task
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.task import Parameter, TaskExtras
from vla_rl.contract.tracker import EpisodeTracker

ImageSize: TypeAlias = int | Mapping[str, int]  # pixels a side, of all cameras or of each

# What an episode of a tabletop task can vary.  Every parameter belongs to one environment of the batch and one episode,
# masses and friction too: MuJoCo's batch keeps the model fields that differ per simulation.
_TEXTURES = ", ".join(f"{number} {name}" for number, name in enumerate(("plain", *TEXTURES)))

POSES = (
    Parameter("object_x", 0.0, -0.03, 0.03, "m", "shift of all objects to the right; the outermost get out of reach"),
    Parameter("object_y", 0.0, -0.03, 0.03, "m", "shift of all objects away from the front camera"),
    Parameter("object_yaw", 0.0, -math.pi / 4, math.pi / 4, "rad", "turn of every cube about its vertical axis"),
    Parameter("gripper_x", 0.0, -0.1, 0.1, "m", "shift of the gripper's start, kept within its workspace"),
    Parameter("gripper_y", 0.0, -0.1, 0.1, "m", "shift of the gripper's start, kept within its workspace"),
    Parameter("gripper_z", 0.0, -0.05, 0.05, "m", "shift of the gripper's start, kept within its workspace"),
)
LOOKS = (
    Parameter("object_hue", 0.0, -0.4, 0.4, "rad", "turn of the colours of cubes and marks; names still apply"),
    Parameter("object_saturation", 1.0, 0.2, 1.5, "factor", "saturation of the colours of cubes and marks"),
    Parameter("table_brightness", 1.0, 0.3, 1.3, "factor", "brightness of the table's colour"),
    Parameter("table_texture", 0.0, 0.0, float(len(TEXTURES)), "index", _TEXTURES, integer=True),
    Parameter("camera_x", 0.0, -0.06, 0.06, "m", "shift of every camera to its right"),
    Parameter("camera_y", 0.0, -0.06, 0.06, "m", "shift of every camera upwards in its picture"),
    Parameter("camera_z", 0.0, -0.06, 0.06, "m", "shift of every camera backwards"),
    Parameter("camera_yaw", 0.0, -0.1, 0.1, "rad", "turn of every camera to the left"),
    Parameter("camera_pitch", 0.0, -0.1, 0.1, "rad", "turn of every camera upwards"),
    Parameter("camera_roll", 0.0, -0.2, 0.2, "rad", "turn of every camera about its line of sight"),
    Parameter("camera_fovy", 0.0, -0.1, 0.1, "rad", "added to every camera's vertical field of view"),
    Parameter("light_brightness", 1.0, 0.3, 1.7, "factor", "brightness of all lights"),
    Parameter("light_yaw", 0.0, -2.0, 2.0, "rad", "turn of the light's direction about the vertical"),
)
PHYSICS = (
    Parameter("object_mass", 1.0, 0.2, 20.0, "factor", "mass and inertia of every cube (50 g)"),
    Parameter("friction", 1.0, 0.02, 2.0, "factor", "friction of fingers, cubes and table"),
)
PARAMETERS = (*POSES, *LOOKS, *PHYSICS)


class MujocoEnv(VariedEnv):
    """``E`` environments of one task behind the environment contract (``VecEnv`` and ``Snapshots``).

    An episode depends only on its seed and its actions: every environment has its own physics state, with the solver's
    warm start, and randomness is drawn at reset alone.  A control step is one call that advances every active
    environment on ``threads`` threads; ended ones are neither simulated nor rendered.  Actions are in metres and grip
    sign.

    ``reset`` takes the values of ``PARAMETERS``; they are part of snapshots.
    """

    def __init__(
        self,
        task: Task,
        num_envs: int,
        cameras: tuple[str, ...] = ("front",),
        image_size: ImageSize = 64,
        threads: int = 2,
        render: bool = True,
    ) -> None:
        """``image_size`` in pixels; ``render=False`` or no cameras gives a state-only environment without OpenGL."""
        self.task = task  # what is simulated: the model, its scenes and rules
        self.spec = task_spec(task, cameras, image_size, render)
        require_positive(num_envs=num_envs)
        self._batch = Batch(task.model, nsim=num_envs, nthread=threads)
        self._blank = self._batch.state[0].copy()  # the model's defaults; zeros would switch its equalities off
        self._qpos, self._ctrl = self._batch.bind("qpos"), self._batch.bind("ctrl")
        self._book = EpisodeTracker(num_envs, task.failures)
        self._task_state = {name: np.stack([value] * num_envs) for name, value in task.task_state.items()}
        self._physics: Physics | None = None  # until a parameter is given
        self._declare(PARAMETERS)
        self._images = {name: np.zeros((num_envs, *item.shape), np.uint8) for name, item in self.spec.images.items()}
        self._stale = np.zeros(num_envs, bool)  # environments that have moved since their pictures were taken
        self._renderers: dict[int, Renderer] = {}

    def render_rows(self, env_ids: Any, size: int, camera: str = "front") -> np.ndarray:
        """Pictures of the current state of ``env_ids`` for videos: uint8 [R,size,size,3]."""
        return self._render(self._book.index(env_ids), size, camera)

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _start(self, env_ids: np.ndarray) -> None:
        if not env_ids.size:
            return
        episodes = self.task.sample_episodes(Generators.of_seeds(self._book.seed[env_ids]))
        if self._any_varied:
            episodes = self.task.vary_poses(episodes, self._columns(env_ids))
        self._batch.state[env_ids] = self._blank
        self._qpos[env_ids], self._ctrl[env_ids] = episodes.qpos, episodes.ctrl
        for name, value in episodes.task_state.items():
            self._task_state[name][env_ids] = value
        self._stale[env_ids] = True

    def _arrays(self) -> dict[str, np.ndarray]:
        own = {"physics": self._batch.state, "parameters": self._parameters, **self._book.arrays()}
        return own | {f"task_state/{name}": value for name, value in self._task_state.items()}

    def _restored(self, env_ids: np.ndarray) -> None:
        super()._restored(env_ids)
        self._stale[env_ids] = True

    def _set_physics(self, env_ids: np.ndarray) -> None:
        if self._physics is None:
            self._physics = Physics(self._batch, self.task.model, self.task.movable)
        self._physics.set(env_ids, *(self._parameter(name)[env_ids] for name in ("object_mass", "friction")))

    def _execute(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not env_ids.size:
            return np.zeros(0, np.float32), np.zeros(0, bool), np.zeros(0, np.int8)
        selection: Any = slice(None) if env_ids.size == self.num_envs else env_ids  # views are cheaper than copies
        state = self._batch.state
        before = state.take(env_ids, axis=0)
        self._ctrl[selection] = self.task.control(self._ctrl[selection], action)
        self._batch.step(ids=env_ids, nstep=self.task.substeps)
        diverged = ~np.isfinite(state[selection]).all(axis=1)
        if diverged.any():
            state[env_ids[diverged]] = before[diverged]
        result = self.task.evaluate(
            self._qpos[selection], {name: value[selection] for name, value in self._task_state.items()}
        )
        for name, value in result.task_state.items():
            self._task_state[name][selection] = value
        self._stale[selection] = True
        cause = result.causes(self._book.time[selection] >= self.task.time_limit, diverged)
        return np.where(diverged, np.float32(0), result.reward), result.success & ~diverged, cause

    def _observe(self) -> Observation:
        stale = np.flatnonzero(self._stale)
        for camera, image in self._images.items():
            image[stale] = self._render(stale, image.shape[1], camera)
        self._stale[:] = False
        return Observation(
            {name: image.copy() for name, image in self._images.items()},
            self.task.proprioception(self._qpos, self._ctrl),
            self.task.instruction(self._task_state),
            self._book.time.copy(),
            self.task.observe_extras(self._qpos, self._task_state),
        )

    def _render(self, env_ids: np.ndarray, size: int, camera: str) -> np.ndarray:
        """uint8 [R,size,size,3]: what ``camera`` sees in ``env_ids``."""
        out = np.empty((env_ids.size, size, size, 3), np.uint8)
        if not env_ids.size:
            return out
        task = self.task
        if size not in self._renderers:
            self._renderers[size] = Renderer(task, size)
        task_state = {name: value[env_ids] for name, value in self._task_state.items()}
        colours, positions = task.colours(task_state), task.mark_positions(task_state)
        looks = self._values(env_ids) if self._any_varied else []
        if looks:
            hue, saturation = (self._parameter(f"object_{part}")[env_ids] for part in ("hue", "saturation"))
            colours = recolour(colours, hue, saturation)
        return self._renderers[size].render(self._qpos[env_ids], colours, positions, camera, out, looks)


class Physics:
    """Sets the parameters ``PHYSICS`` of single simulations of ``batch``.

    The fields become per-simulation ones when this object is made; with nominal values the physics stays the same, bit
    for bit.
    """

    def __init__(self, batch: Batch, model: mujoco.MjModel, movable: Sequence[int]) -> None:
        """``movable``: ids of the bodies whose mass varies."""
        self._batch, self._model, self._movable = batch, model, np.asarray(movable, np.intp)
        self._mass, self._inertia = batch.expand("body_mass"), batch.expand("body_inertia")
        self._friction = batch.expand("geom_friction")

    def set(self, env_ids: np.ndarray, mass: np.ndarray, friction: np.ndarray) -> None:
        """The physics of ``env_ids`` [R]: ``mass`` [R] and ``friction`` [R] as factors."""
        bodies = np.ix_(env_ids, self._movable)
        self._mass[bodies] = self._model.body_mass[self._movable] * mass[:, None]
        self._inertia[bodies] = self._model.body_inertia[self._movable] * mass[:, None, None]
        self._friction[env_ids] = self._model.geom_friction * friction[:, None, None]
        self._batch.set_const(env_ids)


def task_spec(
    task: Task, cameras: tuple[str, ...] = ("front",), image_size: ImageSize = 64, render: bool = True
) -> EnvSpec:
    """The spec of an environment of ``task``; raises UserError for an unknown camera, an empty or no size."""
    names = tuple(cameras) if render else ()
    known = [task.model.camera(i).name for i in range(task.model.ncam)]
    for name in names:
        if name not in known:
            raise UserError(
                f"task {task.name!r} has no camera {name!r}, so nothing can be rendered; {did_you_mean(name, known)}"
            )
    sizes = _sizes(names, image_size)
    return EnvSpec(
        name=task.name,
        images={
            name: ArraySpec((size, size, 3), "uint8", 0, 255, unit="RGB", frame=name) for name, size in sizes.items()
        },
        state=task.state,
        action=task.action,
        tasks=task.texts,
        families=task.families,
        control_dt=task.substeps * float(task.model.opt.timestep),
        time_limit=task.time_limit,
        max_chunk=task.time_limit,
        extras=dict(task.extras),
        can_snapshot=True,
    )


def _sizes(cameras: Sequence[str], image_size: ImageSize) -> dict[str, int]:
    """Pixels a side of each of ``cameras``; raises UserError for one without any."""
    given = dict.fromkeys((*cameras, ""), image_size) if isinstance(image_size, int) else dict(image_size)
    missing = [name for name in cameras if name not in given]
    if missing:
        raise UserError(
            f"image_size={given} gives the camera {missing[0]!r} no size, so it cannot be rendered; name every camera, "
            "or give one number for all."
        )
    if min(given.values(), default=1) < 1:
        raise UserError(f"image_size={image_size} leaves nothing to render; give at least 1.")
    return {name: given[name] for name in cameras}


_OPTIONS = ("cameras", "image_size", "threads", "render")


def make_env(task: Callable[..., Task], num_envs: int, options: Mapping[str, Any]) -> MujocoEnv:
    """An environment of ``task`` with those of ``options`` that it takes, though not those by keyword only.

    The others are the environment's: ``cameras`` out of "front", "side", "top" (("front",)), ``image_size`` in pixels,
    for all cameras or {camera: size} (64), ``threads`` (2), ``render`` (True).  Raises UserError for an unknown option.
    """
    made, rest = _make_task(task, options)
    return MujocoEnv(made, num_envs, **rest)


def make_spec(task: Callable[..., Task], /, **options: Any) -> EnvSpec:
    """The spec of :func:`make_env`'s environment with ``options``, without simulator state, threads or OpenGL."""
    made, rest = _make_task(task, options)
    return task_spec(made, **{name: value for name, value in rest.items() if name != "threads"})


def declare_mujoco(task: Callable[..., Task], **others: Any) -> TaskExtras:
    """``declare_task`` for the ``make`` of ``task``, which knows its spec and parameters; ``others`` as there."""
    return TaskExtras(spec=partial(make_spec, task), parameters=lambda **options: PARAMETERS, **others)


def _make_task(task: Callable[..., Task], options: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """The task of those of ``options`` that are its own, and the others."""
    parameters = inspect.signature(task).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    check_names(f"task {getattr(task, 'name', 'this')!r}", [*own, *_OPTIONS], options)
    made = task(**{option: value for option, value in options.items() if option in own})
    return made, {option: value for option, value in options.items() if option in _OPTIONS}
