"""The executor in virtual time and one process: every step is as long as it should be and every delay exact.

For tests, for tables of success over delay, and for fleets of simulated robots.
"""

from __future__ import annotations

from collections.abc import Callable

from robot_drivers.decisions import Decide, Decision, Query
from robot_drivers.driver import Measurement
from robot_drivers.executor import Executor
from robot_drivers.human import HumanInput
from robot_drivers.record import Record
from vla_rl.contract.env import Observation


class VirtualClock:
    """Seconds that pass only when somebody says so; in place of ``time.monotonic``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Lockstep:
    """Plays an executor, a policy and a person step by step.

    The driver takes its time from the same clock.  A decision on the observation of step ``s`` arrives before step
    ``s + delay``; the next one is asked for after that.  With equal seeds, two runs are equal bit for bit.
    """

    def __init__(
        self,
        executor: Executor,
        decide: Decide,
        observe: Callable[[Measurement, int], Observation],
        clock: VirtualClock,
        dt: float,
        delay: int = 0,
        person: Callable[[int, Measurement], HumanInput | None] | None = None,
    ) -> None:
        """``observe`` makes a policy's observation of a measurement and the number of steps of the episode so far.

        ``dt`` is the length of a control step in seconds, ``delay`` is in control steps, and ``person`` gives the
        teleoperator's input of a control step, None for no news.
        """
        self.executor, self.clock = executor, clock
        self._decide, self._observe, self._person = decide, observe, person
        self._dt, self._delay = dt, delay
        self._first_step = 0  # the step with which the episode began
        self._waiting: tuple[int, Decision] | None = None  # the step observed, and what was decided

    def begin(self, episode: int, time_limit: int) -> None:
        """The next step is the first of ``episode``; decisions that are on their way are lost."""
        self.executor.begin(episode, time_limit)
        self._first_step, self._waiting = self.executor.step, None

    def step(self) -> Record:
        """One control step."""
        executor, now = self.executor, self.clock.now
        measured = executor.measure(now)
        executor.alive(now, now)
        if self._person is not None and (read := self._person(executor.step, measured)) is not None:
            executor.human(read, now)
        self._deliver()
        if self._waiting is None and executor.asks:
            obs = self._observe(measured, executor.step - self._first_step)
            query = Query(obs, executor.step, executor.consumed, self._delay)
            self._waiting = executor.step, self._decide(query)
            self._deliver()
        record = executor.act(now)
        self.clock.now = executor.step * self._dt
        return record

    def _deliver(self) -> None:
        if self._waiting is not None and self.executor.step >= self._waiting[0] + self._delay:
            observed, decision = self._waiting
            self._waiting = None
            self.executor.decided(decision, observed)

    def episode(self, number: int, time_limit: int) -> list[Record]:
        """The records of episode ``number``, which ends by its outcome or after ``time_limit`` steps."""
        self.begin(number, time_limit)
        records = [self.step()]
        while not records[-1].outcome:
            records.append(self.step())
        return records
