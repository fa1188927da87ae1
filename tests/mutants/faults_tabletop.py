"""Faults in place, push and their mixture."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PLACE, _PUSH, _MIXED = (f"sims/mujoco/tasks/{name}.py" for name in ("place", "push", "mixed"))
_ON = "tests/sims/test_tabletop.py::"

FAULTS = (
    Fault(
        "a cube that is still held is placed",
        _PLACE,
        "near & (let_go & (named[:, 2] <= RESTING))[:, None]",
        "near & (named[:, 2] <= RESTING)[:, None]",
        (f"{_ON}test_what_is_not_placed",),
    ),
    Fault(
        "a cube in the air is placed",
        _PLACE,
        "near & (let_go & (named[:, 2] <= RESTING))[:, None]",
        "near & let_go[:, None]",
        (f"{_ON}test_what_is_not_placed",),
    ),
    Fault(
        "any plate will do",
        _PLACE,
        'success = pick(long_enough, task_state["plate"])',
        "success = xp.any(long_enough, axis=1)",
        (f"{_ON}test_another_plate_or_another_cube_is_a_failure",),
    ),
    Fault(
        "lifting the named cube is a failure",
        _PLACE,
        'count(self._cubes, qpos) != task_state["named"][:, None]',
        'count(self._cubes, qpos) >= task_state["named"][:, None] - 9',
        (f"{_ON}test_lifting_the_other_cube_is_a_failure_and_the_named_one_is_not",),
    ),
    Fault(
        "the instruction names the plate's colour twice",
        _PLACE,
        "colour * len(self._names) + mark",
        "mark * len(self._names) + mark",
        (f"{_ON}test_an_instruction_names_what_is_to_be_done",),
    ),
    Fault(
        "a cube that flies over the target has been pushed there",
        _PUSH,
        "count_consecutive(near & (cube[:, 2] <= RESTING), ",
        "count_consecutive(near, ",
        (f"{_ON}test_a_cube_above_the_target_has_not_been_pushed_there",),
    ),
    Fault(
        "pushing may lift",
        _PUSH,
        "(cube[:, 2] >= LIFT_HEIGHT, 0)",
        "(cube[:, 2] >= LIFT_HEIGHT, -1)",
        (f"{_ON}test_pushing_is_not_lifting",),
    ),
    Fault(
        "every task has the longest task's time",
        _MIXED,
        "limits |= deadlines or {}",
        "limits = dict.fromkeys(limits, 80) | dict(deadlines or {})",
        (f"{_ON}test_a_mixture_plays_every_task_by_its_own_rules",),
    ),
    Fault(
        "causes of failure are mixed up",
        _MIXED,
        "cause.beside(qpos)[xp.astype(result.failure, xp.int64)]",
        "result.failure",
        (f"{_ON}test_a_mixture_is_the_task_it_plays",),
    ),
    Fault(
        "a constant of the rules stays on the host",
        "sims/mujoco/arrays.py",
        "if isinstance(array, np.ndarray):",
        "if array is not None:",
        ("tests/sims/test_arrays.py::test_tools_of_rules",),
    ),
    Fault(
        "the last case that holds counts",
        "sims/mujoco/arrays.py",
        "in reversed(cases):",
        "in cases:",
        ("tests/sims/test_arrays.py::test_tools_of_rules",),
    ),
    Fault(
        "the goal is where the cube is",
        "sims/mujoco/tasks/scenes.py",
        'extras["privileged/target"], extras["privileged/goal"]],',
        'extras["privileged/target"], extras["privileged/target"]],',
        (f"{_ON}test_labelled_scenes_point_at_the_named_cube_and_its_goal",),
    ),
)
