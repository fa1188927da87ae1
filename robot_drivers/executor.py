"""One control step: measure, choose between policy and person, supervise, command, label.

It has no process, no clock and no queue of messages of its own: ``control.py`` runs it in real time, ``simulated.py``
in virtual time.

Time is counted in control steps: a chunk that was decided on the observation of step ``s`` holds the actions for the
steps ``s``, ``s + 1``, ...  If it arrives before step ``t``, its *delay* is ``t - s`` steps, which is exact: no clock
is read, and nothing is estimated.  Where the arm stood still meanwhile, because an episode has just begun or the chunk
before ran out, the new one begins that many steps later: its actions follow on the observation in which the arm still
is.  So a first chunk begins with its first action, as in LeRobot's asynchronous inference and openpi's client.

Real-time chunking (Black et al. 2025, arXiv 2506.07339) is :class:`RecedingHorizon` with a policy that makes a new
chunk agree with the last one where they overlap: chunks are executed alike, and only the policy differs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from robot_drivers.driver import DriverError, Measurement, Resets, RobotDriver, copied
from robot_drivers.record import Decision, HumanInput, Record
from robot_drivers.safety import Command, Request, Supervisor
from vla_rl.contract.errors import ContractError, UserError

SILENCE = 2.0  # s
_KEPT = 512  # decisions whose version and time of capture are remembered
_OUTCOMES = ("success", "failure", "redo")
_SHRINK = 0.5  # of what the leader moves


class Executor:
    """Drives one connected arm, one call of :meth:`measure` and :meth:`act` per control step.

    A person who holds control keeps it until an input says otherwise: when the teleoperator falls silent, the arm holds
    and the policy does not resume.  Where the arm is ``attended``, the policy moves it only while the teleoperator is
    heard.  After every hand-back, re-arming and start of an episode the queue is empty, and
    only chunks that were decided on a later observation fill it.
    """

    def __init__(self, driver: RobotDriver, supervisor: Supervisor, chunks: Chunks, attended: bool = False) -> None:
        self.step, self.episode = 0, 0  # the number of the next control step; of the episode, 0 between episodes
        self.refused = 0  # chunks that came too late to count
        self.faults = 0  # calls that the driver failed
        self.rearmed = 0  # times that a person has re-armed the arm
        self._driver, self.supervisor, self._chunks, self._attended = driver, supervisor, chunks, attended
        self._dt = 1 / driver.spec.control_hz
        self._origins: dict[int, tuple[int, float]] = {}  # version and time of capture, by step observed
        self._captures: dict[int, float] = {}
        self._valid_from = 0  # chunks that were decided on earlier observations do not count
        self._heard = -1  # the step observed, of the newest chunk
        self._alive = -np.inf  # the policy's last sign of life
        self._beaten = np.inf  # when it came
        self._human = HumanInput(-np.inf)
        self._take_over = TakeOver()
        self._outcome, self._left = "", 0  # of the episode; control steps until its time limit
        self._measured: Measurement | None = None
        self._velocity = np.zeros(len(driver.spec.joints))
        self._last: np.ndarray | None = None  # command
        self._source = "hold"  # of the last command
        self._deaf_since: float | None = None  # the robot

    # -- what comes in -------------------------------------------------------------------------------------------------

    def reset(self, seed: int) -> None:
        """Prepare the scene of episode ``seed``, with a robot that ``Resets`` itself: its arm is where that puts it.

        A stop stays latched.  Raises UserError for a robot that a person has to reset.
        """
        if not isinstance(self._driver, Resets):
            raise UserError(f"{self._driver.spec.name} cannot reset its scene, so nothing was done; reset it by hand.")
        before, self._measured, self._last, self._source = self.supervisor, None, None, "hold"
        self._velocity = np.zeros_like(self._velocity)
        self._driver.reset(seed)
        self.supervisor = Supervisor(before.limits, before.kinematics)
        if before.stopped:
            self.supervisor.stop(before.stopped)
        self._flush()

    def begin(self, episode: int, time_limit: int) -> None:
        """The next control step is the first of ``episode``, which has at most ``time_limit`` of them."""
        self.episode, self._outcome, self._left = episode, "", time_limit
        self._flush()

    def end(self, outcome: str) -> None:
        """The next control step is the episode's last; nothing happens between episodes."""
        if self.episode and not self._outcome:
            self._outcome = outcome

    def decided(self, decision: Decision, observed: int) -> None:
        """A chunk that was decided on the observation of step ``observed`` has arrived.

        It does not count while a person holds control, or if it was decided before control was handed back.  Raises
        ContractError for one that no robot should execute.
        """
        self._heard = observed
        if self._human.engaged or observed < self._valid_from:
            self.refused += 1
            return
        chunk, joints = np.array(decision.chunk, np.float64), len(self._driver.spec.joints)
        if chunk.shape[1:] != (joints,):
            raise ContractError(
                f"a chunk has shape {list(chunk.shape)} and {self._driver.spec.name} has {joints} joints, so it is not "
                "executed; run a policy that was trained for this robot."
            )
        self._chunks.add(chunk, observed, self.step)
        self._origins[observed] = decision.policy_version, self._captures.get(observed, -np.inf)
        self._origins = dict(list(self._origins.items())[-_KEPT:])

    def alive(self, stamp: float, now: float) -> None:
        """Everything that the policy depends on was well at ``stamp``, says its process at ``now``.

        Its actions are requested until that is older than ``Limits.max_age``.  A process that says nothing for longer
        than ``SILENCE`` was frozen: it knows nothing of what became of the arm, so a person has to re-arm it.
        """
        self._after(now - self._beaten, "its policy's process")
        self._alive, self._beaten = max(self._alive, stamp), now

    def human(self, read: HumanInput, now: float) -> None:
        """The teleoperator's newest input; its keys act at once.

        Raises ContractError for one that does not fit the arm; the one before stays.
        """
        shape = (len(self._driver.spec.joints),)
        for name, array in (("position", read.position), ("velocity", read.velocity)):
            if array is not None and (array.shape != shape or not np.isfinite(array).all()):
                raise ContractError(
                    f"the teleoperator's {name} is {array.tolist()}, not {shape[0]} finite numbers, so it is not "
                    "followed; choose a teleoperator for this arm."
                )
        if self._attended:
            self._after(read.captured - self._human.captured, "its teleoperator")
        if read.engaged and not self._human.engaged:
            self._take_over.interventions += 1
        if read.engaged != self._human.engaged:
            self._flush()
        position, velocity = (None if one is None else one.copy() for one in (read.position, read.velocity))
        self._human = replace(read, position=position, velocity=velocity)
        for key in read.keys:
            if key == "stop":
                self.stop("a person pressed stop")
            elif key == "rearm":
                self.rearm(now)
            elif key in _OUTCOMES:
                self.end(key)

    def _after(self, silence: float, who: str) -> None:
        """Stop the arm in mid-episode if ``who`` was silent for longer than ``SILENCE``, before which it ever spoke."""
        if self.episode and SILENCE < silence < np.inf:
            self.stop(f"{who} was silent for {silence:.1f} s")

    def stop(self, reason: str) -> None:
        """Hold the arm until a person re-arms."""
        self.supervisor.stop(reason)

    def rearm(self, now: float, there: np.ndarray | None = None) -> None:
        """A person allows the arm to move again; whatever was queued is forgotten.

        ``there`` [D] is where the person sees an arm that is elsewhere (``Supervisor``).
        """
        self.supervisor.rearm(now, there)
        self.rearmed += 1
        self._flush()  # nothing is replayed

    def attended(self, now: float) -> bool:
        return self._fresh_at(self._human.captured, now)

    # -- one control step ----------------------------------------------------------------------------------------------

    def measure(self, now: float) -> Measurement:
        """Measure the arm; the last measurement again where it does not answer, until it is too old.

        Raises DriverError when it never did.
        """
        try:
            measured = copied(self._driver.observe(), len(self._velocity))
        except DriverError:
            if self._measured is None:
                raise
            self.faults += 1
            return self._measured
        self._velocity = self._velocity_of(measured)
        self._measured = measured
        self._captures[self.step] = measured.captured
        self._captures.pop(self.step - _KEPT, None)
        return measured

    @property
    def asks(self) -> bool:
        """Whether the next chunk should be decided on the measurement of this step."""
        running = self.episode > 0 and not self._outcome and not self._human.engaged
        return running and self._chunks.wants(self.step)

    @property
    def consumed(self) -> int | None:
        """How many actions of the newest chunk belong to steps before this one; None where none counts any more."""
        return self._chunks.consumed(self.step)

    def act(self, now: float) -> Record:
        """Command the arm after :meth:`measure`, and say what was done."""
        assert self._measured is not None, "measure() comes before act()"
        if self.episode and (outcome := getattr(self._driver, "outcome", "")):
            self.end(outcome)
        self._left -= 1
        if not self._left:
            self.end("time_limit")
        asks, consumed = self.asks, self.consumed
        request = self._request(now)
        command = self.supervisor.step(self._measured, request, now, self._human.deadman_at)
        executed = self._send(command, now)
        record = self._record(command, executed, now, asks, consumed)
        self._last, self._source = executed, command.source
        self.step += 1
        if self._outcome:
            self.episode, self._outcome = 0, ""
            self._flush()
        return record

    def _request(self, now: float) -> Request | None:
        """What the policy or the person in control wants now; None where that is not known, or is no longer fresh."""
        if self._human.engaged:
            return self._persons_request(now)
        if not self._fresh_at(min(self._alive, self._human.captured) if self._attended else self._alive, now):
            self._flush()  # and whatever it decided before
            return None
        wanted = self._chunks.action(self.step)
        return None if wanted is None else Request(wanted, now, "policy")

    def _persons_request(self, now: float) -> Request | None:
        assert self._measured is not None
        if not self._fresh_at(self._human.captured, now):
            return None
        if self._source != "human":  # the person has just taken over, or the arm was stopped meanwhile
            self._take_over.anchor()
        last = self._measured.position if self._last is None else self._last
        wanted = self._take_over.request(self._human, last, self._dt)
        return None if wanted is None else Request(wanted, now, "human")

    def _fresh_at(self, stamp: float, now: float) -> bool:
        return 0 <= now - stamp <= self.supervisor.limits.max_age

    def _send(self, command: Command, now: float) -> np.ndarray:
        """What was sent; the arm stays stopped when it takes no command for as long as the watchdog waits."""
        try:
            sent = np.array(self._driver.command(command.position.copy()), np.float64)
            if sent.shape != command.position.shape or not np.isfinite(sent).all():
                raise DriverError(f"it says that it was sent {sent.tolist()}, which is no position")
        except DriverError as error:
            self.faults += 1
            self._deaf_since = now if self._deaf_since is None else self._deaf_since
            if now - self._deaf_since >= self.supervisor.limits.watchdog:
                self.stop(f"the robot takes no command: {error}")
            return command.position if self._last is None else self._last
        self._deaf_since = None
        return sent

    def _record(self, command: Command, executed: np.ndarray, now: float, asks: bool, consumed: int | None) -> Record:
        assert self._measured is not None
        asked = command.requested is not None or command.source == "safety"
        source = command.source if asked else "hold"  # the last request is followed on, and nobody asks for anything
        place = self._chunks.place(self.step) if source == "policy" else None
        version, captured = (-1, now) if place is None else self._origins.get(place.chunk, (-1, now))
        if source == "human":
            captured = self._human.captured
        place = place or Place(-1, -1)
        return Record(
            step=self.step,
            episode=self.episode,
            captured=self._measured.captured,
            position=self._measured.position,
            velocity=self._velocity,
            requested=np.full_like(executed, np.nan) if command.requested is None else command.requested,
            executed=executed,
            clipped=command.clipped,
            source=source,
            reason=command.reason,
            policy_version=version,
            chunk=place.chunk,
            step_in_chunk=place.index,
            latency=now - captured,
            intervention=self._take_over.interventions if self._human.engaged else 0,
            outcome=self._outcome,
            asks=asks,
            consumed=-1 if consumed is None else consumed,
            heard=self._heard,
        )

    def _velocity_of(self, measured: Measurement) -> np.ndarray:
        if measured.velocity is not None:
            return measured.velocity
        before = self._measured
        if before is None or measured.captured <= before.captured:
            return self._velocity
        return (measured.position - before.position) / (measured.captured - before.captured)

    def _flush(self) -> None:
        self._chunks.clear()
        self._valid_from = self.step


