"""Faults in a fleet's learner that only show when it is killed: an episode is learnt from twice, or not at all."""

from __future__ import annotations

from tests.mutants.fault import Fault

_LEARNING, _ON = "vla_rl/recipes/fleet/learning.py", "tests/recipes/fleet/test_learning.py::"
_KILLED = (
    "tests/fleet/test_faults.py::test_whoever_is_killed_comes_back_and_all_is_stored_and_learnt_from_once_and_in_order",
)

FAULTS = (
    Fault(
        "a killed learner forgets which episodes its state has",
        _LEARNING,
        "self._known.get(position) == _name(record)",
        "False",
        (f"{_ON}test_what_was_learnt_from_is_passed_over_after_a_kill_and_the_rest_is_not",),
    ),
    Fault(
        "a state holds the last episode and says that it does not",
        _LEARNING,
        "        if ends:",
        "        if episode is None:",
        (f"{_ON}test_what_was_learnt_from_is_passed_over_after_a_kill_and_the_rest_is_not",),
    ),
    Fault(
        "the last record is learnt twice after a restart",
        _LEARNING,
        "position <= self._passing",
        "position < self._passing",
        (f"{_ON}test_a_state_of_before_is_known_by_its_position",),
    ),
    Fault(
        "new episodes of a ledger that was set back are skipped up to where the state was",
        _LEARNING,
        "position <= self._passing",
        "position <= max(self._known, default=0)",
        (f"{_ON}test_new_episodes_of_a_ledger_that_was_set_back_to_a_copy_are_learnt_from",),
    ),
    Fault(
        "the steps of an episode that a state is in the middle of are not kept when they are passed over",
        "vla_rl/fleet/episodes.py",
        "if one := self._taken(record):",
        "if one := self._open.get(record.robot):",
        _KILLED,
    ),
    Fault(
        "a full disk ends the learner",
        _LEARNING,
        "except (OSError, UserError) as error:",
        "except () as error:",
        (f"{_ON}test_a_full_disk_keeps_a_version_back_until_there_is_room_and_ends_nothing",),
    ),
    Fault(
        "the last save of a learner on a full disk is a traceback",
        _LEARNING,
        "    learning.end()",
        "    learning.save()",
        (f"{_ON}test_a_disk_that_takes_no_state_is_an_alarm_and_the_last_good_one_stays",),
    ),
    Fault(
        "a state that could not be saved is not tried again",
        _LEARNING,
        "if self._saved < self.published:",
        "if False:",
        (f"{_ON}test_a_disk_that_takes_no_state_is_an_alarm_and_the_last_good_one_stays",),
    ),
    Fault(
        "a learner that goes back to its last state needs room for metrics that do not change",
        "vla_rl/training/tracking.py",
        'if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != kept:',
        "if True:",
        (f"{_ON}test_a_disk_that_takes_no_state_is_an_alarm_and_the_last_good_one_stays",),
    ),
)
