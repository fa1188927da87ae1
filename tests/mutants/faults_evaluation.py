"""Faults in the evaluation of policies: statistics, played seeds, ranges of seeds."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STATS, _RUN = "vla_rl/evaluation/stats.py", "vla_rl/evaluation/run.py"
_ON_STATS, _ON_RUN = "tests/evaluation/test_stats.py::", "tests/evaluation/test_run.py::"

FAULTS = (
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
        "self.success[self.playing[env_id]] = bool(step.success[env_id])",
        "self.success[env_id % len(self.seeds)] = bool(step.success[env_id])",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_reported_correctly",),
    ),
    Fault(
        "rows without a seed play on",
        _RUN,
        "np.flatnonzero(on_host(step.done) & active)",
        "np.flatnonzero(on_host(step.done))",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_reported_correctly",),
    ),
    Fault(
        "lengths count chunks as if whole",
        _RUN,
        "return on_host(per_action).sum(1)",
        "return on_host(per_action).any(1) * on_host(per_action).shape[1]",
        (f"{_ON_RUN}test_every_seed_is_played_once_and_reported_correctly",),
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
