"""Faults in how other libraries' PPO is measured beside ours, and in what made ours as fast."""

from __future__ import annotations

from tests.mutants.fault import Fault

_MAIN, _RACE = "tests/benchmarks/peers/__main__.py", "tests/benchmarks/peers/race.py"
_REPORT, _PLAIN = "tests/benchmarks/peers/report.py", "tests/benchmarks/peers/plain_ppo.py"
_ON = "tests/test_peers.py::"

FAULTS = (
    Fault(
        "every network is of tanh",
        "vla_rl/policies/observations.py",
        'nn.Tanh if activation == "tanh" else nn.ELU',
        "nn.Tanh",
        (
            "tests/policies/test_gaussian.py::test_hidden_layers_of_policy_and_critic_have_the_activation_that_is_asked_for",
        ),
    ),
    Fault(
        "a critic keeps tanh whatever is asked for",
        "vla_rl/policies/critics.py",
        "hidden_layers(size, width, depth, activation)",
        "hidden_layers(size, width, depth)",
        (
            "tests/policies/test_gaussian.py::test_hidden_layers_of_policy_and_critic_have_the_activation_that_is_asked_for",
        ),
    ),
    Fault(
        "a cell that is there is measured again",
        _MAIN,
        "missing = [peer for peer in peers if (task.name, peer, seed) not in there]",
        "missing = list(peers)",
        (f"{_ON}test_a_cell_is_measured_once_and_written_at_once",),
    ),
    Fault(
        "a row is written before its learner has ended",
        _MAIN,
        "if task.ends(row):",
        "if row.steps:",
        (f"{_ON}test_a_cell_is_measured_once_and_written_at_once",),
    ),
    Fault(
        "a ratio's interval takes its two sides for independent",
        _REPORT,
        "product = x * x - t * xx, x * y - t * xy",
        "product = x * x - t * xx, x * y",
        (f"{_ON}test_a_ratio_is_that_of_sums_over_pairs",),
    ),
    Fault(
        "only the last turn is timed",
        _RACE,
        "spent = self.seconds + seconds,",
        "spent = seconds,",
        (f"{_ON}test_turns_add_up_until_the_goal",),
    ),
    Fault(
        "advantages go on after an episode's end",
        _PLAIN,
        "ahead = delta[t] + decay * (1 - ended[t]) * ahead",
        "ahead = delta[t] + decay * ahead",
        (f"{_ON}test_plain_ppo_sums_what_follows_and_stops_at_an_end",),
    ),
    Fault(
        "moments forget how far apart batches are",
        _PLAIN,
        "(squares + gap**2 * self.count * len(batch) / total) / total",
        "squares / total",
        (f"{_ON}test_moments_are_those_of_all_batches",),
    ),
)
