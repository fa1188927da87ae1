"""A test's limit counts CPU time, which a busy machine does not change; its wall time is limited only against hangs.

``timeout`` in pyproject.toml, and that of ``@pytest.mark.timeout``, are CPU seconds of the test process with all its
threads; the processes that a test starts and waits for have as many again.  A test ends after ``HANG`` times as much
wall time, busy or not.
"""

from __future__ import annotations

import math
import resource
import signal
from collections.abc import Generator
from typing import Any

import pytest
import pytest_timeout

HANG = 10
_LIMIT = pytest.StashKey[float]()  # CPU seconds of ended processes


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Start the timer of CPU time, and the plugin's own one with a generous limit."""

    def too_long(number: int, frame: Any) -> None:
        pytest.fail(f"more than {settings.timeout:g} s of CPU time")

    signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, settings.timeout)
    item.stash[_LIMIT] = _children() + settings.timeout
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=HANG * settings.timeout))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    """Stop the timer of CPU time; the plugin stops its own."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test whose processes took too much CPU time."""
    result = yield
    if _children() > item.stash.get(_LIMIT, math.inf):
        pytest.fail("the processes that it started took too much CPU time; see tests/conftest.py")
    return result


def _children() -> float:
    """CPU seconds of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
