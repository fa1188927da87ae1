"""Lift: "pick up the red cube" among cubes of other colours.

Success: the named cube's centre at least 6 cm above the table at the end of 5 control steps in a row, within 60.
Failure: the same held for any other cube, which ends the episode with the cause "wrong_object"; if both happen at the
same step, the named cube counts.  A resting cube's centre is 1.8 cm above the table.

With ``deadline`` an episode that takes longer has failed, with the cause "too_late": a stricter task that wastes less
time on hopeless situations while learning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from sims.mujoco.env import MujocoEnv, check_options
from sims.mujoco.scene import (
    CUBE_EDGE,
    FINGER_OPEN,
    FINGER_QPOS,
    GANTRY_QPOS,
    WORKSPACE_HIGH,
    WORKSPACE_LOW,
    build_model,
    cube_addresses,
)
from sims.mujoco.task import Episode, Memory, Verdict
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import ArraySpec

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.10, 0.10),
    "green": (0.10, 0.62, 0.18),
    "blue": (0.10, 0.28, 0.90),
    "yellow": (0.95, 0.78, 0.08),
    "purple": (0.55, 0.15, 0.70),
    "orange": (0.95, 0.45, 0.05),
}
LIFT_HEIGHT = 0.06  # metres, of a cube's centre above the table
HOLD_STEPS = 5  # control steps
SPREAD = 0.13  # metres; cube centres start within +-SPREAD in x and y
SPACING = 0.078  # metres between centres, so that the open fingers fit between two cubes
YAW = 0.55  # radians
START = 0.12  # metres; the gripper starts within +-START in x and y
MOST_DISPLACEMENT = 0.03  # metres per control step and axis

Instruct = Literal["target", "distractor"]


class LiftTask:
    """The rules of lift; see the module's docstring and ``sims.mujoco.task.Task``.

    An episode's seed decides the scene and which cube is the target.  With ``instruct="distractor"`` the same seed
    gives the same scene, but the instruction names another cube of it, which then has to be lifted; lifting the former
    target is "wrong_object".  ``privileged/lifted`` tells which colour was lifted, ``privileged/seeded`` which one the
    seed chose.
    """

    name = "lift"
    failures: tuple[str, ...] = ("wrong_object", "too_late")
    time_limit = 60
    substeps = 12

    def __init__(
        self, cubes: int = 3, colours: int = 4, instruct: Instruct = "target", deadline: int | None = None
    ) -> None:
        if not 2 <= cubes <= 4 or not 4 <= colours <= len(COLOURS) or instruct not in ("target", "distractor"):
            raise UserError(
                f"lift has no variant cubes={cubes}, colours={colours}, instruct={instruct!r}, so it cannot be made; "
                f"give 2 to 4 cubes, 4 to {len(COLOURS)} colours, and instruct 'target' or 'distractor'."
            )
        self.model = build_model(cubes)
        self.texts = tuple(f"pick up the {name} cube" for name in list(COLOURS)[:colours])
        self.painted = tuple(self.model.geom(f"cube{i}").id for i in range(cubes))
        self.memory: Memory = {
            "colour": np.zeros(cubes, np.int8),  # colour of every cube
            "seeded": np.array(0, np.int8),  # cube chosen by the seed
            "named": np.array(0, np.int8),  # cube named by the instruction
            "steps": np.zeros((), np.int16),  # control steps since the start
            "held": np.zeros(cubes, np.int16),  # control steps in a row that each cube was up
        }
        self._instruct, self._cubes, self._deadline = instruct, cubes, deadline
        self._rgba = np.array([(*rgb, 1.0) for rgb in COLOURS.values()], np.float32)
        self._cube_xyz = cube_addresses(cubes)[:, None] + np.arange(3)
        self._declare(colours)

    def _declare(self, colours: int) -> None:
        low, high, gap = tuple(WORKSPACE_LOW.tolist()), tuple(WORKSPACE_HIGH.tolist()), 2 * FINGER_OPEN
        around = 0.02  # metres by which the gantry may overshoot its target or be pushed off it
        self.state = ArraySpec(
            (8,),
            "float32",
            low=(*(x - around for x in low), -0.01, *low, 0.0),
            high=(*(x + around for x in high), gap + 0.01, *high, gap),
            unit="m",
            frame="table",
            names=("x", "y", "z", "opening", "target_x", "target_y", "target_z", "target_opening"),
        )
        self._state_low, self._state_high = (
            np.asarray(self.state.low, np.float32),
            np.asarray(self.state.high, np.float32),
        )
        bound, names = (MOST_DISPLACEMENT,) * 3 + (1.0,), ("dx", "dy", "dz", "grip")
        lowest = tuple(-b for b in bound)
        self.action = ArraySpec((4,), "float32", lowest, bound, unit="m,m,m,1", frame="table", names=names)
        place = ArraySpec((3,), "float32", -10.0, 10.0, unit="m", frame="table", names=("x", "y", "z"))
        self.extras = {
            "privileged/cubes": replace(place, shape=(self._cubes * 3,), names=()),
            "privileged/target": place,
            "privileged/lifted": ArraySpec((), "int64", -1, colours - 1, unit="index of a colour, -1 for none"),
            "privileged/seeded": ArraySpec((), "int64", 0, colours - 1, unit="index of a colour"),
        }

    def begin(self, rng: np.random.Generator) -> Episode:
        """A scene: cubes apart from each other, colours all different, the open gripper above the table."""
        qpos, memory = np.zeros(self.model.nq), {name: np.copy(value) for name, value in self.memory.items()}
        place_cubes(qpos, self._cubes, rng)
        start = np.array([*rng.uniform(-START, START, 2), rng.uniform(0.07, 0.15)])
        qpos[GANTRY_QPOS], qpos[FINGER_QPOS] = start, FINGER_OPEN
        memory["colour"][:] = rng.permutation(len(self.texts))[: self._cubes]
        memory["seeded"][...] = rng.integers(self._cubes)
        other = (memory["seeded"] + rng.integers(1, self._cubes)) % self._cubes
        memory["named"][...] = other if self._instruct == "distractor" else memory["seeded"]
        return Episode(qpos, np.array([*start, FINGER_OPEN]), memory)

    def control(self, ctrl: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Move the position target by ``action``'s displacement and close the fingers where its grip is positive."""
        after = np.empty_like(ctrl)
        after[:, :3] = np.minimum(np.maximum(ctrl[:, :3] + action[:, :3], WORKSPACE_LOW), WORKSPACE_HIGH)
        after[:, 3] = np.where(action[:, 3] > 0, 0.0, FINGER_OPEN)
        return after

    def judge(self, qpos: np.ndarray, memory: Memory) -> Verdict:
        """Count the control steps that every cube was up, and end the episode when one was up for long enough."""
        up = qpos[:, self._cube_xyz[:, 2]] >= LIFT_HEIGHT
        held = np.where(up, memory["held"] + 1, 0).astype(np.int16)
        long_enough = held >= HOLD_STEPS
        named = np.arange(self._cubes) == memory["named"][:, None]
        success = (long_enough & named).any(axis=1)
        wrong = (long_enough & ~named).any(axis=1) & ~success
        steps = (memory["steps"] + 1).astype(np.int16)
        late = (steps >= self._deadline) & ~success if self._deadline else np.zeros_like(success)
        failure = np.where(wrong, np.int8(0), np.where(late, np.int8(1), np.int8(-1)))
        return Verdict(success.astype(np.float32), success, failure, {**memory, "held": held, "steps": steps})

    def proprioception(self, qpos: np.ndarray, ctrl: np.ndarray) -> np.ndarray:
        """float32 [R,8]: pinch point and opening, then what they are commanded to be; metres."""
        state = np.empty((len(qpos), 8), np.float32)
        state[:, :3], state[:, 3] = qpos[:, GANTRY_QPOS], qpos[:, FINGER_QPOS].sum(axis=1)
        state[:, 4:7], state[:, 7] = ctrl[:, :3], 2 * ctrl[:, 3]
        seen: np.ndarray = np.minimum(np.maximum(state, self._state_low), self._state_high)
        return seen

    def observe_extras(self, qpos: np.ndarray, memory: Memory) -> dict[str, np.ndarray]:
        """Cube positions (metres), and which colours were lifted and chosen by the seed."""
        cubes = np.minimum(np.maximum(qpos[:, self._cube_xyz], -10), 10).astype(np.float32)
        rows = np.arange(len(qpos))
        # The named cube first: where two are lifted at once, it is the one that counts.
        lasting = (memory["held"] >= HOLD_STEPS) * (1 + (np.arange(self._cubes) == memory["named"][:, None]))
        lifted = memory["colour"][rows, lasting.argmax(axis=1)].astype(np.int64)
        return {
            "privileged/cubes": cubes.reshape(len(qpos), -1),
            "privileged/target": cubes[rows, memory["named"]],
            "privileged/lifted": np.where(lasting.any(axis=1), lifted, -1),
            "privileged/seeded": memory["colour"][rows, memory["seeded"]].astype(np.int64),
        }

    def instruction(self, memory: Memory) -> np.ndarray:
        """int64 [R]: the colour that the instruction names."""
        colour: np.ndarray = memory["colour"][np.arange(len(memory["named"])), memory["named"]]
        return colour.astype(np.int64)

    def colours(self, memory: Memory) -> np.ndarray:
        """float32 [R,cubes,4] RGBA."""
        rgba: np.ndarray = self._rgba[memory["colour"]]
        return rgba


