"""The person at an arm: shown a sentence, answering by Enter, here or on the teleoperator."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.text import Text

from robot_drivers.control_process import ControlProcess
from robot_drivers.driver import Measurement
from robot_drivers.human import HumanInput
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.experience.intervention import InterventionRule, PersonConfig
from vla_rl.recipes.env_config import EnvConfig
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


# Of an arm at 25 Hz: half a second without progress, then a quarter until the hand is there.
PERSON = PersonConfig(patience=12, delay=6, hold=12)


class ScriptedPerson:
    """What somebody who watches an arm steers it by, control step after control step.

    ``expert(obs) -> [1,>=1,D]`` are the joint positions that the person wants, ``progress(obs) -> [1]`` is what the
    person sees; both may read ``privileged/*``.  The arm is steered by velocities, as by a keyboard; each joint's is
    off by ``config.noise`` of itself.  The noise of an episode follows from its seed.
    """

    def __init__(
        self,
        expert: Callable[[Observation], np.ndarray],
        progress: Callable[[Observation], np.ndarray],
        config: PersonConfig = PERSON,
    ) -> None:
        self._expert, self._progress, self.config = expert, progress, config
        self._rule = InterventionRule(config, 1)
        self._generator = np.random.default_rng(0)
        self._begins = True

    @classmethod
    def of_task(cls, env: EnvConfig) -> ScriptedPerson:
        """Somebody who can do the task of ``env``; raises UserError where it declares no expert or no progress."""
        return cls(env.make_expert().act, env.progress())

    @property
    def share(self) -> float:
        """The share of control steps in which the person acted, of all so far."""
        return self._rule.share

    def begin(self, seed: int) -> None:
        """The next look is at the first control step of the episode of ``seed``."""
        self._generator, self._begins = np.random.default_rng([seed, 1]), True

    def look(self, obs: Observation, measured: Measurement, dt: float) -> HumanInput:
        """What the person does in a control step of ``dt`` seconds, before which ``obs`` [1,...] was seen."""
        progress = np.asarray(self._progress(obs), float)
        if self._begins:
            self._rule.begin(np.zeros(1, np.intp), progress)
            self._begins = False
        else:
            self._rule.watch(progress, np.ones(1, bool))
            self._rule.hand_back()
        if not self._rule.acting[0]:
            return HumanInput(measured.captured)
        return HumanInput(measured.captured, engaged=True, velocity=self._velocity(obs, measured, dt))

    def _velocity(self, obs: Observation, measured: Measurement, dt: float) -> np.ndarray:
        """Of each joint [D], per second."""
        wanted = np.asarray(self._expert(obs), np.float64)[0, 0]
        unsteady = 1.0 + self.config.noise * self._generator.standard_normal(len(wanted))
        found: np.ndarray = (wanted - measured.position) / dt * unsteady
        return found
