"""How long a test waits for another process or thread before it says that it hangs: wall time, on any machine."""

import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds; what is limited by speed counts CPU time (conftest.py)


def wait_until(condition: Callable[[], object]) -> None:
    """Return as soon as ``condition()`` is true; fail when that never happens."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
