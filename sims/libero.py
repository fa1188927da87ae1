"""LIBERO: 130 tasks of a Panda arm in five suites, with fixed initial states (Liu et al. 2023, arXiv 2306.03310).

It pins robosuite 1.4.0, so it runs in a virtual environment of its own: ``vla-rl sims install libero``.  Its package
has no meshes and textures: the folder ``libero/libero/assets`` of its repository has to be copied there by hand.
"""

from __future__ import annotations

import math
import os
import pickletools
import random
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from sims import catalog, installations, isolated
from sims.base import CameraRig, PooledSimulator, SideBySide, TaskPool, require_positive, simulator_spec
from sims.isolated import IsolatedEnv
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import UserError, did_you_mean

TIME_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_90": 400, "libero_10": 520}
"""Actions per episode, by suite: those of OpenVLA's evaluation (Kim et al. 2024, arXiv 2406.09246)."""
((ASSETS, ASSETS_FROM),) = installations.SHIPPED["libero"].files.items()
_SETTLING = 10  # actions that only open the gripper while objects that start in the air come to rest
_FREQUENCY = 20.0  # actions per second
_COLLISION_GROUP = 0  # geoms that robosuite hides in pictures
_STATE = ("x", "y", "z", "rx", "ry", "rz", "finger0", "finger1")
_ACTION = ("x", "y", "z", "rx", "ry", "rz", "gripper")


