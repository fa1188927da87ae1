"""Faults in the fleet's server and in what it counts."""

from __future__ import annotations

from tests.mutants.fault import Fault

_WATCHER, _ON = "vla_rl/fleet/watcher.py", "tests/fleet/test_server.py::"
_PAGE = (f"{_ON}test_what_robots_send_is_on_the_page_also_after_a_restart",)

FAULTS = (
    Fault(
        "an episode that was played again is counted",
        _WATCHER,
        'if end.outcome != "redo":',
        'if end.outcome != "re-do":',
        _PAGE,
    ),
    Fault(
        "a robot that has sent everything seems to hold more",
        "vla_rl/fleet/session.py",
        "return max(0, self.offered - self.durable)",
        "return max(1, self.offered - self.durable)",
        _PAGE,
    ),
)
