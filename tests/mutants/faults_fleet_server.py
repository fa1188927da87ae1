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
        "counts begin anew at a restart",
        _WATCHER,
        "self._position, self._present = 0, frozenset[str]()",
        "self._position, self._present = ledger.position, frozenset[str]()",
        _PAGE,
    ),
    Fault(
        "how a policy's episodes went is not counted for the canary",
        _WATCHER,
        "if version not in self._registry.releases.stages:",
        "if version in self._registry.releases.stages:",
        (f"{_ON}test_a_canary_that_fails_is_taken_back_and_that_is_an_alarm",),
    ),
    Fault(
        "robots are told of no policy",
        "vla_rl/fleet/registered.py",
        "version = releases.version_for(robot)",
        "version = None",
        (f"{_ON}test_a_robot_downloads_what_the_registry_has_for_it",),
    ),
)