class Libero(PooledSimulator):
    """One LIBERO environment, which plays the task that a seed chooses."""

    def __init__(self, suite: str, tasks: Sequence[str], rig: CameraRig, pool: TaskPool) -> None:
        super().__init__(tasks, rig, pool)
        self._suite, self._values = suite, dict[str, np.ndarray]()

    def reset(self, seed: int) -> int:
        """Task number ``seed % len(tasks)`` from its initial state ``seed // len(tasks)``, counted round."""
        number = self.choose(seed)
        np.random.seed(seed % 2**32)  # LIBERO draws from the global generators
        random.seed(seed)
        self.env.reset()
        states, model = initial_states(self._suite, self.task), self.env.sim.model._model
        check_fits(self.task, states, 1 + model.nq + model.nv)
        self.env.set_init_state(states[seed // len(self._tasks) % len(states)])
        for _ in range(_SETTLING):
            self.act(np.array([0, 0, 0, 0, 0, 0, -1], np.float32))
        return number

    def act(self, action: np.ndarray) -> tuple[float, bool]:
        self._values, reward, _, _ = self.env.step(action.astype(np.float64))
        return float(reward), bool(self.env.check_success())

    def state(self) -> np.ndarray:
        values = self._values
        turned = _rotation_vector(values["robot0_eef_quat"])
        return np.concatenate([values["robot0_eef_pos"], turned, values["robot0_gripper_qpos"]]).astype(np.float32)

    def images(self) -> Mapping[str, np.ndarray]:
        return self._rig.images(self.task, self.env.sim.model._model, self.env.sim.data._data)


def make_in_process(
    num_envs: int,
    suite: str = "libero_spatial",
    tasks: Sequence[int] | None = None,
    cameras: Sequence[str] = ("agentview", "robot0_eye_in_hand"),
    image_size: int = 128,
    time_limit: int | None = None,
) -> SideBySide:
    """``num_envs`` LIBERO environments in this process, which has to have LIBERO and its assets.

    suite       of ``TIME_LIMITS``
    tasks       numbers within the suite, all unless given; a seed plays task ``seed % len(tasks)``
    cameras     "agentview", "robot0_eye_in_hand", "frontview", ...; upright, while LIBERO's own are upside down
    time_limit  actions per episode; that of ``TIME_LIMITS`` unless given

    state 8: the gripper's position (metres), its orientation as a rotation vector (radians) and its two fingers.
    Actions are those of LIBERO, within -1 to 1.  An episode starts after ten actions in which objects come to rest.
    """
    if suite not in TIME_LIMITS:
        raise UserError(f"LIBERO has no suite {suite!r}, so it cannot be played; {did_you_mean(suite, TIME_LIMITS)}")
    if not (_package() / ASSETS.removeprefix("libero/")).is_dir():
        raise UserError(
            f"LIBERO has no assets in {_package().parent / ASSETS}, so none of its scenes can be built; {ASSETS_FROM}."
        )
    time_limit = TIME_LIMITS[suite] if time_limit is None else time_limit
    require_positive(image_size=image_size, time_limit=time_limit)
    names = _tasks(suite)
    chosen = range(len(names)) if tasks is None else tasks
    if not len(chosen) or not all(0 <= number < len(names) for number in chosen):
        raise UserError(f"tasks={list(chosen)} are not within the {len(names)} of {suite}; give numbers from 0.")
    played = [names[number] for number in chosen]
    rig = CameraRig(cameras, image_size, 2 * num_envs, (_COLLISION_GROUP,))
    pool = TaskPool(lambda name: _make_task(suite, name), 2 * num_envs)
    _check_cameras(pool, played[0], cameras)
    spec = _spec(suite, played, cameras, image_size, time_limit)
    return SideBySide(spec, [Libero(suite, played, rig, pool) for _ in range(num_envs)])


def make(num_envs: int, workers: int = 1, **options: Any) -> IsolatedEnv:
    """LIBERO in ``workers`` processes of its own installation; other options as :func:`make_in_process`.

    Raises UserError with the command that installs it when it is not installed, and with the folder that its assets
    belong into when they are missing.
    """
    catalog.check_options("libero", make_in_process, options)
    return isolated.make(num_envs, "sims.libero:make_in_process", options, workers, installation="libero")


def prepare() -> None:
    """Write the file of paths that LIBERO's first import asks for on the terminal, and import LIBERO."""
    folder, package = Path(os.environ["LIBERO_CONFIG_PATH"]), _package() / "libero"
    folder.mkdir(parents=True, exist_ok=True)
    places = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "datasets", "assets": "assets"}
    lines = [f"benchmark_root: {package}", *(f"{name}: {package / place}" for name, place in places.items())]
    (folder / "config.yaml").write_text("\n".join([*lines, ""]), encoding="utf-8")
    from libero.libero import envs

    assert envs.TASK_MAPPING


def initial_states(suite: str, task: str) -> np.ndarray:
    """float64 [N,S]: the fixed initial states of a task, as MuJoCo's time, positions and velocities."""
    return read_states(_package() / "libero" / "init_files" / suite / f"{task}.pruned_init")


def check_fits(task: str, states: np.ndarray, size: int) -> None:
    """Raise UserError unless each of the initial ``states`` [N,S] has the ``size`` numbers of the scene of ``task``."""
    if states.shape[1] != size:
        raise UserError(
            f"an initial state of {task} has {states.shape[1]} numbers and its scene has {size}, so they belong to "
            f"different versions of LIBERO; {ASSETS_FROM} again."
        )


@cache
def read_states(path: Path) -> np.ndarray:
    """float64 [N,S] from a file that ``torch.save`` wrote of one array, without running the pickle in it.

    Raises UserError for a file that holds something else.
    """
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        operations = [(code.name, value) for code, value, _ in pickletools.genops(archive.read(name))]
    texts = [str(value) for code, value in operations if code.endswith("BINUNICODE")]
    numbers = [value if code.startswith("BININT") else None for code, value in operations]
    pairs = [numbers[i - 2 : i] for i, (code, _) in enumerate(operations) if code == "TUPLE2"]
    shapes = [shape for pair in pairs if len(shape := [value for value in pair if value is not None]) == 2]
    data = max(texts, key=len, default="").encode("latin1")
    if not {"f8", "<"} <= set(texts) or len(shapes) != 1 or len(data) != 8 * math.prod(shapes[0]):
        raise UserError(
            f"{path} holds no table of float64 numbers, so no episode can start; copy it from LIBERO again."
        )
    return np.frombuffer(data, "<f8").reshape(shapes[0])


def _spec(suite: str, tasks: Sequence[str], cameras: Sequence[str], size: int, time_limit: int) -> EnvSpec:
    infinite = float("inf")
    return simulator_spec(
        suite,
        cameras,
        size,
        time_limit,
        state=ArraySpec((8,), "float32", -infinite, infinite, unit="m, rad", frame="world", names=_STATE),
        action=ArraySpec((7,), "float32", -1.0, 1.0, unit="1 (of the controller)", names=_ACTION),
        tasks=tuple(_instruction(name) for name in tasks),
        families=tuple(tasks),
        control_dt=1 / _FREQUENCY,
    )


def _check_cameras(pool: TaskPool, task: str, cameras: Sequence[str]) -> None:
    """Raise UserError for a camera that the scene of ``task`` does not have."""
    env = pool.take(task)
    known = env.sim.model.camera_names
    pool.give_back(task, env)
    for camera in cameras:
        if camera not in known:
            raise UserError(f"LIBERO has no camera {camera!r}, so it takes no pictures; {did_you_mean(camera, known)}")


def _instruction(task: str) -> str:
    """``KITCHEN_SCENE10_close_the_drawer`` -> "close the drawer"."""
    words = task.split("_")
    return " ".join(word for word in words if not word.isupper())


def _rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """[3], radians, of a unit quaternion whose real part is the last entry."""
    real, size = float(np.clip(quaternion[3], -1, 1)), float(np.linalg.norm(quaternion[:3]))
    return np.zeros(3) if size < 1e-9 else quaternion[:3] / size * 2 * np.arctan2(size, real)


def _make_task(suite: str, name: str) -> Any:
    from libero.libero.envs.env_wrapper import ControlEnv

    return ControlEnv(
        bddl_file_name=str(_package() / "libero" / "bddl_files" / suite / f"{name}.bddl"),
        use_camera_obs=False,
        has_offscreen_renderer=False,
        control_freq=int(_FREQUENCY),
        ignore_done=True,
    )


@cache
def _tasks(suite: str) -> tuple[str, ...]:
    """The tasks of ``suite`` in LIBERO's order, whose module is loaded by itself: its package imports torch."""
    path = _package() / "libero" / "benchmark" / "libero_suite_task_map.py"
    found = util.spec_from_file_location("libero_suite_task_map", path)
    assert found is not None and found.loader is not None
    module = util.module_from_spec(found)
    found.loader.exec_module(module)
    return tuple(module.libero_task_map[suite])


def _package() -> Path:
    found = util.find_spec("libero")
    if found is None or not found.submodule_search_locations:
        raise UserError("LIBERO is not installed here, so nothing can be played; run 'vla-rl sims install libero'.")
    return Path(found.submodule_search_locations[0])
