"""Faults in what the fleet's page shows, and to whom."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PAGE, _STATUS, _END = (f"vla_rl/fleet/{name}.py" for name in ("page", "status", "episode_end"))
_SEEN, _COUNTED = "tests/fleet/test_page.py::", "tests/fleet/test_status.py::"
_TOKEN = f"{_SEEN}test_a_token_is_asked_for_everywhere"

FAULTS = (
    Fault(
        "a learner that is well again stays an alarm",
        "vla_rl/fleet/learner_process.py",
        'self._status.standing("learner", "")',
        "pass",
        ("tests/fleet/test_server.py::test_a_learner_that_ended_is_an_alarm_until_it_says_how_far_it_is",),
    ),
    Fault(
        "a disk that is well again stays an alarm",
        "vla_rl/fleet/status.py",
        "                self._standing.pop(what, None)",
        "                pass",
        ("tests/fleet/test_server.py::test_a_disk_that_fails_is_an_alarm_while_it_does_and_costs_nothing",),
    ),
    Fault(
        "a ledger whose disk failed is not opened again",
        "vla_rl/fleet/server.py",
        "                self.ledger.reopen()",
        "                pass",
        ("tests/fleet/test_server.py::test_a_disk_that_fails_is_an_alarm_while_it_does_and_costs_nothing",),
    ),
    Fault(
        "one robot fills the page with versions",
        "vla_rl/fleet/status.py",
        "if len(named) >= VERSIONS_OF_ONE:",
        "if len(named) < 0:",
        ("tests/fleet/test_status.py::test_one_robot_has_its_share_of_alarms_and_of_versions",),
    ),
    Fault(
        "the page lets any token in",
        _PAGE,
        "return not self.token or hmac.compare_digest(wanted, found)",
        "return not self.token or bool(found)",
        (_TOKEN,),
    ),
    Fault(
        "the page answers to any name",
        _PAGE,
        "return bool(self.server.address.token) or name in _LOCAL",
        "return True",
        (f"{_SEEN}test_another_sites_name_is_refused",),
    ),
    Fault(
        "other machines see the page without a token",
        _PAGE,
        "if not is_loopback(self.host) and not (self.token and self.tls):",
        "if not is_loopback(self.host) and not self.tls:",
        (f"{_SEEN}test_another_address_needs_tls_and_a_token",),
    ),
    Fault(
        "a place on the page is never free again",
        _PAGE,
        "            self.places.release()",
        "            pass",
        (f"{_SEEN}test_a_silent_client_keeps_nobody_out",),
    ),
    Fault(
        "the page's nonce is a constant",
        _PAGE,
        "nonce = secrets.token_urlsafe(16)",
        'nonce = "once"',
        (f"{_SEEN}test_every_answer_has_a_nonce_of_its_own",),
    ),
    Fault(
        "the page's stream outlives it",
        _PAGE,
        "while not self.server.ending.is_set():",
        "while True:",
        (f"{_SEEN}test_closing_ends_open_streams",),
    ),
    Fault(
        "a version's episodes are all successes",
        _STATUS,
        "self.successes += end.success",
        "self.successes += 1",
        (f"{_COUNTED}test_episodes_are_counted_of_robots_versions_and_all",),
    ),
    Fault(
        "a robot that the server never heard was heard at its start",
        _STATUS,
        "silent = None if robot.heard is None else now - robot.heard",
        "silent = now - (robot.heard or 0.0)",
        (f"{_COUNTED}test_a_robot_of_an_earlier_life_of_the_server_was_not_heard",),
    ),
    Fault(
        "an episode has more steps of a person than steps",
        _END,
        "not all(0 <= count <= self.steps for count in counts)",
        "not all(0 <= count for count in counts)",
        (f"{_COUNTED}test_a_wrong_end_is_refused",),
    ),
)
