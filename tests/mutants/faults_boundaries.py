"""Faults of boundaries, snapshots and renewal in imagination, and of its measured precision."""

from __future__ import annotations

from tests.mutants.fault import Fault

FAULTS = (
    Fault(
        "a snapshot forgets the initial states",
        "world_models/env.py",
        'arrays |= {f"initial/{name}": item for name, item in self._initial.items()}',
        "pass",
        (
            "tests/world_models/test_env_limits.py::test_a_restored_rollout_is_resampled_from_its_own_beginning_with_its_own_actions",
        ),
    ),
    Fault(
        "a snapshot forgets the actions",
        "world_models/env.py",
        '(*call, *shown, "action_history")',
        "(*call, *shown)",
        (
            "tests/world_models/test_env_limits.py::test_a_restored_rollout_is_resampled_from_its_own_beginning_with_its_own_actions",
        ),
    ),
    Fault(
        "a later success confirms",
        "world_models/env.py",
        "self._book.success & (self._age(np.arange(self.num_envs)) <= length)",
        "self._book.success.copy()",
        ("tests/world_models/test_env_limits.py::test_a_success_that_resampling_reaches_later_does_not_count",),
    ),
    Fault(
        "a renewed environment resamples with its own noise",
        "world_models/env.py",
        "config = replace(self.config, success_threshold=config.success_threshold, horizon=config.horizon)",
        "config = replace(config)",
        ("tests/world_models/test_env_limits.py::test_a_renewed_environment_resamples_with_the_noise_that_it_had",),
    ),
    Fault(
        "a renewed environment keeps a shorter horizon than is reported",
        "world_models/env.py",
        "config = replace(self.config, success_threshold=config.success_threshold, horizon=config.horizon)",
        "config = replace(\n"
        "            self.config,\n"
        "            success_threshold=config.success_threshold,\n"
        "            horizon=min(config.horizon, self.config.horizon),\n"
        "        )",
        ("tests/world_models/test_env_limits.py::test_a_renewed_environment_plays_the_horizon_that_it_is_given",),
    ),
    Fault(
        "a snapshot fits the horizon that it was made with alone",
        "world_models/env.py",
        "history = np.zeros((num_envs, self.config.reach, model.spec.action_dim), np.float32)",
        "history = np.zeros((num_envs, self.config.horizon, model.spec.action_dim), np.float32)",
        (
            "tests/world_models/test_env_limits.py::test_a_snapshot_of_a_renewed_environment_fits_one_that_was_made_with_the_new_horizon",
        ),
    ),
    Fault(
        "environments of a calibrated world model may not grow to the plan's horizon",
        "vla_rl/recipes/imagine/calibrated_model.py",
        "horizon=horizon, longest=imagination.reach)",
        "horizon=horizon)",
        ("tests/recipes/imagine/test_run_episodes.py::test_the_trusted_horizon_may_grow_to_that_of_the_plan",),
    ),
    Fault(
        "uncertainty at its limit truncates",
        "world_models/env.py",
        "self._uncertainty[env_ids] > self.limits",
        "self._uncertainty[env_ids] >= self.limits",
        ("tests/world_models/test_env_limits.py::test_an_uncertainty_that_equals_its_limit_ends_nothing",),
    ),
    Fault(
        "success must exceed its threshold",
        "world_models/env.py",
        "outcome[:, 0] >= config.success_threshold",
        "outcome[:, 0] > config.success_threshold",
        (
            "tests/world_models/test_env_limits.py::test_of_two_reasons_to_end_at_once_success_counts_first_then_failure_then_time",
        ),
    ),
    Fault(
        "failure must exceed its threshold",
        "world_models/env.py",
        "outcome[:, 1] >= config.failure_threshold",
        "outcome[:, 1] > config.failure_threshold",
        (
            "tests/world_models/test_env_limits.py::test_of_two_reasons_to_end_at_once_success_counts_first_then_failure_then_time",
        ),
    ),
    Fault(
        "failure at the horizon is a truncation",
        "world_models/env.py",
        "cause = np.where(failed, _FAILED, cause)",
        "cause = np.where(failed & (cause == 0), _FAILED, cause)",
        (
            "tests/world_models/test_env_limits.py::test_of_two_reasons_to_end_at_once_success_counts_first_then_failure_then_time",
        ),
    ),
    Fault(
        "success at the deadline has the deadline's cause",
        "world_models/env.py",
        "cause = np.where(success, SUCCESS, cause)",
        "cause = np.where(success & (cause == 0), SUCCESS, cause)",
        (
            "tests/world_models/test_env_limits.py::test_of_two_reasons_to_end_at_once_success_counts_first_then_failure_then_time",
        ),
    ),
    Fault(
        "bought episodes are sorted by name",
        "vla_rl/recipes/imagine/run_episodes.py",
        'key=lambda path: int(path.stem.partition("-")[2])',
        "key=lambda path: path.stem",
        ("tests/recipes/imagine/test_run_episodes.py::test_bought_episodes_are_read_in_the_order_of_their_purchase",),
    ),
    Fault(
        "the latest episodes are the first",
        "vla_rl/recipes/imagine/run_episodes.py",
        "np.arange(max(0, self.learnt.count - count), self.learnt.count)",
        "np.arange(min(count, self.learnt.count))",
        ("tests/recipes/imagine/test_run_episodes.py::test_bought_episodes_are_read_in_the_order_of_their_purchase",),
    ),
    Fault(
        "environments in use keep the old limits",
        "vla_rl/recipes/imagine/imagined_env.py",
        "for env in self._made:",
        "for env in ():",
        ("tests/recipes/imagine/test_run_episodes.py::test_every_environment_that_is_in_use_is_renewed",),
    ),
    Fault(
        "the slower precision is chosen",
        "vla_rl/training/precision.py",
        'seconds["bfloat16"] < seconds["float32"]',
        'seconds["bfloat16"] > seconds["float32"]',
        ("tests/training/test_precision.py::test_the_faster_precision_is_chosen_and_the_first_run_does_not_count",),
    ),
    Fault(
        "the first run of a precision counts",
        "vla_rl/training/precision.py",
        "if runs else best",
        "if True else best",
        ("tests/training/test_precision.py::test_the_faster_precision_is_chosen_and_the_first_run_does_not_count",),
    ),
    Fault(
        "a resumed run measures its precision again",
        "vla_rl/recipes/imagine/train_model.py",
        "if not kept.exists():",
        "if True:",
        ("tests/training/test_precision.py::test_a_resumed_run_keeps_the_precision_that_was_measured",),
    ),
)