class TakeOver:
    """Turns a teleoperator's input into requests that continue what the arm does.

    A leader arm seldom stands where the robot does when the person takes over.  Its offset is measured at that moment
    and kept, so the first request is the last command; the offset of a joint then shrinks by half of what the leader
    moves it, so the arm never moves while the person's hand rests, and both agree after a while.  A device that steers
    continues from the last command, which the supervisor has clipped: it never runs ahead of the arm.
    """

    def __init__(self) -> None:
        self.interventions = 0  # so far
        self._offset: np.ndarray | None = None
        self._leader: np.ndarray | None = None

    def anchor(self) -> None:
        """The next request is the last command, wherever the leader is."""
        self._offset = self._leader = None

    def request(self, read: HumanInput, last: np.ndarray, dt: float) -> np.ndarray | None:
        """The position [D] that the person asks for after the command ``last`` [D]; None for no position at all."""
        if read.position is None:
            return None if read.velocity is None else last + read.velocity * dt
        if self._offset is None or self._leader is None:
            self._offset, self._leader = last - read.position, read.position.copy()
        moved = np.abs(read.position - self._leader)
        self._leader = read.position.copy()  # a device may write into its own again
        self._offset = np.sign(self._offset) * np.maximum(np.abs(self._offset) - _SHRINK * moved, 0.0)
        return read.position + self._offset


