"""Faults in the stream between robots and their server."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SERVER, _SESSION, _ATTEMPT, _ENVELOPE, _CHANNELS, _LINK = (
    f"vla_rl/fleet/{name}.py" for name in ("transport", "session", "attempt", "envelope", "channels", "link")
)
_ON, _LINKS, _TLS, _HOSTILE = (
    f"tests/fleet/test_{name}.py::" for name in ("transport", "links", "mutual_tls", "hostile")
)

FAULTS = (
    Fault(
        "an acknowledged message stays in flight",
        _ATTEMPT,
        "while self._in_flight and self._in_flight[0][0] <= durable:",
        "while self._in_flight and self._in_flight[0][0] < durable:",
        (f"{_ON}test_the_credit_of_one_message_is_given_back_with_its_acknowledgement",),
    ),
    Fault(
        "after a refusal the credit is never given back",
        _ATTEMPT,
        "                    self._in_flight.clear()",
        "                    pass",
        (f"{_ON}test_a_gap_that_only_the_store_sees_is_made_up_for",),
    ),
    Fault(
        "strangers keep as many connections as they like",
        "vla_rl/fleet/connections.py",
        'if old or left[peer[0]] > _OF_ADDRESS or left[""] > _OF_ALL:',
        "if old:",
        ("tests/fleet/test_connections.py::test_strangers_give_way_and_a_robot_that_is_here_stays",),
    ),
    Fault(
        "who does not introduce himself keeps his place",
        _SERVER,
        "                older.cancel()",
        "                pass",
        ("tests/fleet/test_connections.py::test_streams_on_which_nobody_introduces_himself_give_way",),
    ),
    Fault(
        "a robot is who its message says",
        _SERVER,
        "sender = Sender(robot or hello.robot, hello.epoch.hex())",
        "sender = Sender(hello.robot, hello.epoch.hex())",
        (f"{_TLS}test_a_robot_cannot_pass_for_another",),
    ),
    Fault(
        "robots need no certificate",
        _CHANNELS,
        "require_client_auth=True",
        "require_client_auth=False",
        (f"{_TLS}test_who_has_no_certificate_of_a_robot_of_this_fleet_gets_nothing",),
    ),
    Fault(
        "a revoked robot stays until it hangs up",
        _SERVER,
        "            self._certified(one.certificate)",
        "            pass",
        (f"{_TLS}test_a_revoked_robot_is_put_out_at_once_and_stays_out",),
    ),
    Fault(
        "compressed messages are taken",
        _CHANNELS,
        '"grpc.compression_enabled_algorithms_bitset": 1,',
        '"grpc.compression_enabled_algorithms_bitset": 7,',
        (f"{_HOSTILE}test_a_compressed_bomb_is_refused",),
    ),
    Fault(
        "records are parsed before they are counted",
        _ENVELOPE,
        "if count > MAX_RECORDS + _SPARE_FIELDS:",
        "if count < 0:",
        (f"{_HOSTILE}test_fields_are_counted_before_they_become_objects",),
    ),
    Fault(
        "records need not be those that were announced",
        _ENVELOPE,
        "if not chained or records[-1].hash != message.last_hash:",
        "if not chained:",
        (f"{_TLS}test_a_robot_cannot_pass_for_another",),
    ),
    Fault(
        "a gap is sent on to the store",
        _SESSION,
        "if records[0].seq > self._expected:",
        "if records[0].seq > 1 << 60:",
        (f"{_ON}test_a_gap_is_answered_by_the_expected_record_once",),
    ),
    Fault(
        "a robot is read on however slow the disk is",
        _SESSION,
        "self._changed.wait_for(lambda: self._in_flight <= self._credit or self._end)",
        "self._changed.notify_all()",
        (f"{_ON}test_a_robot_that_ignores_its_credit_is_read_no_further",),
    ),
    Fault(
        "a robot sends whatever its credit",
        _ATTEMPT,
        "return not self._in_flight or on_the_way",
        "return True or on_the_way",
        (f"{_ON}test_a_slow_store_slows_robots_and_memory_stays_bounded",),
    ),
    Fault(
        "the older connection of a spool stays",
        _SERVER,
        "            older.session.end(Code.ABORTED, sentence)",
        "            pass",
        (f"{_ON}test_the_newer_connection_of_a_spool_wins",),
    ),
    Fault(
        "a spool that was set back goes on",
        _SERVER,
        "if hello.next_seq <= durable:",
        "if hello.next_seq < 0:",
        (f"{_ON}test_a_spool_that_was_set_back_is_refused",),
    ),
    Fault(
        "nobody hears of a namesake",
        _SERVER,
        "        for one in (session, *present):",
        "        for one in ():",
        (f"{_ON}test_a_robot_replaced_by_another_of_its_name_and_the_server_are_told",),
    ),
    Fault(
        "a silent server is waited for",
        _ATTEMPT,
        "if silent > self._options.silence_s:",
        "if silent < 0:",
        (f"{_LINKS}test_a_server_that_answers_nothing_is_left_and_tried_again",),
    ),
    Fault(
        "a slow disk is taken for a silent robot",
        _SERVER,
        "if silent > self._options.silence_s and not one.session.busy:",
        "if silent > self._options.silence_s:",
        (f"{_LINKS}test_a_slow_disk_is_no_silence",),
    ),
    Fault(
        "the link ends with its first failure",
        _LINK,
        "            self._clock.wait(self._stop, self._backoff.next())",
        "            return",
        (f"{_LINKS}test_a_robot_begins_before_its_server",),
    ),
    Fault(
        "an introduction of anything else ends who reads it",
        "vla_rl/contract/spec.py",
        "except (KeyError, TypeError, AttributeError, ValueError) as error:",
        "except (KeyError, TypeError) as error:",
        (f"{_HOSTILE}test_everything_that_reads_foreign_bytes_reads_or_refuses_them",),
    ),
    Fault(
        "a refusal repeats all that was sent",
        "vla_rl/contract/wire.py",
        "has the key {key!r:.80},",
        "has the key {key!r},",
        (f"{_HOSTILE}test_a_refusal_is_short_whatever_it_is_of",),
    ),
)
