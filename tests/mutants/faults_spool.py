"""Faults in the robot's spool."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STORE, _SPOOL = "vla_rl/fleet/spool_store.py", "vla_rl/fleet/spool.py"
_ON = "tests/fleet/test_spool.py::"

FAULTS = (
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
)
