"""Faults in RECAP: returns, advantages, indicators, its value and its conditioned policy."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RECAP, _POLICY = "vla_rl/algorithms/recap.py", "vla_rl/policies/advantage_conditioned.py"
_VALUE, _ON = "vla_rl/policies/distributional_value.py", "tests/algorithms/test_recap.py::"
_RETURNS = f"{_ON}test_returns_count_the_actions_to_the_end"
_ADVANTAGES = f"{_ON}test_advantages_by_hand"
_PERSON = f"{_ON}test_what_a_person_did_is_always_good_and_the_rest_of_the_chunk_is_not_imitated"
_GUIDED = f"{_ON}test_guidance_extrapolates_the_velocity"

_OUTCOMES = (
    Fault(
        "a success costs its last action", _RECAP, "(-(to_end - 1) / time_limit", "(-to_end / time_limit", (_RETURNS,)
    ),
    Fault(
        "returns count decisions",
        _RECAP,
        "to_end[t] = count[t] + carried",
        "to_end[t] = active[t].long() + carried",
        (_RETURNS,),
    ),
    Fault(
        "an episode takes over the outcome of the next one in its column",
        _RECAP,
        "torch.where(ends[t], rollout.success[t], success[later])",
        "rollout.success[t] | success[later]",
        (f"{_ON}test_episodes_in_one_column_do_not_mix",),
    ),
    Fault(
        "an episode that goes on is a failure",
        _RECAP,
        "(known[later] if later > t else False)",
        "(known[later] if later > t else True)",
        (f"{_ON}test_what_has_not_ended_or_broke_down_has_no_return",),
    ),
    Fault(
        "a breakdown is a failure",
        _RECAP,
        "known[t] = active[t] & (ends[t]",
        "known[t] = (ends[t]",
        (f"{_ON}test_what_has_not_ended_or_broke_down_has_no_return",),
    ),
    Fault(
        "an advantage looks beyond its episode",
        _RECAP,
        "ahead = self.remaining > lookahead",
        "ahead = self.remaining >= lookahead",
        (_ADVANTAGES,),
    ),
    Fault(
        "an advantage leaves out the time between", _RECAP, "(value[later] - between)", "(value[later])", (_ADVANTAGES,)
    ),
    Fault(
        "hopeless states have bad actions",
        _RECAP,
        "(value[later] - between).clamp(-1.0, 0.0)",
        "(value[later] - between)",
        (f"{_ON}test_what_cannot_succeed_any_more_has_no_advantage",),
    ),
)

_LABELS = (
    Fault(
        "the share of good decisions is that of bad ones",
        _RECAP,
        "1.0 - positive)",
        "positive)",
        (f"{_ON}test_the_golden_threshold_and_its_positives",),
    ),
    Fault(
        "a person raises the threshold of autonomous decisions",
        _RECAP,
        "advantage[own & autonomous]",
        "advantage[own]",
        (f"{_ON}test_every_task_has_its_own_threshold_of_autonomous_decisions",),
    ),
    Fault(
        "tasks share a threshold",
        _RECAP,
        "own = task == number",
        "own = task >= 0",
        (f"{_ON}test_every_task_has_its_own_threshold_of_autonomous_decisions",),
    ),
    Fault("corrections are judged as well", _RECAP, "good = outcomes.human | (", "good = (", (_PERSON,)),
    Fault(
        "what a policy did before a person took over counts as good",
        _RECAP,
        "torch.where(human.any(-1, keepdim=True), human, rollout.valid)",
        "rollout.valid",
        (_PERSON,),
    ),
    Fault(
        "corrections grow too old",
        _RECAP,
        "return outcomes.human | (age <= self.config.max_age)",
        "return age <= 0",
        (f"{_ON}test_too_old_decisions_of_policies_are_not_imitated_and_counted",),
    ),
)

_CONDITIONED = (
    Fault(
        "a return goes to the bin below",
        _VALUE,
        "1.0 - upper).scatter",
        "1.0 - 0 * upper).scatter",
        (f"{_ON}test_the_two_bins_of_a_return_are_the_golden_ones",),
    ),
    Fault(
        "guidance starts from the good field",
        _POLICY,
        "free.velocity + beta * (wanted.velocity - free.velocity)",
        "wanted.velocity + beta * (wanted.velocity - free.velocity)",
        (_GUIDED, f"{_ON}test_an_untrained_indicator_changes_nothing"),
    ),
    Fault(
        "guidance of 1 is none",
        _POLICY,
        "return good if beta else unknown",
        "return unknown if beta else good",
        (_GUIDED,),
    ),
    Fault(
        "demonstrations are imitated as anything",
        _POLICY,
        "features.get(INDICATOR, POSITIVE)",
        "features.get(INDICATOR, UNKNOWN)",
        (_GUIDED,),
    ),
    Fault(
        "the indicator does not reach the network",
        _POLICY,
        "condition + self.indicators.weight[indicator]",
        "condition",
        (f"{_ON}test_of_good_and_bad_actions_the_conditioned_policy_picks_the_good_ones",),
    ),
    Fault(
        "the indicator is never left out",
        _RECAP,
        "generator=self.generator) < config.dropout",
        "generator=self.generator) < 0.0",
        (f"{_ON}test_the_indicator_is_left_out_as_often_as_asked",),
    ),
    Fault(
        "a checkpoint leaves out the vectors",
        _POLICY,
        "load_weights(policy.indicators, Path(folder))",
        "pass",
        (f"{_ON}test_saved_and_loaded_it_decides_the_same",),
    ),
)

FAULTS = (*_OUTCOMES, *_LABELS, *_CONDITIONED)
