"""Faults in single messages between a robot and its server, and at the edges of credits, room and intervals."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ATTEMPT, _SESSION = "vla_rl/fleet/attempt.py", "vla_rl/fleet/session.py"
_FUTURE = (
    "tests/fleet/test_attempt.py::test_an_answer_from_the_future_tells_no_clock_and_one_to_a_heartbeat_is_progress"
)
_ON_ATTEMPT, _ON_SESSION = "tests/fleet/test_attempt.py::", "tests/fleet/test_session.py::"
_WHOLE = (f"{_ON_ATTEMPT}test_the_whole_credit_may_be_on_its_way_and_no_byte_more",)
_BACK = (f"{_ON_ATTEMPT}test_an_acknowledgement_of_the_newest_record_gives_all_credit_back_and_it_may_shrink",)
_FIRST = (f"{_ON_ATTEMPT}test_the_first_record_is_acknowledged_and_none_that_does_not_exist",)
_CLOCK = (f"{_ON_ATTEMPT}test_a_heartbeat_says_nanoseconds_and_the_quickest_answer_tells_the_servers_clock",)
_GAP = (f"{_ON_SESSION}test_a_gap_is_told_once_and_the_next_gap_again",)
_RISE = ("tests/fleet/test_canary.py::test_a_rise_of_interventions_or_clips_per_minute_is_an_alarm",)
_ROOM = ("tests/fleet/test_policy_cache.py::test_what_has_arrived_needs_no_more_room",)

FAULTS = (
    Fault(
        "the last bytes of a credit are never used",
        _ATTEMPT,
        "on_the_way + (self._options.batch_kb << 10) <= self._credit",
        "on_the_way + (self._options.batch_kb << 10) < self._credit",
        _WHOLE,
    ),
    Fault(
        "a record of the message that was acknowledged stays on its way",
        _ATTEMPT,
        "self._in_flight[0][0] <= durable",
        "self._in_flight[0][0] < durable",
        _BACK,
    ),
    Fault(
        "a credit only grows",
        _ATTEMPT,
        "self._credit = credit",
        "self._credit = max(self._credit, credit)",
        _BACK,
    ),
    Fault(
        "a record that is the next one counts as acknowledged",
        _ATTEMPT,
        "if durable >= self._source.next_seq:",
        "if durable > self._source.next_seq:",
        _FIRST,
    ),
    Fault("the first record is never acknowledged", _ATTEMPT, "if durable >= 0:", "if durable > 0:", _FIRST),
    Fault(
        "after a refusal what was refused keeps its credit",
        _ATTEMPT,
        "self._in_flight.clear()",
        "pass",
        (f"{_ON_ATTEMPT}test_after_a_refusal_it_sends_from_there_with_all_of_its_credit",),
    ),
    Fault(
        "a refusal that comes while records are read is forgotten",
        _ATTEMPT,
        "if not records or self._next != seq:",
        "if not records:",
        (f"{_ON_ATTEMPT}test_a_refusal_while_records_are_read_counts_and_what_was_read_is_not_sent",),
    ),
    Fault(
        "a message holds more records than the server takes",
        _ATTEMPT,
        "[:MAX_RECORDS]",
        "[:]",
        (f"{_ON_ATTEMPT}test_a_message_holds_no_more_records_than_the_server_takes",),
    ),
    Fault(
        "a policy is told as often as the server says it",
        _ATTEMPT,
        "if latest != self._state.policy:",
        "if True:",
        (f"{_ON_ATTEMPT}test_a_policy_is_told_when_it_changes_and_once",),
    ),
    Fault(
        "the newest answer tells the server's clock, however long it took",
        _ATTEMPT,
        "if 0 <= round_trip <= self._state.round_trip_s:",
        "if 0 <= round_trip:",
        _CLOCK,
    ),
    Fault("a heartbeat says microseconds", _ATTEMPT, "sent_ns=int(beat * 1e9)", "sent_ns=int(beat * 1e6)", _CLOCK),
    Fault("an answer is read in microseconds", _ATTEMPT, "clock.echo_ns / 1e9", "clock.echo_ns / 1e6", _CLOCK),
    Fault(
        "the second gap of a connection is not told",
        _SESSION,
        "            self._refusing = False",
        "            pass",
        _GAP,
    ),
    Fault("the record that is expected is a gap", _SESSION, "if records[0].seq > self._expected:", "if records:", _GAP),
    Fault(
        "what comes twice sets the expected record back",
        _SESSION,
        "self._expected = max(self._expected, records[-1].last + 1)",
        "self._expected = records[-1].last + 1",
        (f"{_ON_SESSION}test_what_comes_twice_sets_nothing_back",),
    ),
    Fault(
        "a gap that the store finds is asked for from behind it",
        _SESSION,
        "self._expected = gap.expected",
        "pass",
        (f"{_ON_SESSION}test_a_gap_that_the_store_finds_is_asked_for_from_there",),
    ),
    Fault(
        "rates a second are told as rates a minute",
        "vla_rl/fleet/canary.py",
        "one.seconds / 60.0",
        "one.seconds",
        _RISE,
    ),
    Fault(
        "rates whose intervals overlap are an alarm",
        "vla_rl/fleet/canary.py",
        "if new[0] > old[1]:",
        "if new[0] > old[0]:",
        _RISE,
    ),
    Fault(
        "what has arrived counts as missing room",
        "vla_rl/fleet/policy_cache.py",
        "needed = sum(missing.values()) - arrived +",
        "needed = sum(missing.values()) +",
        _ROOM,
    ),
    Fault(
        "a version may take the room of the rest of the disk",
        "vla_rl/fleet/policy_cache.py",
        "for file in manifest.files) + SPARE_BYTES",
        "for file in manifest.files)",
        _ROOM,
    ),
    Fault(
        "what connections of strangers took is never given back",
        "vla_rl/fleet/transport.py",
        "if self._crowded and not ended:",
        "if False:",
        ("tests/fleet/test_connections.py::test_strangers_give_way_and_a_robot_that_is_here_stays",),
    ),
    Fault(
        "an answer from the future sets the server's clock",
        _ATTEMPT,
        "if 0 <= round_trip <=",
        "if round_trip <=",
        (_FUTURE,),
    ),
    Fault(
        "a connection that stayed for a heartbeat counts as one that failed at once",
        _ATTEMPT,
        "self._progress = True  # it stayed for at least a heartbeat",
        "pass",
        (_FUTURE,),
    ),
    Fault(
        "a robot may download one piece too many at once",
        "vla_rl/fleet/downloads.py",
        ">= _AT_ONCE:",
        "> _AT_ONCE:",
        ("tests/fleet/test_connections.py::test_a_robot_downloads_so_many_pieces_at_once_and_no_more",),
    ),
)
