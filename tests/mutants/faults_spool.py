"""Faults in the robot's spool."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STORE, _SPOOL = "vla_rl/fleet/spool_store.py", "vla_rl/fleet/spool.py"
_ON = "tests/fleet/test_spool.py::"

FAULTS = (
    Fault(
        "a correction is forgotten when autonomous steps follow",
        "vla_rl/fleet/spool_store.py",
        "last.last, last.size, last.kept = new.last, last.size + new.size, last.kept or new.kept",
        "last.last, last.size, last.kept = new.last, last.size + new.size, new.kept",
        (
            "tests/fleet/test_spool.py::"
            "test_a_correction_is_kept_wherever_in_its_episode_it_was_also_after_opening_again",
        ),
    ),
    Fault(
        "a spool that was opened again stores the rest of an episode that was given up",
        "vla_rl/fleet/spool.py",
        "store.go_on_from(self._store)",
        "pass",
        (
            "tests/fleet/test_spool.py::"
            "test_the_rest_of_an_episode_that_was_given_up_is_not_stored_by_a_store_that_is_opened_again",
        ),
    ),
    Fault(
        "a spool that fails while it is read waits for the next record",
        "vla_rl/fleet/spool.py",
        "self._closing or self._ended or self._acknowledged > done",
        "self._closing or self._acknowledged > done",
        ("tests/fleet/test_spool.py::test_a_store_that_fails_while_it_is_read_is_opened_again_though_nothing_is_put",),
    ),
    Fault(
        "a full spool drops what a person chose",
        _STORE,
        "kept = not name or any(record.intervened for record in records)",
        "kept = not name",
        (f"{_ON}test_a_full_quota_drops_the_oldest_autonomous_episodes_and_never_an_intervention",),
    ),
    Fault(
        "half an episode is kept when memory is full",
        _STORE,
        "self._given_up = episode",
        'self._given_up = ""',
        (f"{_ON}test_a_disk_that_hangs_makes_nobody_wait_and_costs_whole_autonomous_episodes",),
    ),
    Fault(
        "records are stored twice after a failure of the disk",
        _SPOOL,
        "if _identity(one) not in there]",
        "if one not in there]",
        (f"{_ON}test_a_disk_that_fails_is_opened_again_and_nothing_is_stored_twice",),
    ),
    Fault(
        "a robot sends what it does not count yet, and leaves the server that acknowledges it",
        _SPOOL,
        " if record.last < end]",
        "]",
        (f"{_ON}test_nothing_is_sent_before_the_next_record_says_so",),
    ),
    Fault(
        "what is on its way to a full disk counts as sent",
        _SPOOL,
        "            self._storing = len(records)",
        "            self._storing = 0",
        (f"{_ON}test_the_link_waits_for_what_is_on_the_disk_and_unsent_records_are_counted",),
    ),
)