@dataclass(frozen=True)
class Place:
    """Which action is executed: number ``index``, from 0, of the chunk that was decided on at step ``chunk``."""

    chunk: int
    index: int


class Chunks:
    """A queue of actions, filled chunk by chunk, from which one is taken in every control step: of the newest chunk."""

    def __init__(self) -> None:
        self._chunk: np.ndarray | None = None
        self._start, self._observed = 0, 0  # steps: of the chunk's first action, of its observation

    def add(self, chunk: np.ndarray, observed: int, now: int) -> None:
        """``chunk`` [H,D], decided on the observation of step ``observed``, is there before step ``now`` is executed.

        A chunk that is over by then, or older than the newest one, changes nothing.  Raises ContractError for a chunk
        that is not two-dimensional and finite, or that was observed in the future.
        """
        _check(chunk, observed, now)
        outdated = self._chunk is not None and observed <= self._observed
        start = observed + _stood_still(observed, now, self._end)
        if not outdated and start + len(chunk) > now:  # a copy: a caller may go on to write into its own
            self._chunk, self._observed, self._start = chunk.copy(), observed, start

    def action(self, step: int) -> np.ndarray | None:
        """The action [D] for ``step``; None where no chunk has one."""
        place = self.place(step)
        return None if place is None or self._chunk is None else self._chunk[place.index]

    def place(self, step: int) -> Place | None:
        """Where :meth:`action` of ``step`` comes from."""
        index = step - self._start
        return Place(self._observed, index) if 0 <= index < self._length else None

    def wants(self, step: int) -> bool:
        """Whether the next chunk should be decided on the observation of ``step``."""
        raise NotImplementedError

    def consumed(self, step: int) -> int | None:
        """How many actions of the newest chunk belong to steps before ``step``; None where there is no chunk."""
        return None if self._chunk is None else min(max(step - self._start, 0), len(self._chunk))

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunk = None

    @property
    def _length(self) -> int:
        return 0 if self._chunk is None else len(self._chunk)

    @property
    def _end(self) -> int | None:
        """The first step for which the chunk has no action."""
        return None if self._chunk is None else self._start + self._length


