"""Objects in another process: what is called, what comes back, and what happens when either side stops."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.patience import PATIENCE
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.worker import COMMAND, Pipes, Worker

ROOT = str(Path(__file__).resolve().parents[2])
MAKE = "tests.experience.makers:Counter"


def started(**variables: str) -> Worker:
    """A process that imports this copy; it takes seconds to start."""
    return Worker(Pipes(COMMAND, {**os.environ, "PYTHONPATH": ROOT, **variables}))


@pytest.fixture(scope="module")
def worker():
    """For all tests that leave it alive."""
    with started() as made:
        yield made


@pytest.fixture
def mortal():
    with started() as made:
        yield made


def test_objects_keep_what_they_are_told_apart(worker):
    one, other = worker.make(MAKE, start=3), worker.make(MAKE, start=10)
    assert [worker.call(one, "add", amount=2), worker.call(other, "add", amount=1)] == [5, 11]
    assert worker.call(one, "add", amount=1) == 6


def test_tensors_and_arrays_arrive_as_tensors_also_inside_lists(worker):
    number = worker.make(MAKE, start=0)
    sent = {"a": torch.arange(3), "b": [np.ones(2, np.float32), {"c": torch.tensor(2.5)}], "text": "x", "none": None}
    received = worker.call(number, "echo", value=sent)
    assert received["text"] == "x" and received["none"] is None
    assert received["a"].dtype == torch.int64 and received["a"].tolist() == [0, 1, 2]
    assert received["b"][0].dtype == torch.float32 and float(received["b"][1]["c"]) == 2.5
    assert worker.call(number, "kinds", value=sent) == ["Tensor", "Tensor", "Tensor"]


def test_reports_arrive_in_order_before_the_answer(worker):
    reports: list[tuple[int, int]] = []
    number = worker.make(MAKE, start=0)
    assert worker.call(number, "count_to", report=lambda *values: reports.append(values), last=4) == 4
    assert reports == [(1, 1), (2, 4), (3, 9), (4, 16)]


def test_an_unknown_method_is_named_with_the_nearest_one(worker):
    number = worker.make(MAKE, start=0)
    for method in ("ad", "_secret"):
        with pytest.raises(ContractError, match=f"Counter has no {method!r}, so nothing was done"):
            worker.call(number, method)
    assert worker.call(number, "add", amount=1) == 1 and worker.alive


def test_requests_of_several_threads_wait_for_each_other(worker):
    number = worker.make(MAKE, start=0)
    threads = [
        threading.Thread(target=lambda: [worker.call(number, "add", amount=1) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert worker.call(number, "add", amount=0) == 200


def test_signals_that_reach_the_whole_group_do_not_end_it(worker):
    assert os.getpgid(worker.pid) == worker.pid, "Ctrl-C in a terminal would end one that is still starting"
    number = worker.make(MAKE, start=0)
    for ending in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, ending)
        assert worker.call(number, "add", amount=1)


def test_a_request_that_was_interrupted_leaves_a_process_that_only_can_be_closed(mortal):
    def interrupt(*values: int) -> None:
        raise KeyboardInterrupt

    number = mortal.make(MAKE, start=0)
    with pytest.raises(KeyboardInterrupt):
        mortal.call(number, "count_to", report=interrupt, last=10**12)
    assert not mortal.alive
    with pytest.raises(UserError, match=r"Counter' was interrupted, so it has no 'add'; make a new one"):
        mortal.call(number, "add", amount=1)
    mortal.close()  # at once: it would count for hours
    with pytest.raises(ProcessLookupError):
        os.kill(mortal.pid, 0)


def test_closing_while_another_thread_waits_for_an_answer_ends_both(mortal):
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


def test_the_environment_of_the_process_can_be_given():
    with started(A_VARIABLE="of its own") as other:
        assert other.call(other.make(MAKE, start=0), "variable", name="A_VARIABLE") == "of its own"
    assert "A_VARIABLE" not in os.environ


def test_a_process_ends_with_its_owner():
    """A worker whose owner was killed sees its pipe end."""
    with started() as owner:
        number = owner.make("tests.experience.makers:Owner")
        pid = owner.call(number, "start")
        os.kill(pid, 0)
        os.kill(owner.pid, signal.SIGKILL)
    gone = threading.Event()
    for _ in range(int(PATIENCE / 0.05)):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            gone.set()
            break
        threading.Event().wait(0.05)
    assert gone.is_set()
