"""Lift: "pick up the red cube" among cubes of other colours.

Success: the named cube's centre at least 6 cm above the table at the end of 5 control steps in a row, within 60.
Failure: the same held for any other cube, which ends the episode with the cause "wrong_object"; if both happen at the
same step, the named cube counts.  A resting cube's centre is 1.8 cm above the table.

With ``deadline`` an episode that takes longer has failed, with the cause "too_late": a stricter task that spends less
time on hopeless situations in training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.env import MujocoEnv, declare_mujoco, make_env
from sims.mujoco.generators import Generators
from sims.mujoco.scene import CUBE_EDGE
from sims.mujoco.tabletop import (
    COLOURS,
    HOLD_STEPS,
    LIFT_HEIGHT,
    SPACING,
    Instruct,
    Robot,
    Situation,
    Tabletop,
    TabletopExpert,
    check_variant,
    count_consecutive,
    grasp,
)
from sims.mujoco.task import Episodes, TaskResult, TaskState, count, pick
from vla_rl.contract.env import Array, ArraySpec, Observation

_REACH, _NEAR = 0.5, 0.1  # of the potential: share of reaching in the whole; metres at which it is nearly done
HOLD_HEIGHT = 0.11  # metres, to which the expert lifts


class LiftTask(Tabletop):
    """The rules of lift; see the module's docstring and ``sims.mujoco.task.Task``.

    An episode's seed decides the scene and which cube is the target.  With ``instruct="distractor"`` the same seed
    gives the same scene, but the instruction names another cube of it, which then has to be lifted; lifting the former
    target is "wrong_object".  ``privileged/lifted`` is the colour that was lifted, ``privileged/seeded`` the one that
    the seed chose.
    """

    name = "lift"
    failures: tuple[str, ...] = ("wrong_object", "too_late")
    time_limit = 60
    fewest = (2, 4)  # cubes and colours

    def __init__(
        self,
        cubes: int = 3,
        colours: int = 4,
        instruct: Instruct = "target",
        deadline: int | None = None,
        *,
        marks: int = 0,
        robot: Robot | None = None,
    ) -> None:
        """``marks``: flat marks in the scene that lift leaves invisible (other tasks share the model)."""
        check_variant(self.name, cubes, 4, colours, instruct, self.fewest)
        super().__init__(cubes, marks, robot, deadline)
        self.texts = tuple(f"pick up the {name} cube" for name in list(COLOURS)[:colours])
        self.families = (self.name,) * len(self.texts)
        self.task_state: TaskState = {
            **self.scene_state(),
            "seeded": np.array(0, np.int8),  # cube chosen by the seed
            "named": np.array(0, np.int8),  # cube named by the instruction
            "steps": np.zeros((), np.int16),  # control steps since the start
            "held": np.zeros(cubes, np.int16),  # control steps in a row that each cube was up
        }
        self._instruct = instruct
        self.extras = {
            **self.place_extras("target"),
            "privileged/lifted": ArraySpec((), "int64", -1, colours - 1, unit="index of a colour, -1 for none"),
            "privileged/seeded": ArraySpec((), "int64", 0, colours - 1, unit="index of a colour"),
        }

    def sample_episodes(self, rng: Generators) -> Episodes:
        """Scenes: cubes apart from each other, colours all different, the open gripper above the table."""
        task_state = self.blank_state(len(rng))
        qpos = self.place_cubes(self.robot.scatter(self._cubes, SPACING, rng), rng)
        ctrl = self.robot.start(qpos, rng)
        task_state["colour"][:] = rng.permutation(len(self.texts))[:, : self._cubes]
        task_state["seeded"][:] = rng.integers(0, self._cubes)
        other = (task_state["seeded"] + rng.integers(1, max(2, self._cubes))) % self._cubes
        task_state["named"][:] = other if self._instruct == "distractor" else task_state["seeded"]
        return Episodes(qpos, ctrl, task_state)

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        """Count the control steps that every cube was up, and end the episode when one was up for long enough."""
        xp = array_namespace(qpos)
        up = self.centres(qpos)[..., 2] >= LIFT_HEIGHT
        held = count_consecutive(up, task_state["held"])
        long_enough, named = held >= HOLD_STEPS, self._named(task_state)
        success = xp.any(long_enough & named, axis=1)
        wrong = xp.any(long_enough & ~named, axis=1)
        return self.result(task_state, success, [wrong], held=held)

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        """Cube positions (metres), and which colours were lifted and chosen by the seed."""
        xp = array_namespace(qpos)
        # The named cube first: where two are lifted at once, it is the one that counts.
        lasting = (task_state["held"] >= HOLD_STEPS) * (1 + xp.astype(self._named(task_state), xp.int8))
        lifted = xp.astype(pick(task_state["colour"], xp.argmax(lasting, axis=1)), xp.int64)
        return {
            "privileged/cubes": self.flat_cubes(qpos),
            "privileged/target": pick(self.cubes(qpos), task_state["named"]),
            "privileged/lifted": xp.where(xp.any(lasting > 0, axis=1), lifted, xp.full_like(lifted, -1)),
            "privileged/seeded": self._colour(task_state, "seeded"),
        }

    def instruction(self, task_state: TaskState) -> Array:
        """int64 [R]: the colour that the instruction names."""
        return self._colour(task_state, "named")

    def _named(self, task_state: TaskState) -> Array:
        """bool [R,cubes]: which cube the instruction names."""
        return count(self._cubes, task_state["named"]) == task_state["named"][:, None]

    def _colour(self, task_state: TaskState, which: str) -> Array:
        """int64 [R]: the colour of the cube with the number ``task_state[which]``; 0 before the first reset."""
        xp = array_namespace(task_state["colour"])
        return xp.astype(xp.clip(pick(task_state["colour"], task_state[which]), min=0), xp.int64)


class LiftExpert(TabletopExpert):
    """Moves above the named cube, descends, closes, lifts and holds."""

    def rule(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        goal, grip = grasp(situation)
        goal[situation.holding, :2], goal[situation.holding, 2] = situation.target[situation.holding, :2], HOLD_HEIGHT
        return goal - situation.target, grip


def potential(obs: Observation) -> np.ndarray:
    """float64 [E] from 0 to 1: half for the gripper at the named cube, half for the height of that cube.

    For learners that need more than the reward of success: as ``potential`` of ``sims.as_gymnasium``, its increase is
    added to the reward.
    """
    return lift_potential(obs.state[:, :3], obs)


def lift_potential(gripper: np.ndarray, obs: Observation) -> np.ndarray:
    """:func:`potential` with the pinch point at ``gripper`` [E,3], metres."""
    target = np.asarray(obs.extras["privileged/target"], np.float64)
    distance = np.linalg.norm(gripper - target, axis=1)
    risen = (target[:, 2] - CUBE_EDGE / 2) / (LIFT_HEIGHT - CUBE_EDGE / 2)
    return _REACH * (1 - np.tanh(distance / _NEAR)) + (1 - _REACH) * np.clip(risen, 0, 1)


def claims(obs: Observation) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Two claims: the named cube is lifted or not; the cube that the seed had chosen is not lifted.

    For ``instruct="distractor"``, where these are two cubes of one scene: a classifier that gets the same picture with
    both instructions must use the instruction.  The second label is unknown while another cube is lifted.
    """
    up = obs.extras["privileged/cubes"].reshape(len(obs.task), -1, 3)[..., 2] >= LIFT_HEIGHT
    named, other = obs.extras["privileged/target"][:, 2] >= LIFT_HEIGHT, obs.extras["privileged/seeded"]
    known = (up.sum(1) == named) & (other != obs.task)
    return [(obs.task, named, np.ones_like(named)), (other, np.zeros_like(named), known)]


