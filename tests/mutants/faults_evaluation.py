"""Faults in the evaluation of policies: statistics, played seeds, ranges of seeds."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STATS, _RUN = "vla_rl/evaluation/stats.py", "vla_rl/evaluation/run.py"
_INTERVALS, _ON_INTERVALS = "vla_rl/contract/intervals.py", "tests/contract/test_intervals.py::"
_ON_STATS, _ON_RUN = "tests/evaluation/test_stats.py::", "tests/evaluation/test_run.py::"

FAULTS = (
    Fault(
        "the paired interval forgets that a difference squared is no variance",
        _INTERVALS,
        "2.0 * rate + d * (1.0 - d)",
        "2.0 * rate + d",
        (f"{_ON_INTERVALS}test_the_paired_difference_by_hand",),
    ),
    Fault(
        "few returns have the interval of many",
        _STATS,
        "if n < FEWEST or not freedom:",
        "if n < 2 or not freedom:",
        (f"{_ON_STATS}test_few_returns_have_no_interval",),
    ),
    Fault(
        "paired successes are resampled",
        _STATS,
        "if np.isin([first, second], (0.0, 1.0)).all():",
        "if False:",
        (f"{_ON_STATS}test_the_paired_interval_of_successes_is_a_score_interval",),
    ),
    Fault("90 % for 95 %", _INTERVALS, "Z95 = 1.959964", "Z95 = 1.644854", (f"{_ON_INTERVALS}test_wilson",)),
    Fault(
        "Wilson's interval is not corrected for continuity",
        _INTERVALS,
        "return end(successes - 0.5, -1) if successes else 0.0, end(successes + 0.5, 1)",
        "return end(successes, -1) if successes else 0.0, end(successes, 1)",
        (f"{_ON_INTERVALS}test_wilson_and_poisson_cover_95_percent_of_every_rate",),
    ),
    Fault(
        "the interval of a mean return forgets skewness",
        _STATS,
        "deviation * max(half, hall(half))",
        "deviation * half",
        (f"{_ON_STATS}test_mean_return",),
    ),
    Fault(
        "a perfect line of policies is certain",
        "vla_rl/evaluation/agreement.py",
        "and abs(r) < 1.0 - 1e-9 else (-1.0, 1.0)",
        "and abs(r) < 1.0 - 1e-9 else (r, r)",
        ("tests/evaluation/test_agreement.py::test_rates_exactly_on_a_line",),
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
        "index=index,",
        "index=int(env_id) % len(self.seeds),",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_reported_correctly",),
    ),
    Fault(
        "rows without a seed play on",
        _RUN,
        "np.flatnonzero(step.done & active)",
        "np.flatnonzero(step.done)",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_reported_correctly",),
    ),
    Fault(
        "lengths count chunks as if whole",
        _RUN,
        "step.valid.sum(1)[active]",
        "step.valid.any(1)[active] * step.valid.shape[1]",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_reported_correctly",),
    ),
    Fault(
        "a broken simulator is a failure of the policy",
        _RUN,
        "if decision.step.cause[env_id] == WORKER:",
        "if not decision.step.cause[env_id]:",
        (f"{_ON_RUN}test_an_episode_whose_simulator_broke_down_is_played_again",),
    ),
    Fault(
        "the actions before a breakdown count",
        _RUN,
        "self.length[env_id], self.rewards[env_id] = 0, []",
        "self.length[env_id], self.rewards[env_id] = self.length[env_id] * (self.attempts.sum() > 0), []",
        (f"{_ON_RUN}test_an_episode_whose_simulator_broke_down_is_played_again",),
    ),
    Fault(
        "a simulator that breaks down at a seed is asked for ever",
        _RUN,
        "if self.attempts[index] == ATTEMPTS:",
        "if self.attempts[index] == 20 * ATTEMPTS:",
        (f"{_ON_RUN}test_a_seed_that_always_breaks_its_simulator_is_named",),
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
        (f"{_ON_RUN}test_every_seed_is_played_once_and_reported_correctly",),
    ),
    Fault(
        "validation seeds run into test seeds",
        "vla_rl/evaluation/seed_ranges.py",
        "range(1_000_000_000, 1_100_000_000)",
        "range(1_000_000_000, 1_100_000_001)",
        ("tests/evaluation/test_seed_ranges.py::test_the_three_ranges_are_disjoint",),
    ),
    Fault(
        "runs share training seeds",
        "vla_rl/evaluation/seed_ranges.py",
        "start = run_seed * _BLOCK + _PURPOSES[purpose]",
        "start = run_seed * 100 + _PURPOSES[purpose]",
        ("tests/evaluation/test_seed_ranges.py::test_every_run_and_purpose_has_training_seeds_of_its_own",),
    ),
)
