"""A loop that never waits: messages in pieces, peers that hang, end or speak nonsense."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from robot_drivers.control import Inbox, Outbox
from vla_rl.contract.wire import Pieces, framed, greeting


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def test_messages_arrive_whole_in_whatever_pieces_they_come() -> None:
    sent = [greeting("a"), {"chunk": np.arange(6.0).reshape(2, 3)}, {"kind": "stop"}]
    data = b"".join(framed(message) for message in sent)
    for size in (1, 7, len(data)):
        pieces, received = Pieces(), []
        for begin in range(0, len(data), size):
            received += pieces.add(data[begin : begin + size])
        assert (
            received[0] == sent[0] and received[2] == sent[2] and np.array_equal(received[1]["chunk"], sent[1]["chunk"])
        )


def test_an_inbox_takes_what_is_there_and_the_greeting_first(pipe: list[int]) -> None:
    inbox = Inbox(pipe[0], "control")
    assert inbox.poll() == []
    os.write(pipe[1], framed(greeting("owner")) + framed({"kind": "stop"}) + framed({"kind": "close"})[:9])
    assert inbox.poll() == [{"kind": "stop"}] and inbox.poll() == []
    os.write(pipe[1], framed({"kind": "close"})[9:])
    assert inbox.poll() == [{"kind": "close"}] and not inbox.gone


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"Traceback (most recent call last)", "where a message should begin"),
        (framed({"kind": "stop"}), "no vla-rl greeting"),
        (framed({**greeting("owner"), "contract_version": 999}), "contract version 999"),
        (b"vla1" + (1 << 40).to_bytes(8, "little"), "announces"),
    ],
)
def test_a_peer_that_speaks_nonsense_is_heard_no_more(pipe: list[int], data: bytes, why: str) -> None:
    inbox = Inbox(pipe[0], "control")
    os.write(pipe[1], data)
    assert inbox.poll() == [] and why in inbox.gone
    os.write(pipe[1], framed(greeting("owner")) + framed({"kind": "stop"}))
    assert inbox.poll() == []


def test_a_peer_that_has_ended_is_gone() -> None:
    reader, writer = os.pipe()
    inbox = Inbox(reader, "control")
    os.close(writer)
    assert inbox.poll() == [] and inbox.gone == "it has ended"
    os.close(reader)


def test_what_waits_for_a_peer_that_hangs_is_bounded_and_whole(pipe: list[int]) -> None:
    outbox = Outbox(pipe[1], "control", room=1 << 16)
    for number in range(3000):
        outbox.put({"number": number, "data": bytes(200)})
        outbox.flush()
    assert outbox.dropped > 1000 and outbox.waiting
    os.set_blocking(pipe[0], False)
    pieces, received = Pieces(), []
    while outbox.waiting:
        received += pieces.add(os.read(pipe[0], 1 << 16))
        outbox.flush()
    received += pieces.add(os.read(pipe[0], 1 << 20))
    numbers = [message["number"] for message in received[1:]]
    assert received[0] == greeting("control") and numbers[-1] == 2999 and sorted(set(numbers)) == numbers
    assert len(numbers) + outbox.dropped == 3000


def test_a_peer_that_reads_gets_everything_however_large_and_however_much(pipe: list[int]) -> None:
    """More than a pipe takes at once, and in all more than may wait."""
    outbox, inbox, received = Outbox(pipe[1], "control", room=1 << 20), Inbox(pipe[0], "owner"), []
    for number in range(20):
        outbox.put({"number": number, "data": bytes([number]) * 200_000})
        while outbox.waiting:
            outbox.flush()
            received += inbox.poll()
    received += inbox.poll()
    assert outbox.dropped == 0 and not inbox.gone
    assert received == [{"number": number, "data": bytes([number]) * 200_000} for number in range(20)]


def test_nothing_waits_for_a_peer_that_has_ended() -> None:
    reader, writer = os.pipe()
    outbox = Outbox(writer, "control")
    os.close(reader)
    outbox.flush()
    assert outbox.gone
    outbox.put({"number": 1})
    outbox.flush()
    assert not outbox._waiting and outbox.dropped == 1
    os.close(writer)
