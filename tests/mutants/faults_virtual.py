"""Faults in a fleet in virtual time."""

from __future__ import annotations

from tests.mutants.fault import Fault

_VIRTUAL, _TIMELINE = (f"vla_rl/recipes/fleet/{name}.py" for name in ("virtual", "timeline"))
_ON = "tests/recipes/fleet/test_virtual.py::"
_STEPS = f"{_ON}test_gradient_steps_are_a_fixed_number_per_second_and_learn_from_what_has_arrived"
_LINK = f"{_ON}test_episodes_of_a_robot_without_a_link_arrive_once_when_it_is_back_and_it_keeps_its_policy"

FAULTS = (
    Fault(
        "an episode is learnt from before it has arrived",
        _VIRTUAL,
        "self.catch_up()  # without it",
        "pass  # without it",
        (f"{_ON}test_a_step_learns_from_what_arrived_before_it",),
    ),
    Fault(
        "more robots make the learner faster",
        _VIRTUAL,
        "        self._due = due",
        "        self._due = 0 * due",
        (_STEPS,),
    ),
    Fault(
        "a robot takes a policy before it is downloaded",
        _VIRTUAL,
        "self.releases.by(now - micros(times.download))",
        "self.releases.by(now)",
        (f"{_ON}test_a_policy_is_published_every_interval_and_taken_after_its_download_between_two_episodes",),
    ),
    Fault(
        "a robot without a link takes new policies",
        _VIRTUAL,
        "if self.offline.over(now) == now:",
        "if self.offline.over(now) >= now:",
        (_LINK,),
    ),
    Fault(
        "a robot without a link uploads",
        _VIRTUAL,
        "self.offline.over(now) + micros(self.times.upload)",
        "now + micros(self.times.upload)",
        (_LINK,),
    ),
    Fault(
        "an episode that a robot broke in is uploaded",
        _VIRTUAL,
        "if breaks < end:",
        "if repaired < now:",
        (f"{_ON}test_a_robot_that_breaks_gives_nothing_and_loses_its_episode_alone",),
    ),
    Fault(
        "the steps of an intervention that was never executed are counted",
        _VIRTUAL,
        "(on_host(decision.step.intervened)[0] & valid & executed)",
        "(on_host(decision.step.intervened)[0] | valid & executed)",
        (f"{_ON}test_the_persons_share_is_counted_as_it_reaches_the_learner",),
    ),
    Fault(
        "what happens at the same moment happens in the order of adding",
        _TIMELINE,
        "(time, kind, self._added, event)",
        "(time, 0, self._added, event)",
        (f"{_ON}test_events_happen_in_the_order_of_their_time_then_their_kind_then_as_they_were_added",),
    ),
    Fault(
        "a demonstration's returns count from its end on only",
        "vla_rl/recipes/fleet/recorded.py",
        "for first in range(begin, min(begin + policy.horizon, end)):",
        "for first in range(begin, min(begin + 1, end)):",
        (
            "tests/recipes/fleet/test_simulate.py::"
            "test_every_step_of_a_demonstration_begins_a_decision_whose_return_counts_what_is_left",
        ),
    ),
)
