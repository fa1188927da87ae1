"""Arrays in shared memory: any shape and number type, growing, and nothing outside the memory is read."""

from __future__ import annotations

import os

import numpy as np
import pytest

from vla_rl.contract.errors import ContractError
from vla_rl.contract.wire import SharedMemory, arrays_in, memory_file, pack, unpack


@pytest.fixture
def ends():
    """The two sides of one memory, in one process."""
    request, *answers = [memory_file() for _ in range(3)]
    owner = SharedMemory([request], answers)
    worker = SharedMemory([os.dup(file) for file in answers], [os.dup(request)])
    yield owner, worker
    owner.close()
    worker.close()
    worker.close()


def over_the_wire(sent):
    return unpack(pack(sent))


def test_arrays_arrive_as_they_were_sent(ends):
    owner, worker = ends
    arrays = {
        "images/top": np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3),
        "none": np.zeros((0, 5), np.float32),
        "flag": np.array([True, False]),
        "number": np.array(7, np.int64),
        "view": np.arange(20, dtype=np.float64)[::3],
    }
    for size in (1, 50_000, 3):
        sent = {**arrays, "growing": np.full(size, size, np.int32)}
        received = owner.get(over_the_wire(worker.put(sent)))
        assert received.keys() == sent.keys()
        for name, array in sent.items():
            assert received[name].dtype == array.dtype and np.array_equal(received[name], array)


def test_the_last_answer_stays_while_the_next_one_is_written(ends):
    owner, worker = ends
    first = owner.get(worker.put({"x": np.ones(1000)}))
    worker.put({"x": np.full(5000, 2.0)})
    assert (first["x"] == 1).all()
    worker.put({"x": np.full(1000, 3.0)})
    assert (first["x"] == 3).all(), "the answer after the next one takes its place"


@pytest.mark.parametrize(
    "sent",
    [
        None,
        [9, []],
        [-1, []],
        [0, [["x", "<f8", [10], 1 << 40]]],
        [0, [["x", "<f8", [1 << 40], 0]]],
        [0, [["x", "<f8", [4], -8]]],
        [0, [["x", "|O8", [4], 0]]],
        [0, [["x", "<f8", [-4], 0]]],
        [0, [["x", "<f8", 4, 0]]],
        [0, ["x"]],
    ],
)
def test_what_lies_outside_or_is_no_number_is_refused(ends, sent):
    owner, worker = ends
    worker.put({"x": np.ones(10)})
    with pytest.raises(ContractError, match="so it is dropped"):
        owner.get(sent)


def test_objects_are_never_sent(ends):
    with pytest.raises(ContractError, match="'x' has dtype object, so it cannot be sent"):
        ends[0].put({"x": np.array([{}])})


def test_arrays_in_messages_are_arrays():
    sent = {"x": np.ones(3, np.float32)}
    assert np.array_equal(arrays_in(over_the_wire(sent))["x"], sent["x"])
    for wrong in (None, {"x": 3}):
        with pytest.raises(ContractError, match="something else than arrays"):
            arrays_in(wrong)
