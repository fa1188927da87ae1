"""Faults in environments, the contract and the evaluation."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STATS, _RUN = "vla_rl/evaluation/stats.py", "vla_rl/evaluation/run.py"
_ENV, _LIFT, _ROWS = "sims/mujoco/env.py", "sims/mujoco/tasks/lift.py", "vla_rl/contract/rows.py"
_TABLETOP = "sims/mujoco/tabletop.py"

_ON_STATS = "tests/evaluation/test_stats.py::"
_ON_RUN = "tests/evaluation/test_run.py::"
_ON_SIMS = "tests/sims/test_conformance.py::"
_ON_LIFT = "tests/sims/test_lift.py::"
_CONFORMS = f"{_ON_SIMS}test_declared_equals_delivered"
_FRESH = "tests/sims/test_fresh_rows.py::test_a_reset_leaves_nothing_of_the_last_episode"

_WORLDS = (
    Fault(
        "success takes one held step more",
        _LIFT,
        "long_enough = held >= HOLD_STEPS",
        "long_enough = held > HOLD_STEPS",
        (f"{_ON_LIFT}test_success_takes_five_held_steps_in_a_row",),
    ),
    Fault(
        "steps held before a fall still count",
        _TABLETOP,
        "np.where(so, before + 1, 0)",
        "np.where(so, before + 1, before)",
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
        'own = {"physics": self._batch.state, **self._book.arrays()}',
        'own = {"physics": self._batch.state.copy(), **self._book.arrays()}',
        (f"{_CONFORMS}[lift]",),
    ),
    Fault(
        "a snapshot without the task's task_state",
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
        "idle rows are moved", _ENV, "moved = np.flatnonzero(~self._book.done)", "moved = np.arange(rows)", (_CONFORMS,)
    ),
    Fault(
        "actions after the end inside a chunk are executed",
        _ENV,
        "active = active[~self._book.done[active]]",
        "active = active[:]",
        (f"{_ON_LIFT}test_rows_end_inside_a_chunk_and_then_idle",),
    ),
    Fault(
        "an episode depends on its row",
        _ENV,
        "np.random.PCG64(int(value))",
        "np.random.PCG64(int(value) + int(row))",
        (f"{_CONFORMS}[lift]",),
    ),
    Fault(
        "the warm start of the last episode remains",
        _ENV,
        "self._batch.state[row] = self._blank",
        "n = 1 + self._task.model.nq + self._task.model.nv; self._batch.state[row, :n] = self._blank[:n]",
        (_FRESH,),
    ),
    Fault(
        "equalities are switched off at reset",
        _ENV,
        "self._batch.state[row] = self._blank",
        "self._batch.state[row] = 0.0",
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
        "sims/numpy_env.py",
        "active = np.flatnonzero(~self._book.done)",
        "active = np.arange(self.num_envs)",
        (f"{_CONFORMS}[counting]",),
    ),
)

_EVALUATION = (
    Fault("90 % for 95 %", _STATS, "Z95 = 1.959964", "Z95 = 1.644854", (f"{_ON_STATS}test_wilson",)),
    Fault(
        "Wilson's half-width without its correction",
        _STATS,
        "z**2 / (4 * n**2)) / scale",
        "0.0) / scale",
        (f"{_ON_STATS}test_wilson",),
    ),
    Fault(
        "McNemar's test one-sided",
        _STATS,
        "float(2 * tail / 2 ** (b + c))",
        "float(tail / 2 ** (b + c))",
        (f"{_ON_STATS}test_mcnemar",),
    ),
    Fault(
        "strata weighed alike",
        _STATS,
        "total += np.fromiter((members[draw].sum() for draw in draws)",
        "total += np.fromiter((members[draw].mean() for draw in draws)",
        (f"{_ON_STATS}test_paired_bootstrap",),
    ),
    Fault(
        "ties charged to both policies",
        _STATS,
        "(s[:, None] > s[None, :]) !=",
        "(s[:, None] >= s[None, :]) !=",
        (f"{_ON_STATS}test_mmrv",),
    ),
    Fault(
        "an episode is booked on the wrong seed",
        _RUN,
        "self.success[self.playing[row]] = bool(step.success[row])",
        "self.success[row % len(self.seeds)] = bool(step.success[row])",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_told_truly",),
    ),
    Fault(
        "rows without a seed play on",
        _RUN,
        "np.flatnonzero(on_host(step.done) & active)",
        "np.flatnonzero(on_host(step.done))",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_told_truly",),
    ),
    Fault(
        "lengths count chunks as if whole",
        _RUN,
        "return on_host(per_action).sum(1)",
        "return on_host(per_action).any(1) * on_host(per_action).shape[1]",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_told_truly",),
    ),
    Fault(
        "the view is not applied",
        "vla_rl/experience/driver.py",
        "encode_observation(self.policy, self.view(obs), state, self.generator)",
        "encode_observation(self.policy, obs, state, self.generator)",
        (f"{_ON_RUN}test_the_view_is_what_the_policy_sees",),
    ),
    Fault(
        "the policy's state outlives the episode",
        "vla_rl/experience/driver.py",
        "self.policy.reset_state(self.state, env_ids)",
        "self.policy.reset_state(self.state, env_ids[:0])",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_told_truly",),
    ),
    Fault(
        "validation seeds run into test seeds",
        "vla_rl/evaluation/suite.py",
        "range(1_000_000_000, 1_100_000_000)",
        "range(1_000_000_000, 1_100_000_001)",
        ("tests/evaluation/test_suite.py::test_the_three_ranges_are_disjoint",),
    ),
    Fault(
        "runs share training seeds",
        "vla_rl/evaluation/suite.py",
        "start = run_seed * _BLOCK + _PURPOSES[purpose]",
        "start = run_seed * 100 + _PURPOSES[purpose]",
        ("tests/evaluation/test_suite.py::test_every_run_and_purpose_has_training_seeds_of_its_own",),
    ),
)

_CONTRACT = (
    Fault(
        "a nested config stays a dict",
        "vla_rl/contract/config.py",
        "fields = {key: from_json(item) for key, item in value.items()",
        "fields = {key: item for key, item in value.items()",
        ("tests/policies/test_flow.py::test_samplers_are_configs",),
    ),
    Fault(
        "a spec comes back with lists",
        "vla_rl/contract/spec.py",
        'fields |= {key: tuple(data[key]) for key in ("shape", "names") if key in data}',
        'fields |= {key: data[key] for key in ("shape", "names") if key in data}',
        (f"{_ON_SIMS}test_spec_survives_json",),
    ),
)

FAULTS = (*_WORLDS, *_EVALUATION, *_CONTRACT)
