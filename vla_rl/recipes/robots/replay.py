"""A recorded episode once more on an arm: does it do again what it did?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from robot_drivers.config import Part, RobotConfig
from robot_drivers.motion import ramp
from robot_drivers.record import ControlStep, Decision, Query
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.recipes.robots.person import waiting
from vla_rl.recipes.robots.session import Execution, open_session

APPROACH_SPEED = 0.25  # share of the velocity limits, at most, on the way to the first recorded action
_SETTLE = 0.5  # s at the last action
_SPARE = 120.0  # s for the way to the first action, and for a person who takes over


class Replayer:
    """Decides once (``record.Decide``): a slow way to the first action, then the actions, then the last one held.

    Later decisions hold the arm where it is: after a person had control, the recording is not taken up again.

    actions   [N,D], one for each control step
    velocity  [D] of the way to the first action, per second
    """

    def __init__(self, actions: np.ndarray, velocity: np.ndarray, control_dt: float) -> None:
        self._actions, self._velocity, self._dt = actions, velocity, control_dt
        self._settle = np.repeat(actions[-1:], round(_SETTLE / control_dt), axis=0)
        self._asked = False
        self.over = False  # it was asked again
        self.begins = 0  # index in the chunk of the first recorded action

    def __call__(self, query: Query) -> Decision:
        """The whole chunk [H,D] first."""
        measured = np.asarray(query.obs.state[0], np.float64)
        if self._asked:
            self.over = True
            return Decision(measured[None])
        self._asked = True
        way = ramp(measured, self._actions[0], self._velocity, self._dt)
        self.begins = len(way) - 1
        return Decision(np.concatenate([way, self._actions[1:], self._settle]))

    def recorded(self, step: ControlStep) -> int | None:
        """Which of the actions was executed in ``step``; None before the first and after the last."""
        index = step.record.step_in_chunk - self.begins
        return index if step.record.source == "policy" and 0 <= index < len(self._actions) else None

    def ended(self, step: ControlStep) -> bool:
        """Whether nothing comes after ``step``."""
        last = self.begins + len(self._actions) + len(self._settle) - 1
        return self.over or step.record.step_in_chunk >= last


@dataclass(frozen=True)
class Replayed:
    """How a replay went.

    names      of the arm's joints
    distance   float64 [M,D]  measured position less the recorded one, when each recorded action was executed
    actions    N, how many there were to execute: M = N unless it ended early
    clipped    how many of them the supervisor changed
    outcome    of the episode, "" where nobody judged it
    """

    names: tuple[str, ...]
    distance: np.ndarray
    actions: int
    clipped: int
    outcome: str

    def __str__(self) -> str:
        executed = len(self.distance)
        lines = [f"{executed} of {self.actions} recorded control steps were executed, {self.clipped} of them clipped"]
        if self.outcome:
            lines[0] += f"; the episode ended by {self.outcome}"
        if executed:
            width = max(map(len, self.names))
            last, most = np.round(self.distance[-1], 4) + 0.0, np.abs(self.distance).max(axis=0)
            lines += [
                f"{name:{width}}  {end:+.4f} from the recording at the end, {far:.4f} at most"
                for name, end, far in zip(self.names, last, most, strict=True)
            ]
        return "\n".join(lines)


def replay(config: RobotConfig, dataset: Path, number: int, speed: float, show: Console) -> Replayed:
    """Play the actions of episode ``number`` of ``dataset`` at ``speed`` of its own, on a simulated arm in its scene.

    Raises UserError for an episode that does not exist, or that another arm recorded.
    """
    episode = load_demonstrations(dataset, [number])
    seconds = len(episode.action) / episode.fps / speed + _SPARE
    execution = Execution(Part("robot_drivers.executor:OpenLoop"), speed)
    slow = config.limits_of(config.open()).scaled(min(speed, APPROACH_SPEED))
    velocity = np.array([joint.velocity for joint in slow.joints])
    with closing(open_session(replace(config, cameras={}, seconds=seconds), execution, waiting(show))) as session:
        check_same_arm(episode, session.spec, dataset)
        actions, states = stretched(episode, session.spec.control_dt, speed)
        decide, title = Replayer(actions, velocity, session.spec.control_dt), f"Replay of episode {number}"
        session.prepare(title)
        played = session.play(decide, 1, max(0, int(episode.seed[0])))
        with session.display(show, 1) as display, closing(played) as steps:
            seen = []
            try:
                for step in steps:
                    seen.append(step)
                    display.step(title, step.record, step.stopped)
                    if decide.ended(step):
                        break
            except KeyboardInterrupt as stop:
                raise type(stop)("stopped; the arm was brought to rest.") from stop
            if not seen:
                raise UserError(
                    f"the arm measured no finite position, so episode {number} was not replayed; look at its sensors."
                )
            success = seen[-1].record.outcome == "success"
            display.ended(title, [one.record for one in seen], 1, int(success))
    return _compared(seen, decide, states, session.spec.action.names)


def _compared(seen: Sequence[ControlStep], decide: Replayer, states: np.ndarray, names: tuple[str, ...]) -> Replayed:
    pairs = [(step, index) for step in seen if (index := decide.recorded(step)) is not None]
    distance = [np.asarray(step.obs.state[0], np.float64) - states[index] for step, index in pairs]
    return Replayed(
        names,
        np.array(distance).reshape(len(pairs), len(names)),
        len(states),
        sum(bool(np.any(step.record.clipped)) for step, _ in pairs),
        seen[-1].record.outcome,
    )


def check_same_arm(episode: Demonstrations, spec: EnvSpec, dataset: Path) -> None:
    """Raises UserError unless ``episode`` has the joints of ``spec``, in its order, as actions and as state."""
    for what, recorded, has in (
        ("actions", episode.action_names, spec.action.names),
        ("states", episode.state_names, spec.state.names),
    ):
        if tuple(recorded) != tuple(has):
            raise UserError(
                f"the {what} of {str(dataset)!r} are {list(recorded)}, but {spec.name} has {list(has)}, so its joints "
                "would be mistaken for others; replay what was recorded on this arm."
            )


def stretched(episode: Demonstrations, control_dt: float, speed: float) -> tuple[np.ndarray, np.ndarray]:
    """Actions and states [N,D] of one episode for control steps of ``control_dt`` seconds, at ``speed`` of its own.

    Between recorded control steps they are interpolated linearly; the last is the last recorded one.
    """
    recorded = np.arange(len(episode.action), dtype=np.float64)
    step = control_dt * episode.fps * speed  # recorded control steps in one of the arm's
    count = int(np.ceil(recorded[-1] / step - 1e-9)) + 1
    times = np.minimum(np.arange(count) * step, recorded[-1])

    def at(values: np.ndarray) -> np.ndarray:
        return np.stack([np.interp(times, recorded, column) for column in values.astype(np.float64).T], axis=1)

    return at(episode.action), at(episode.state)
