"""Faults in what a fleet's learner draws."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SAMPLER, _ON = "vla_rl/fleet/sampler.py", "tests/fleet/test_sampler.py::"
_STRATA, _ON_STRATA = "vla_rl/experience/strata.py", "tests/experience/test_strata.py::"

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
    Fault(
        "a batch of strata has decisions of another one",
        _STRATA,
        "drawn = drawn[np.lexsort((drawn[:, 0], drawn[:, 1] == _RECORDED))]  # by replay buffer",
        "drawn = drawn",
        (f"{_ON_STRATA}test_every_decision_drawn_is_of_its_task_and_stratum_and_none_is_left_out",),
    ),
    Fault(
        "corrections grow too old to be drawn",
        _STRATA,
        "slots = slots[person | (",
        "slots = slots[(",
        (f"{_ON_STRATA}test_autonomous_decisions_that_are_too_old_are_not_drawn_and_corrections_are",),
    ),
    Fault(
        "the oldest age allowed is too old",
        _STRATA,
        'columns["version"][slots] <= self.max_age',
        'columns["version"][slots] < self.max_age',
        (f"{_ON_STRATA}test_autonomous_decisions_that_are_too_old_are_not_drawn_and_corrections_are",),
    ),
    Fault(
        "the first decision of a stratum is drawn only",
        _STRATA,
        "first + np.floor(share * (last - first)).astype(np.int64)",
        "first",
        (f"{_ON_STRATA}test_every_decision_drawn_is_of_its_task_and_stratum_and_none_is_left_out",),
    ),
    Fault(
        "a resumed replay has forgotten what is learnt",
        _STRATA,
        'self.sampler.load_state_dict(state["sampler"])',
        "pass",
        (f"{_ON_STRATA}test_a_saved_one_draws_the_same",),
    ),
    Fault(
        "a replay is told the loss of the mean critic",
        "vla_rl/algorithms/off_policy.py",
        "errors.detach().mean(0)",
        "errors.detach().amax(0)",
        ("tests/algorithms/test_off_policy.py::test_a_replay_that_asks_is_told_the_loss_of_every_decision",),
    ),
    Fault(
        "corrections have no share",
        "vla_rl/recipes/off_policy.py",
        "        if self.corrections:",
        "        if False:",
        (
            "tests/recipes/test_replay_shares.py::test_corrections_have_a_share_of_their_own_besides_being_drawn_with_the_others",
        ),
    ),
)
