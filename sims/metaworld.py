"""Meta-World v3: 50 tasks of a Sawyer arm, with the experts that come with them (McLean et al. 2025).

It pins mujoco 3.3.0, so it runs in a virtual environment of its own: ``vla-rl sims install metaworld``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from sims import catalog, isolated
from sims.base import CameraRig, PooledSimulator, SideBySide, TaskPool, require_positive, simulator_spec
from sims.isolated import ExpertInWorker, IsolatedEnv
from sims.isolation.messages import EXPERT_ACTION
from vla_rl.contract.env import PRIVILEGED, ArraySpec, EnvSpec
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.task import declare_task

_TASKS = """
    assembly basketball bin-picking box-close button-press button-press-topdown button-press-topdown-wall
    button-press-wall coffee-button coffee-pull coffee-push dial-turn disassemble door-close door-lock door-open
    door-unlock drawer-close drawer-open faucet-close faucet-open hammer hand-insert handle-press handle-press-side
    handle-pull handle-pull-side lever-pull peg-insert-side peg-unplug-side pick-out-of-hole pick-place pick-place-wall
    plate-slide plate-slide-back plate-slide-back-side plate-slide-side push push-back push-wall reach reach-wall
    shelf-place soccer stick-pull stick-push sweep sweep-into window-close window-open"""
_MT10 = """
    reach push pick-place door-open drawer-open drawer-close button-press-topdown peg-insert-side window-open
    window-close"""
TASKS, MT10 = tuple(_TASKS.split()), tuple(_MT10.split())
BENCHMARKS = {"MT10": MT10, "MT50": TASKS}
CAMERAS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
_UPSIDE_DOWN = ("corner", "corner2", "corner3")  # as Meta-World defines them
_POSITIONS = {"corner2": (0.75, 0.075, 0.7)}  # closer than Meta-World's, so that small pictures show the objects
_LIMIT = 500  # control steps, Meta-World's own
_DT = 0.0125  # s: five steps of 2.5 ms
_OBSERVATION = PRIVILEGED + "observation"
_PROPRIOCEPTION = 4  # entries of its observation that are proprioception: the hand's position and its opening


class MetaWorld(PooledSimulator):
    """One Meta-World environment, which plays the task that a seed chooses."""

    def __init__(
        self,
        tasks: Sequence[str],
        rig: CameraRig,
        positions: Mapping[str, Sequence[float]],
        pool: TaskPool,
        shaped: bool,
        action_repeat: int,
    ) -> None:
        """``positions`` {camera: (x, y, z)} in metres are other than Meta-World's."""
        super().__init__(tasks, rig, pool)
        self._positions, self._shaped, self._action_repeat = positions, shaped, action_repeat
        self._observation = np.zeros(0)

    def reset(self, seed: int) -> int:
        """The task is number ``seed % len(tasks)``; the scene is drawn by Meta-World itself from ``seed``."""
        number = self.choose(seed)
        self.env.seed(seed)
        self._observation, _ = self.env.reset()
        return number

    def act(self, action: np.ndarray) -> tuple[float, bool]:
        total, success = 0.0, False
        for _ in range(self._action_repeat):
            self._observation, reward, _, _, info = self.env.step(action)
            total, success = total + float(reward), bool(info["success"])
            if success:
                break
        return (total if self._shaped else float(success)), success

    def state(self) -> np.ndarray:
        return self._observation[:_PROPRIOCEPTION].astype(np.float32)

    def extras(self) -> Mapping[str, np.ndarray]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the experts announce that their actions will be clipped
            action = np.clip(_expert(self.task).get_action(self._observation), -1.0, 1.0)
        return {_OBSERVATION: self._observation.astype(np.float32), EXPERT_ACTION: action.astype(np.float32)}

    def images(self) -> Mapping[str, np.ndarray]:
        import mujoco

        for camera, position in self._positions.items():
            self.env.model.camera(camera).pos[:] = position
        mujoco.mj_camlight(self.env.model, self.env.data)
        pictures = self._rig.images(self.task, self.env.model, self.env.data)
        return {name: image[::-1, ::-1] if name in _UPSIDE_DOWN else image for name, image in pictures.items()}


def _make_task(name: str) -> Any:
    """Meta-World's environment of ``name``, whose scenes follow from ``seed`` and which shows the goal to experts."""
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    env = ALL_V3_ENVIRONMENTS[f"{name}-v3"]()
    # What its own set_task does, without the pickled task: the goal is drawn at every reset, from env.seed.
    env._set_task_called, env._partially_observable = True, False
    env._freeze_rand_vec, env.seeded_rand_vec = False, True
    vars(env).pop("sawyer_observation_space", None)
    env._set_task_inner()
    return env


