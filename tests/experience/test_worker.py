"""Objects in another process: what is called, what comes back, and what happens when either side stops."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import torch

from tests.patience import PATIENCE
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.worker import Worker

MAKE = "tests.experience.makers:Counter"


def test_objects_keep_what_they_are_told_apart(shared):
    one, other = shared.make(MAKE, start=3), shared.make(MAKE, start=10)
    assert [shared.call(one, "add", amount=2), shared.call(other, "add", amount=1)] == [5, 11]
    assert shared.call(one, "add", amount=1) == 6
    assert shared.call(one, "variable", name="OF_ITS_OWN") == "yes" and "OF_ITS_OWN" not in os.environ


def test_tensors_and_arrays_arrive_as_tensors_also_inside_lists(shared):
    number = shared.make(MAKE, start=0)
    sent = {"a": torch.arange(3), "b": [np.ones(2, np.float32), {"c": torch.tensor(2.5)}], "text": "x", "none": None}
    received = shared.call(number, "echo", value=sent)
    assert received["text"] == "x" and received["none"] is None
    assert received["a"].dtype == torch.int64 and received["a"].tolist() == [0, 1, 2]
    assert received["b"][0].dtype == torch.float32 and float(received["b"][1]["c"]) == 2.5
    assert shared.call(number, "kinds", value=sent) == ["Tensor", "Tensor", "Tensor"]


def test_reports_arrive_in_order_before_the_answer(shared):
    reports: list[tuple[int, int]] = []
    number = shared.make(MAKE, start=0)
    assert shared.call(number, "count_to", report=lambda *values: reports.append(values), last=4) == 4
    assert reports == [(1, 1), (2, 4), (3, 9), (4, 16)]


def test_an_unknown_method_is_named_with_the_nearest_one(shared):
    number = shared.make(MAKE, start=0)
    for method in ("ad", "_secret"):
        with pytest.raises(ContractError, match=f"Counter has no {method!r}, so nothing was done"):
            shared.call(number, method)
    assert shared.call(number, "add", amount=1) == 1 and shared.alive


def test_requests_of_several_threads_wait_for_each_other(shared):
    number = shared.make(MAKE, start=0)
    threads = [
        threading.Thread(target=lambda: [shared.call(number, "add", amount=1) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert shared.call(number, "add", amount=0) == 200


def test_signals_that_reach_the_whole_group_do_not_end_it(shared):
    assert os.getpgid(shared.pid) == shared.pid, "Ctrl-C in a terminal would end one that is still starting"
    number = shared.make(MAKE, start=0)
    for ending in (signal.SIGINT, signal.SIGTERM):
        os.kill(shared.pid, ending)
        assert shared.call(number, "add", amount=1)


class Interrupted:
    """A link to a process that is at work when Ctrl-C comes."""

    name, pid, running, closed = "process 7", 7, True, False

    def __init__(self):
        self.calls = []

    def exchange(self, request, report):
        if request["do"] == "make":
            return {"value": 0}
        raise KeyboardInterrupt

    def kill(self):
        self.calls.append("kill")

    def close(self):
        self.calls.append("close")


def test_after_an_interrupted_request_it_can_only_be_closed():
    link = Interrupted()
    interrupted = Worker(link)
    number = interrupted.make(MAKE, start=0)
    with pytest.raises(KeyboardInterrupt):
        interrupted.call(number, "count_to", last=10**12)
    assert not interrupted.alive
    with pytest.raises(UserError, match=r"Counter' was interrupted, so it has no 'add'; make a new one"):
        interrupted.call(number, "add", amount=1)
    interrupted.close()
    assert link.calls == ["kill", "close"], "it would count for hours"


def test_closing_while_another_thread_waits_ends_both(mortal):
    number, errors = mortal.make(MAKE, start=0), []
    started, read_on = threading.Event(), threading.Event()

    def report(*values: int) -> None:
        started.set()
        assert read_on.wait(PATIENCE)

    def wait() -> None:
        try:
            mortal.call(number, "count_to", report=report, last=10**12)
        except UserError as error:
            errors.append(str(error))

    waiting, closing = threading.Thread(target=wait), threading.Thread(target=mortal.close)
    waiting.start()
    assert started.wait(PATIENCE)
    closing.start()
    closing.join(2)  # the stream stays open for the thread that is going to read it, however long that takes
    waited = closing.is_alive()
    read_on.set()
    for thread in (waiting, closing):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert waited and len(errors) == 1 and "was killed by SIGKILL during 'count_to'" in errors[0]
    with pytest.raises(ProcessLookupError):
        os.kill(mortal.pid, 0)
