"""Runs that are killed: one in another process goes no further than one of its states, so it cannot end before."""

_HELD = """
import threading
from vla_rl.training import tracking
save_state = tracking.save_state
def save_and_stay(folder, step, state):
    save_state(folder, step, state)
    if step >= {step}:
        threading.Event().wait()
tracking.save_state = save_and_stay
"""


def held_after(step: int) -> str:
    """Python code after which a run of this process stays where it is when the state of ``step`` is on disk."""
    return _HELD.format(step=step)


_HELD_INSIDE = """
import sys, threading
from vla_rl.training import checkpoint
sync, calls = checkpoint.sync, []
def sync_or_stay(path):
    calls.append(path)
    if len(calls) > {calls}:
        print("\\nheld", file=sys.stderr, flush=True)
        threading.Event().wait()
    sync(path)
checkpoint.sync = sync_or_stay
"""


def held_inside(calls: int) -> str:
    """Python code after which a run of this process stays where it is after as many ``calls`` of ``checkpoint.sync``.

    It says ``held`` on a line of stderr.  Writing a state takes four: of its two files, of their folder while it has
    another name, and of the folder around it.
    """
    return _HELD_INSIDE.format(calls=calls)


class Killed(BaseException):
    """What ends a run of this process, as SIGKILL would."""
