"""Faults in what a fleet's learner draws."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SAMPLER, _ON = "vla_rl/fleet/sampler.py", "tests/fleet/test_sampler.py::"

FAULTS = (
    Fault(
        "the factor of the online loss is left out",
        _SAMPLER,
        "sigmoid(self.config.a * online - offline)",
        "sigmoid(online - offline)",
        (f"{_ON}test_the_weight_by_hand",),
    ),
    Fault(
        "what is learnt already is drawn more often",
        _SAMPLER,
        "sigmoid(self.config.a * online - offline)",
        "sigmoid(offline - self.config.a * online)",
        (f"{_ON}test_it_grows_with_the_online_loss_within_its_bounds",),
    ),
    Fault(
        "the weight of online data is not bounded",
        _SAMPLER,
        "np.clip(sigmoid(self.config.a * online - offline), *self.config.bounds)",
        "sigmoid(self.config.a * online - offline)",
        (f"{_ON}test_it_grows_with_the_online_loss_within_its_bounds",),
    ),
    Fault(
        "exponentials of losses overflow",
        _SAMPLER,
        "0.5 * (1.0 + math.tanh(0.5 * x))",
        "math.exp(x) / (1.0 + math.exp(x))",
        (f"{_ON}test_losses_of_any_size_overflow_nothing",),
    ),
    Fault(
        "tasks are drawn as often as they have samples",
        _SAMPLER,
        "return found / has_data.sum()",
        "return found * counts.sum(1, keepdims=True) / counts.sum()",
        (f"{_ON}test_tasks_are_uniform_whatever_they_have",),
    ),
    Fault(
        "a cold start is not logged",
        _SAMPLER,
        "if not robots and task not in self._cold:",
        "if False:",
        (f"{_ON}test_a_task_without_data_of_robots_draws_what_was_recorded_and_says_so",),
    ),
    Fault(
        "corrections have no floor",
        _SAMPLER,
        "max(self.config.min_corrections, online * counts[CORRECTIONS] / robots)",
        "online * counts[CORRECTIONS] / robots",
        (f"{_ON}test_corrections_have_their_share_of_what_robots_did_but_at_least_the_floor",),
    ),
    Fault(
        "the windows are not saved",
        _SAMPLER,
        "deque(losses, maxlen=self.config.window)",
        "deque(maxlen=self.config.window)",
        (f"{_ON}test_saved_and_restored_it_goes_on_the_same",),
    ),
)