def place_cubes(qpos: np.ndarray, cubes: int, rng: np.random.Generator) -> None:
    """Write resting cube poses into ``qpos`` [nq], their centres at least ``SPACING`` apart."""
    while True:
        xy = rng.uniform(-SPREAD, SPREAD, (cubes, 2))
        gaps = np.linalg.norm(xy[:, None] - xy[None], axis=-1) + np.eye(cubes)
        if gaps.min() >= SPACING:
            break
    yaw = rng.uniform(-YAW, YAW, cubes) / 2
    for i, start in enumerate(cube_addresses(cubes)):
        qpos[start : start + 7] = [*xy[i], CUBE_EDGE / 2, np.cos(yaw[i]), 0.0, 0.0, np.sin(yaw[i])]


def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The lift environment.

    Options of the task: ``cubes`` 2-4 (3), ``colours`` 4-6 (4), ``instruct`` "target" or "distractor", ``deadline``
    control steps after which an unfinished episode has failed (none).  Options of the
    environment: ``cameras`` out of "front", "side", "top" (("front",)), ``image_size`` pixels (64), ``threads`` (2),
    ``render`` (True).
    """
    of_task, of_env = ("cubes", "colours", "instruct", "deadline"), ("cameras", "image_size", "threads", "render")
    check_options(options, of_task + of_env, "lift")
    task = LiftTask(**{name: value for name, value in options.items() if name in of_task})
    return MujocoEnv(task, num_envs, **{name: value for name, value in options.items() if name in of_env})
