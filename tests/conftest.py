"""A test's limit counts CPU time, which a busy machine does not change; its wall time is limited only against hangs.

``timeout`` in pyproject.toml, and that of ``@pytest.mark.timeout``, are CPU seconds of the test process with all its
threads; the processes that a test starts and waits for have as many again.  A test ends after ``HANG`` times as much
wall time, busy or not.

A test marked ``gpu`` is skipped on a machine without one.  What vla-rl remembers of a user lies in a temporary folder.
"""

from __future__ import annotations

import gc
import inspect
import math
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Generator
from functools import cache
from typing import Any

import pytest
import pytest_timeout

HANG = 10
_CHILDREN = pytest.StashKey[float]()  # limit of CPU seconds of ended processes
_WATCH = pytest.StashKey["_Watch"]()


class _Watch(threading.Thread):
    """Signals the main thread when the process has used ``limit`` seconds of CPU time from now on.

    A timer of the kernel (ITIMER_PROF) could signal the thread that computes, while the main one waits for it for ever.
    """

    def __init__(self, limit: float) -> None:
        super().__init__(name="cpu-limit", daemon=True)
        self.limit, self.over = time.process_time() + limit, threading.Event()

    def run(self) -> None:
        while not self.over.wait(min(0.25, self.limit)):
            if time.process_time() > self.limit:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGPROF)
                return


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests, and the processes that they start, a state folder of their own."""
    gc.disable()  # until all is collected: nothing of it ever becomes garbage
    inspect.getsource = cache(inspect.getsource)  # each command parses the files of all configs for their comments
    state = tempfile.TemporaryDirectory(prefix="vla-rl-tests-")
    os.environ["XDG_STATE_HOME"] = state.name
    config.add_cleanup(state.cleanup)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, visibly."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # the tests of the contract go without

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU, and torch sees none; `make gpu` runs it on a machine with one")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Watch CPU time, and start the plugin's own timer with a generous limit."""

    def too_long(number: int, frame: Any) -> None:
        pytest.fail(f"more than {settings.timeout:g} s of CPU time")

    signal.signal(signal.SIGPROF, too_long)
    item.stash[_CHILDREN] = _children() + settings.timeout
    item.stash[_WATCH] = watch = _Watch(settings.timeout)
    watch.start()
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=HANG * settings.timeout))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    """Stop watching CPU time; the plugin stops its own timer."""
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    if _WATCH in item.stash:
        item.stash[_WATCH].over.set()
        item.stash[_WATCH].join()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a slow test, also one that waits, come first: at the end, no worker waits long for another's file.

    A name with an address in it differs in every process, and pytest-xdist then runs nothing at all: it is refused.
    """
    if moving := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{moving[0]!r} has another name in every process; give its parameters ids of text.")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Leave thousands of tests and modules out of every later garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test whose processes took too much CPU time."""
    result = yield
    if _children() > item.stash.get(_CHILDREN, math.inf):
        pytest.fail("the processes that it started took too much CPU time; see tests/conftest.py")
    return result


def _children() -> float:
    """CPU seconds of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
