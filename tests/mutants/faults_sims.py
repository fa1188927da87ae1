"""Faults in simulators."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _LIFT, _ROWS = "sims/mujoco/env.py", "sims/mujoco/tasks/lift.py", "vla_rl/contract/rows.py"
_TABLETOP = "sims/mujoco/tabletop.py"

_ON_SIMS = "tests/sims/test_conformance.py::"
_ON_LIFT = "tests/sims/test_lift.py::"
_CONFORMS = f"{_ON_SIMS}test_declared_equals_delivered"
_FRESH = "tests/sims/test_fresh_rows.py::test_a_reset_leaves_nothing_of_the_last_episode"

FAULTS = (
    Fault(
        "success takes one held step more",
        _LIFT,
        "long_enough, named = held >= HOLD_STEPS",
        "long_enough, named = held > HOLD_STEPS",
        (f"{_ON_LIFT}test_success_takes_five_held_steps_in_a_row",),
    ),
    Fault(
        "steps held before a fall still count",
        _TABLETOP,
        "xp.where(condition, before + 1, xp.zeros_like(before))",
        "xp.where(condition, before + 1, before)",
        (f"{_ON_LIFT}test_success_takes_five_held_steps_in_a_row",),
    ),
    Fault(
        "success at the time limit is a truncation",
        _ENV,
        "np.where(success, SUCCESS, cause))",
        "np.where(success & (cause == 0), SUCCESS, cause))",
        (f"{_ON_LIFT}test_success_at_the_time_limit_is_terminated_and_one_step_later_it_is_too_late",),
    ),
    Fault(
        "the time limit terminates",
        _ROWS,
        "(cause == TIME_LIMIT) | (cause == DIVERGED)",
        "(cause == DIVERGED)",
        ("tests/sims/test_toy.py::test_a_lazy_point_mass_is_truncated",),
    ),
    Fault(
        "a snapshot without the physics",
        _ENV,
        'own = {"physics": self._batch.state, "parameters"',
        'own = {"physics": self._batch.state.copy(), "parameters"',
        (f"{_CONFORMS}[lift]",),
    ),
    Fault(
        "a snapshot without the task's state",
        _ENV,
        'return own | {f"task_state/{name}": value for name',
        'return own | {f"task_state/{name}": value.copy() for name',
        (f"{_ON_LIFT}test_restore_continues_bit_for_bit_in_any_row_with_the_cube_in_the_fingers",),
    ),
    Fault(
        "pictures are overwritten later",
        _ENV,
        "{name: image.copy() for name, image in self._images.items()}",
        "{name: image for name, image in self._images.items()}",
        (f"{_ON_SIMS}test_observations_are_not_overwritten_later",),
    ),
    Fault(
        "clocks are overwritten later",
        _ENV,
        "self._book.time.copy(),",
        "self._book.time,",
        (f"{_ON_SIMS}test_observations_are_not_overwritten_later",),
    ),
    Fault(
        "idle rows are moved",
        _ENV,
        "moved = np.flatnonzero(~self._book.done)",
        "moved = np.arange(num_envs)",
        (_CONFORMS,),
    ),
    Fault(
        "actions after the end inside a chunk are executed",
        _ENV,
        "active = active[~self._book.done[active]]",
        "active = active[:]",
        (f"{_ON_LIFT}test_rows_end_inside_a_chunk_and_then_idle",),
    ),
    Fault(
        "an episode depends on its environment",
        _ENV,
        "np.random.PCG64(int(value))",
        "np.random.PCG64(int(value) + int(env_id))",
        (f"{_CONFORMS}[lift]",),
    ),
    Fault(
        "the warm start of the last episode remains",
        _ENV,
        "self._batch.state[env_id] = self._blank",
        "n = 1 + self._task.model.nq + self._task.model.nv; self._batch.state[env_id, :n] = self._blank[:n]",
        (_FRESH,),
    ),
    Fault(
        "equalities are switched off at reset",
        _ENV,
        "self._batch.state[env_id] = self._blank",
        "self._batch.state[env_id] = 0.0",
        (_FRESH,),
    ),
    Fault(
        "actions beyond the bounds are executed",
        _ROWS,
        "clipped: np.ndarray = np.minimum(np.maximum(action, low), high)",
        "clipped: np.ndarray = np.maximum(action, low)",
        (f"{_ON_LIFT}test_actions_are_clipped_and_the_gripper_goes_where_it_is_sent",),
    ),
    Fault(
        "a NaN is executed as zero",
        _ROWS,
        "self._require_idle(~finite, action)",
        "pass",
        (f"{_ON_SIMS}test_a_nan_names_row_action_and_step_and_only_counts_in_active_rows",),
    ),
    Fault(
        "rewards after the end of a counted episode",
        _ROWS,
        "active = np.flatnonzero(~self.done)",
        "active = np.arange(self.num_envs)",
        (f"{_CONFORMS}[counting]",),
    ),
)