class OpenLoop(Chunks):
    """Execute the first ``steps`` actions of a chunk (None: all of them), then stand still and ask for the next.

    The arm waits where it is while the policy computes.
    """

    def __init__(self, steps: int | None = None) -> None:
        super().__init__()
        self._steps = None if steps is None else _positive("steps", steps)

    @property
    def _length(self) -> int:
        length = super()._length
        return length if self._steps is None else min(self._steps, length)

    def wants(self, step: int) -> bool:
        """When nothing is left of the chunk."""
        return self._end is None or step >= self._end


class RecedingHorizon(Chunks):
    """Ask again when ``steps`` actions of the newest chunk belong to the past, and go on with that one meanwhile.

    The new chunk replaces the rest of the old one from the action on whose turn it is: its first ``delay`` actions are
    never executed.  Naively the arm jumps there; see the module for the policy that prevents it.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = _positive("steps", steps)

    def wants(self, step: int) -> bool:
        """When ``steps`` actions have passed, or nothing is left."""
        return self._chunk is None or step >= self._start + min(self._steps, len(self._chunk))


class TemporalEnsembling(Chunks):
    """Ask in every step and execute the weighted mean of all chunks that have an action for it (ACT, arXiv 2304.13705).

    The weights are exp(-decay * i), where i = 0 is the oldest of those chunks.  Positions of joints are averaged as
    numbers: they lie between limits, so none of them wraps around.
    """

    def __init__(self, decay: float = 0.01) -> None:
        self._decay = decay
        # First step and actions, by the step observed, oldest first.
        self._chunks: dict[int, tuple[int, np.ndarray]] = {}

    def add(self, chunk: np.ndarray, observed: int, now: int) -> None:
        _check(chunk, observed, now)
        ends = [start + len(other) for start, other in self._chunks.values()]
        start = observed + _stood_still(observed, now, max(ends, default=None))
        chunks = {**self._chunks, observed: (start, chunk.copy())}
        self._chunks = {key: chunks[key] for key in sorted(chunks) if chunks[key][0] + len(chunks[key][1]) > now}

    def action(self, step: int) -> np.ndarray | None:
        votes = [self._chunks[place.chunk][1][place.index] for place in self._covering(step)]
        if not votes:
            return None
        weights = np.exp(-self._decay * np.arange(len(votes)))
        return np.average(np.stack(votes), 0, weights)

    def place(self, step: int) -> Place | None:
        """The newest chunk that has a say."""
        covering = self._covering(step)
        return covering[-1] if covering else None

    def wants(self, step: int) -> bool:
        """Always."""
        return True

    def consumed(self, step: int) -> int | None:
        if not self._chunks:
            return None
        start, chunk = list(self._chunks.values())[-1]
        return min(max(step - start, 0), len(chunk))

    def clear(self) -> None:
        self._chunks = {}

    def _covering(self, step: int) -> list[Place]:
        places = (Place(observed, step - start) for observed, (start, _) in self._chunks.items())
        return [place for place in places if 0 <= place.index < len(self._chunks[place.chunk][1])]


def _stood_still(observed: int, now: int, end: int | None) -> int:
    """How many steps from ``observed`` until ``now`` had no action: those from ``end`` on, all where it is None."""
    return now - observed if end is None else max(now - max(observed, end), 0)


def _check(chunk: np.ndarray, observed: int, now: int) -> None:
    if chunk.ndim != 2 or not len(chunk) or not np.isfinite(chunk).all():
        raise ContractError(
            f"a chunk of shape {list(chunk.shape)} is not [H,D] with finite numbers, so none of its actions is "
            "executed; look at the policy that made it."
        )
    if observed > now:
        raise ContractError(
            f"a chunk was observed at step {observed}, but step {now} is not executed yet, so it is not executed; "
            "let the policy answer with the step of the observation that it was given."
        )


def _positive(name: str, steps: int) -> int:
    if steps < 1:
        raise ContractError(f"{name} is {steps}, so no action would be executed; give 1 or more.")
    return steps
