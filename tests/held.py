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


class Killed(BaseException):
    """What ends a run of this process, as SIGKILL would."""