@declare_mujoco(
    LiftTask,
    expert=LiftExpert,
    scenes="sims.mujoco.tasks.scenes:lift",
    swapped_options={"instruct": "distractor"},
    claims=claims,
    progress=potential,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The lift environment.

    Options of the task: ``cubes`` 2-4 (3), ``colours`` 4-6 (4), ``instruct`` "target" or "distractor", ``deadline``
    control steps after which an unfinished episode has failed (none).  Those of the environment: see ``make_env``.
    """
    return make_env(LiftTask, num_envs, options)


# -- a controller without weights --------------------------------------------------------------------------------------

# Camera "front" of scene.py.
_CAMERA = np.array([0.0, -0.40, 0.42])
_RIGHT, _UP = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.67, 0.742])
_VIEW = np.cross(_UP, _RIGHT)
_HALF_HEIGHT = np.tan(np.radians(38.0) / 2)
_MIN_COSINE = 0.97  # smallest cosine between a pixel's chromaticity and the colour's
_PUSHED = 0.016  # metres
_HUES = np.array([rgba[:3] for rgba in COLOURS.values()], np.float64)


def act(obs: Observation, error: float = 0.0) -> np.ndarray:
    """The next five actions [E,5,4], in metres and grip sign: find the named colour in the picture, go there, lift.

    It has a policy's observations (camera "front", proprioception, the instruction), so residual policies can correct
    it: ``FunctionPolicy(spec, lift.act, "sims.mujoco.tasks.lift:act")``.  ``error`` in metres is added to the cube's x
    and y.
    """
    located = find(obs.images["front"], obs.task) + np.array([error, error, 0.0])
    # Closing fingers hide the cube, so it is assumed to be between them.
    closing = (obs.state[:, 7] < 0.01) & (obs.state[:, 3] > CUBE_EDGE / 2)
    cube = np.where(closing[:, None], obs.state[:, :3], located)
    return LiftExpert(horizon=5).act(replace(obs, extras={"privileged/target": cube.astype(np.float32)}))


def act_miscalibrated(obs: Observation) -> np.ndarray:
    """As :func:`act` after somebody has pushed the camera: it often closes its fingers beside the cube."""
    return act(obs, error=_PUSHED)


def find(images: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Position on the table [E,3], in metres, of the pixels of ``colour`` int [E] in ``images`` uint8 [E,h,w,3].

    The centre of the table where no pixel has that colour.
    """
    pixels = images.astype(np.float64) - images.mean(-1, keepdims=True)
    hues = _HUES[colour] - _HUES[colour].mean(-1, keepdims=True)
    size = np.linalg.norm(pixels, axis=-1)
    cosine = np.einsum("ehwc,ec->ehw", pixels, hues) / (np.linalg.norm(hues, axis=-1)[:, None, None] * size + 1e-6)
    weight = np.where((cosine > _MIN_COSINE) & (size > 25.0), 1.0, 0.0)
    height, width = weight.shape[1:]
    total = np.maximum(weight.sum((1, 2)), 1e-6)
    x = (weight.sum(1) @ (np.arange(width) + 0.5) / total) / height - 0.5 * width / height
    y = 0.5 - (weight.sum(2) @ (np.arange(height) + 0.5) / total) / height
    ray = _VIEW + 2 * _HALF_HEIGHT * (x[:, None] * _RIGHT + y[:, None] * _UP)
    place = _CAMERA + ray * ((CUBE_EDGE / 2 - _CAMERA[2]) / ray[:, 2])[:, None]
    return np.where((weight.sum((1, 2)) > 0)[:, None], place, np.array([0.0, 0.0, CUBE_EDGE / 2]))
