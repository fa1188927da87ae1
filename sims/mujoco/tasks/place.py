"""Place: "put the green cube on the blue plate", with another cube and another plate on the table.

Success: for 5 control steps in a row, within 80, the named cube rests on the table with its centre within 2.5 cm of the
named plate's, and the fingers are open.  Failure: the same on another plate ("wrong_plate"), or another cube was lifted
as in lift ("wrong_object").  Plates are flat and have no contact.

With ``deadline`` an episode that takes longer has failed, with the cause "too_late", as in lift.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.env import MujocoEnv, declare_mujoco, make_env
from sims.mujoco.generators import Generators
from sims.mujoco.scene import CUBE_EDGE, FINGER_OPEN, MARK_RADIUS
from sims.mujoco.tabletop import (
    COLOURS,
    GRASP_HEIGHT,
    HOLD_STEPS,
    LIFT_HEIGHT,
    SPACING,
    TRAVEL_HEIGHT,
    Instruct,
    Situation,
    Tabletop,
    TabletopExpert,
    check_variant,
    count_consecutive,
    grasp,
)
from sims.mujoco.task import Episodes, TaskResult, TaskState, count, pick
from vla_rl.contract.env import Array, ArraySpec, Observation

NEAR = 0.025  # metres between the centres of cube and plate
RESTING = CUBE_EDGE / 2 + 0.004  # metres; a cube whose centre is lower stands on the table
RELEASED = 0.05  # metres between the fingers: more than a cube's edge
PLATES = 2
ON_TABLE = 2  # cubes of an episode; any others of the model are away
OTHERS = ((1, 0), (0, 1), (1, 1))  # pairs that the instruction does not name: whether another cube, another plate
# Of the expert:
CLEAR = 0.058  # metres of the pinch point at which a held cube passes above a standing one
ARRIVED = 0.006  # metres beside the plate's centre
DOWN = 0.0215  # metres of a cube's centre that is about to stand
RISE = 0.09


class PlaceTask(Tabletop):
    """The rules of place; see the module's docstring and ``sims.mujoco.task.Task``.

    With ``instruct="distractor"`` the same seed gives the same scene, but the instruction names the other cube.
    ``privileged/other_tasks`` are the instructions for the other pairs of cube and plate in the scene, see ``OTHERS``.
    """

    name = "place"
    failures: tuple[str, ...] = ("wrong_object", "wrong_plate", "too_late")
    time_limit = 80

    def __init__(
        self, cubes: int = 2, colours: int = 4, instruct: Instruct = "target", deadline: int | None = None
    ) -> None:
        """``cubes`` of the model, of which two are on the table."""
        check_variant(self.name, cubes, 4, colours, instruct)
        super().__init__(cubes, PLATES, deadline=deadline)
        self._names = list(COLOURS)[:colours]
        self.texts = tuple(f"put the {a} cube on the {b} plate" for a in self._names for b in self._names)
        self.families = (self.name,) * len(self.texts)
        self.task_state: TaskState = {
            **self.scene_state(),
            "named": np.array(0, np.int8),  # cube
            "plate": np.array(0, np.int8),
            "steps": np.zeros((), np.int16),
            "held": np.zeros(cubes, np.int16),  # control steps in a row that each cube was up
            "placed": np.zeros(PLATES, np.int16),  # ... that the named cube rested on each plate with open fingers
        }
        self._instruct = instruct
        self.extras = {
            **self.place_extras("target", "goal", "other_cube", "other_goal"),
            "privileged/other_tasks": ArraySpec((3,), "int64", 0, len(self.texts) - 1, unit="index of an instruction"),
        }

    def sample_episodes(self, rng: Generators) -> Episodes:
        """Two cubes and two plates apart from each other, colours different among each kind; the gripper above."""
        task_state = self.blank_state(len(rng))
        spacing = np.full((ON_TABLE + PLATES,) * 2, SPACING)
        spacing[ON_TABLE:, ON_TABLE:] = 2 * MARK_RADIUS + 0.01
        xy = self.robot.scatter(ON_TABLE + PLATES, spacing, rng)
        qpos = self.place_cubes(xy[:, :ON_TABLE], rng)
        ctrl = self.robot.start(qpos, rng)
        task_state["colour"][:, :ON_TABLE] = rng.permutation(len(self._names))[:, :ON_TABLE]
        task_state["mark_colour"][:] = rng.permutation(len(self._names))[:, :PLATES]
        task_state["mark_xy"][:] = xy[:, ON_TABLE:]
        seeded, task_state["plate"][:] = rng.integers(0, ON_TABLE), rng.integers(0, PLATES)
        task_state["named"][:] = 1 - seeded if self._instruct == "distractor" else seeded
        return Episodes(qpos, ctrl, task_state)

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        """Count for how long the named cube has been resting on each plate, and other cubes have been up."""
        xp, cubes = array_namespace(qpos), self.centres(qpos)
        named = pick(cubes, task_state["named"])
        near = xp.linalg.vector_norm(named[:, None, :2] - task_state["mark_xy"], axis=2) <= NEAR
        let_go = self.robot.opening(qpos) >= RELEASED
        placed = count_consecutive(near & (let_go & (named[:, 2] <= RESTING))[:, None], task_state["placed"])
        held = count_consecutive(cubes[..., 2] >= LIFT_HEIGHT, task_state["held"])
        long_enough = placed >= HOLD_STEPS
        success = pick(long_enough, task_state["plate"])
        other_cube = (held >= HOLD_STEPS) & (count(self._cubes, qpos) != task_state["named"][:, None])
        wrong_object, wrong_plate = xp.any(other_cube, axis=1), xp.any(long_enough, axis=1)
        return self.result(task_state, success, [wrong_object, wrong_plate], held=held, placed=placed)

    def observe_extras(self, qpos: Array, task_state: TaskState) -> dict[str, Array]:
        """Positions of the cubes, the named cube and both plates, metres; and what the instruction does not name."""
        xp, cubes, plates = array_namespace(qpos), self.cubes(qpos), self.mark_positions(task_state)
        named, plate = task_state["named"], task_state["plate"]
        others = [self._text(task_state, abs(named - cube), abs(plate - mark)) for cube, mark in OTHERS]
        return {
            "privileged/cubes": self.flat_cubes(qpos),
            "privileged/target": pick(cubes, named),
            "privileged/goal": xp.astype(pick(plates, plate), xp.float32),
            "privileged/other_cube": pick(cubes, 1 - named),
            "privileged/other_goal": xp.astype(pick(plates, 1 - plate), xp.float32),
            "privileged/other_tasks": xp.stack(others, axis=1),
        }

    def instruction(self, task_state: TaskState) -> Array:
        """int64 [R]: index of the text that names this cube and this plate; 0 before the first reset."""
        return self._text(task_state, task_state["named"], task_state["plate"])

    def _text(self, task_state: TaskState, cube: Array, plate: Array) -> Array:
        """int64 [R]: index of the text that names the cubes and plates of these numbers [R]."""
        xp = array_namespace(task_state["colour"])
        colour = xp.astype(pick(task_state["colour"], cube), xp.int64)
        mark = xp.astype(pick(task_state["mark_colour"], plate), xp.int64)
        return xp.clip(colour * len(self._names) + mark, min=0)


class PlaceExpert(TabletopExpert):
    """Grasps the named cube, carries it above the named plate, lowers it, lets go and rises."""

    def rule(self, situation: Situation) -> tuple[np.ndarray, np.ndarray]:
        goal, grip = grasp(situation)
        away = np.linalg.norm(situation.goal[:, :2] - situation.cube[:, :2], axis=1)
        delivered = (away < 2 * ARRIVED) & (situation.cube[:, 2] < DOWN)

        carrying = situation.holding & ~delivered
        low = (situation.pinch[:, 2] < CLEAR) & (away > 3 * ARRIVED)  # lift it straight up first
        height = np.clip(GRASP_HEIGHT + (away - ARRIVED) * 4.0, GRASP_HEIGHT, TRAVEL_HEIGHT)
        # The cube may hang beside the pinch point.
        over = situation.pinch[:, :2] + situation.goal[:, :2] - situation.cube[:, :2]
        goal[carrying] = np.column_stack([over, height])[carrying]
        goal[carrying & low, :2], goal[carrying & low, 2] = situation.target[carrying & low, :2], TRAVEL_HEIGHT

        opened = situation.opening > 1.8 * FINGER_OPEN
        goal[delivered] = situation.target[delivered]
        goal[delivered & opened, 2] = RISE
        return goal - situation.target, grip & ~delivered


def claims(obs: Observation) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Two claims: the named cube rests on the named plate; and one of the three other pairs of the scene does.

    Which pair depends on the instructions only, so it stays the same in an episode.  A model that gets the same picture
    with both instructions must read which cube and which plate is meant.
    """
    extras, rows = obs.extras, np.arange(len(obs.task))
    pair = extras["privileged/other_tasks"].sum(1) % len(OTHERS)
    cubes = np.stack([extras["privileged/target"], extras["privileged/other_cube"]])
    plates = np.stack([extras["privileged/goal"], extras["privileged/other_goal"]])
    other_cube, other_plate = np.array(OTHERS)[pair].T

    def done(cube: np.ndarray, plate: np.ndarray) -> np.ndarray:
        near = np.linalg.norm(cube[:, :2] - plate[:, :2], axis=1) <= NEAR
        return near & (cube[:, 2] <= RESTING) & (obs.state[:, 3] >= RELEASED)

    known = np.ones(len(rows), bool)
    other = done(cubes[other_cube, rows], plates[other_plate, rows])
    return [
        (obs.task, done(cubes[0], plates[0]), known),
        (extras["privileged/other_tasks"][rows, pair], other, known),
    ]


@declare_mujoco(
    PlaceTask,
    expert=PlaceExpert,
    scenes="sims.mujoco.tasks.scenes:place",
    swapped_options={"instruct": "distractor"},
    claims=claims,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The place environment.

    Options of the task: ``cubes`` 2-4 in the model (2), ``colours`` 4-6 (4), ``instruct`` "target" or "distractor",
    ``deadline`` control steps after which an unfinished episode has failed (none).  The rest: see ``make_env``.
    """
    return make_env(PlaceTask, num_envs, options)
