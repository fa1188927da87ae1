"""The person at an arm: shown how it does, asked a question, answering by Enter, here or on the teleoperator."""

from __future__ import annotations

import os
import select
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from robot_drivers.driver import Measurement
from robot_drivers.record import HumanInput, Record
from robot_drivers.runtime import ControlProcess
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.experience.intervention import InterventionRule, PersonConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.terminal import bar

Waits = Callable[[str, ControlProcess], None]
"""Shows a sentence and returns when the person has pressed Enter, while the arm is controlled."""


class EnterKey:
    """Enter on standard input; a context manager.

    A teleoperator may have taken the keyboard.  Reading it all the same would suspend this program (SIGTTIN), so that
    signal is ignored meanwhile, and reading fails instead.
    """

    def __init__(self, end: int = 0) -> None:
        self._end = end
        self.over = False  # nothing will ever be typed any more

    def __enter__(self) -> EnterKey:
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
        with EnterKey() as terminal:
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
        return (wanted - measured.position) / dt * unsteady


_RECENT = 50  # control steps that the rate and the share of clipped ones are of
_COLORS = {"policy": "cyan", "human": "green", "safety": "red", "hold": "dim"}


class StatusLine:
    """One line about the newest control steps, on a terminal only; a context manager."""

    def __init__(self, show: Console, title: str = "") -> None:
        self._title = title
        self._live = Live(console=show, transient=True, auto_refresh=True, redirect_stdout=False)
        self._captured: deque[float] = deque(maxlen=_RECENT)
        self._clipped: deque[bool] = deque(maxlen=_RECENT)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, record: Record, stopped: str = "") -> None:
        """Show the control step ``record``; ``stopped`` is why the arm is stopped, "" while it is not."""
        self._captured.append(record.captured)
        self._clipped.append(bool(np.any(record.clipped)))
        self._live.update(self.text(record, stopped))

    def text(self, record: Record, stopped: str) -> Text:
        """Who moves the arm, what of it was clipped, how often it is measured, and why it is stopped."""
        span = self._captured[-1] - self._captured[0]
        rate = f"{(len(self._captured) - 1) / span:.1f} Hz" if span > 0 else ""
        clipped = f"clipped {np.mean(self._clipped):.0%}"
        reason = f"({record.reason})" if record.reason and not stopped else ""
        parts = (
            (self._title, "bold"),
            (record.source, _COLORS[record.source]),
            (" ".join((clipped, reason)).strip(), ""),
            (rate, ""),
            (f"STOPPED: {stopped}" if stopped else "", "bold red"),
        )
        return Text("   ").join(Text(words, style) for words, style in parts if words)


class Display:
    """What is shown of episodes, here nothing; a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def step(self, title: str, record: Record, stopped: str) -> None:
        """A control step of the episode ``title`` was made."""

    def ended(self, title: str, records: Sequence[Record], done: int, succeeded: int) -> None:
        """The episode is over; ``done`` episodes count, ``succeeded`` of them as successes."""


class EpisodeBar(Display):
    """A bar: episodes that are over in no time."""

    def __init__(self, show: Console, total: int) -> None:
        self._bar = bar("robot", total)

    def __enter__(self) -> Self:
        self._update = self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__(None, None, None)

    def ended(self, title: str, records: Sequence[Record], done: int, succeeded: int) -> None:
        self._update(done, f"{succeeded} succeeded")


class EpisodeLines(Display):
    """A status line while an episode lasts, and a line that stays when it is over."""

    def __init__(self, show: Console, total: int) -> None:
        self._show, self._line = show, ExitStack()
        self._status: StatusLine | None = None

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def step(self, title: str, record: Record, stopped: str) -> None:
        if self._status is None:
            self._status = self._line.enter_context(StatusLine(self._show, title))
        self._status.update(record, stopped)

    def ended(self, title: str, records: Sequence[Record], done: int, succeeded: int) -> None:
        self._line.close()
        self._status = None
        if not records:
            self._show.print(Text(f"{title}: fault, before its first control step"))
            return
        person = np.mean([record.intervened for record in records])
        clipped = np.mean([bool(np.any(record.clipped)) for record in records])
        last = records[-1]
        outcome = last.outcome or "fault"
        stopped = ", with the arm stopped" if last.reason == "stopped" else ""
        self._show.print(
            Text(
                f"{title}: {outcome}, {last.captured - records[0].captured:.1f} s, {person:.0%} a person's, "
                f"{clipped:.0%} clipped{stopped}"
            )
        )


class CommandLines(Display):
    """A line for every command: when, by whom, each joint's target, and in brackets what was asked for instead."""

    def __init__(self, show: Console, names: Sequence[str]) -> None:
        self._show, self._names = show, [name.removesuffix(".pos") for name in names]
        self._began = 0.0

    def step(self, title: str, record: Record, stopped: str) -> None:
        self._began = self._began or record.captured
        asked = np.isfinite(record.requested) & record.clipped
        targets = (
            f"{name} {target:+.3f}" + (f" [{wanted:+.3f}]" if differs else "")
            for name, target, wanted, differs in zip(self._names, record.executed, record.requested, asked, strict=True)
        )
        reason = f"  ({stopped or record.reason})" if stopped or record.reason else ""
        line = f"{record.captured - self._began:7.3f} s  {record.source:6}  {'  '.join(targets)}{reason}"
        self._show.print(Text(line), soft_wrap=True)

    def ended(self, title: str, records: Sequence[Record], done: int, succeeded: int) -> None:
        """Say so, and begin to count anew."""
        self._began = 0.0
        self._show.print(Text(f"{title}: over after {len(records)} commands, none of which was sent"))
