"""The person at an arm: shown a sentence, answering by Enter, here or on the teleoperator."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from robot_drivers.control_process import ControlProcess
from vla_rl.contract.errors import UserError
from vla_rl.recipes.robots.status import StatusLine

Waits = Callable[[str, ControlProcess], None]
"""Shows a sentence and returns when the person has pressed Enter, while the arm is controlled."""


class Terminal:
    """Enter on standard input; a context manager.

    A teleoperator may have taken the keyboard.  Reading it all the same would suspend this program (SIGTTIN), so that
    signal is ignored meanwhile, and reading fails instead.
    """

    def __init__(self, end: int = 0) -> None:
        self._end = end
        self.over = False  # nothing will ever be typed any more

    def __enter__(self) -> Terminal:
        self._before = signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        while os.isatty(self._end) and self.entered():  # what was typed before the question is no answer
            pass
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTTIN, self._before)

    def entered(self) -> bool:
        """Whether a line has been ended since the last call; waits for nothing."""
        while not self.over and select.select([self._end], [], [], 0)[0]:
            try:
                typed = os.read(self._end, 1)
            except OSError:  # the keyboard is the teleoperator's
                return False
            self.over = not typed
            if typed == b"\n":
                return True
        return False


def waiting(show: Console) -> Waits:
    """Questions on the terminal of ``show``; their result raises UserError when nobody can answer any more."""

    def wait(sentence: str, control: ControlProcess) -> None:
        control.newest()  # what was pressed before the question is no answer
        with Terminal() as terminal:
            show.print(Text(sentence))
            with StatusLine(show) as status:
                while not terminal.entered():
                    report = control.receive()
                    status.update(report.record, report.stopped)
                    if "ready" in report.keys:
                        return
                    if terminal.over and not control.teleoperator_pid:
                        raise UserError("Nobody answers any more, so this was given up; run it on a terminal.")

    return wait