@cache
def _expert(name: str) -> Any:
    """Meta-World's scripted policy of task ``name``, which has no state."""
    from metaworld.policies import ENV_POLICY_MAP

    return ENV_POLICY_MAP[f"{name}-v3"]()


@dataclass(frozen=True)
class _Options:
    """What :func:`make` takes besides the number of workers.

    tasks             "MT10", "MT50", one task ("pick-place") or several; a seed plays task ``seed % len(tasks)``
    cameras           Meta-World's, of which corner to corner3 are turned by 180 degrees, since they hang upside down
    time_limit        control steps of an episode
    action_repeat     Meta-World's steps in a control step, which is as much longer, and executes its action in each
    shaped            whether rewards are Meta-World's, 0 to 10 a step; otherwise success is worth 1 and all else 0
    camera_positions  {camera: (x, y, z)} in metres; "corner2" is closer than Meta-World's own unless it is given here
    """

    tasks: str | Sequence[str] = "MT10"
    cameras: Sequence[str] = ("corner2",)
    image_size: int = 64
    time_limit: int = _LIMIT
    action_repeat: int = 1
    shaped: bool = True
    camera_positions: Mapping[str, Sequence[float]] | None = None


def spec(workers: int = 1, **options: Any) -> EnvSpec:
    """The spec of :func:`make` with the same options; Meta-World itself is not needed."""
    chosen: _Options = catalog.call("metaworld", _Options, options)
    names, time_limit, action_repeat = _names(chosen.tasks), chosen.time_limit, chosen.action_repeat
    for camera in [*chosen.cameras, *(chosen.camera_positions or {})]:
        if camera not in CAMERAS:
            raise UserError(
                f"Meta-World has no camera {camera!r}, so it takes no pictures; {did_you_mean(camera, CAMERAS)}"
            )
    require_positive(image_size=chosen.image_size)
    if min(time_limit, action_repeat) < 1 or time_limit * action_repeat > _LIMIT:
        raise UserError(
            f"time_limit={time_limit} with action_repeat={action_repeat} is not within Meta-World's 1 to {_LIMIT} "
            "steps, so no episode could end by it; choose others."
        )
    axes = ("x", "y", "z", "gripper")
    unit = f"1 ({0.01 * action_repeat:g} m per axis, effort)"
    action = ArraySpec((4,), "float32", -1.0, 1.0, unit=unit, frame="world", names=axes)
    infinite = float("inf")
    return simulator_spec(
        "metaworld",
        chosen.cameras,
        chosen.image_size,
        time_limit,
        state=ArraySpec((4,), "float32", -infinite, infinite, unit="m, opening 0 to 1", frame="world", names=axes),
        action=action,
        tasks=tuple(name.replace("-", " ") for name in names),
        families=names,
        control_dt=_DT * action_repeat,
        extras={_OBSERVATION: ArraySpec((39,), "float32", -infinite, infinite), EXPERT_ACTION: action},
    )


def make_in_process(num_envs: int, **options: Any) -> SideBySide:
    """``num_envs`` Meta-World environments in this process, which has to have Meta-World; ``options`` as :func:`make`.

    state 4: the hand's position and opening, the first entries of Meta-World's observation.  Success is Meta-World's at
    any of its steps.  ``privileged/observation`` is the whole observation with the goal.
    """
    found, chosen = spec(**options), _Options(**options)
    rig, pool = CameraRig(chosen.cameras, chosen.image_size, 2 * num_envs), TaskPool(_make_task, 2 * num_envs)
    positions = {**_POSITIONS, **(chosen.camera_positions or {})}
    rewards = chosen.shaped, chosen.action_repeat
    return SideBySide(found, [MetaWorld(found.families, rig, positions, pool, *rewards) for _ in range(num_envs)])


@declare_task(expert=ExpertInWorker, spec=spec)
def make(num_envs: int, workers: int = 1, **options: Any) -> IsolatedEnv:
    """Meta-World in ``workers`` processes of its own installation; other options as ``_Options``.

    Raises UserError with the command that installs it when it is not installed.
    """
    spec(**options)  # a wrong option is refused before anything starts
    return isolated.make(num_envs, "sims.metaworld:make_in_process", options, workers, installation="metaworld")


def _names(tasks: str | Sequence[str]) -> tuple[str, ...]:
    chosen = BENCHMARKS.get(tasks, (tasks,)) if isinstance(tasks, str) else tuple(tasks)
    names = tuple(name.removesuffix("-v3") for name in chosen)
    for name in names:
        if name not in TASKS:
            known = [*BENCHMARKS, *TASKS]
            raise UserError(f"Meta-World has no task {name!r}, so it cannot be played; {did_you_mean(name, known)}")
    if not names or len(set(names)) < len(names):
        raise UserError(f"tasks={list(names)} names no task or one twice, so seeds choose badly; name each once.")
    return names
