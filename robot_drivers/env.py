"""One robot as an environment (``VecEnv`` with E = 1): a chunk is executed in real time, then the arm holds.

For what plays any environment: evaluation, recording, learning on the robot.  A policy that should not pause between
chunks runs in ``runtime.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from robot_drivers.driver import Asks, RobotSpec
from robot_drivers.record import Decision, Record, step_of
from robot_drivers.runtime import ControlProcess, Observe, measurement_of
from vla_rl.contract.env import Array, ArraySpec, EnvSpec, Observation, Step
from vla_rl.contract.env import Observe as Frames
from vla_rl.contract.errors import ContractError, NonFiniteError

_FOREVER = 1 << 62  # control steps: the arm waits between chunks, so this environment counts executed actions instead


def robot_env_spec(
    robot: RobotSpec, cameras: Mapping[str, tuple[int, int]], tasks: Sequence[str], time_limit: int, max_chunk: int
) -> EnvSpec:
    """The spec of ``robot`` with ``cameras`` {name: (height, width)}; ``time_limit`` in control steps."""
    return EnvSpec(
        name=robot.name,
        images={name: ArraySpec((*size, 3), "uint8", 0, 255, frame=name) for name, size in cameras.items()},
        state=robot.position,
        action=robot.position,
        tasks=tuple(tasks),
        control_dt=1 / robot.control_hz,
        time_limit=time_limit,
        max_chunk=max_chunk,
        profile="hardware",
    )


class RobotEnv:
    """The arm of a control process that executes whole chunks (``chunks.OpenLoop``).

    What a person, the supervisor or the robot did instead of the chunk is in ``executed`` and ``intervened``.  A robot
    that cannot reset its scene has a person do it, who is asked by ``ask``.
    """

    num_envs = 1

    def __init__(self, control: ControlProcess, spec: EnvSpec, observe: Observe, ask: Asks) -> None:
        self.spec, self._control, self._observe, self._ask = spec, control, observe, ask
        self._episode, self._time = 0, 0  # number; executed actions
        self._last: Step | None = None  # of an episode that has ended

    def reset(self, env_ids: Array, seeds: Array) -> Observation:
        """Prepare the scene, by the robot itself or by a person, and begin."""
        if len(env_ids) == 0 and self._episode:
            return self._seen(self._control.newest().record, self._time)
        if self._control.resets:
            self._control.reset(int(seeds[0]))
        else:
            self._ask("Prepare the scene for the next episode and press Enter.")
        self._episode, self._time, self._last = self._episode + 1, 0, None
        self._control.begin(self._episode, _FOREVER)
        while (record := self._next()).episode != self._episode:
            pass
        return self._seen(record, 0)

    def step(self, chunk: Array, observe: Frames = "last") -> Step:
        """Execute ``chunk`` [1,H,D] action by action; see ``VecEnv``."""
        actions = self._checked(np.asarray(chunk))
        horizon = len(actions)
        if self._last is not None:
            return step_of([], [self._last.obs], horizon, self._last.cause[0])
        actions = actions[: self.spec.time_limit - self._time]
        records, frames = self._executed(actions)
        self._time += len(records)
        ended = "time_limit" if self._time >= self.spec.time_limit and not records[-1].outcome else ""
        if ended:
            self._control.end(ended)
        step = step_of(records, frames, horizon, ended)
        self._last = step if step.done[0] else None
        return step

    def close(self) -> None:
        """Bring the arm to rest and disconnect it."""
        self._control.close()

    def _executed(self, actions: np.ndarray) -> tuple[list[Record], list[Observation]]:
        """The control steps of ``actions``, or of what was done instead of them, and the observations after each."""
        asked = self._control.newest().record.step
        self._control.decided(Decision(actions), asked)
        record = self._next()
        while record.heard < asked:  # on its way
            record = self._next()
        records = [record]
        frames: list[Observation] = []
        while len(frames) < len(records):
            record = self._next()
            frames.append(self._seen(record, self._time + len(frames) + 1))
            if len(records) < len(actions) and not records[-1].outcome:
                records.append(record)
        return records, frames

    def _checked(self, chunk: np.ndarray) -> np.ndarray:
        shape, most = chunk.shape, self.spec.max_chunk
        if len(shape) != 3 or shape[::2] != (1, self.spec.action_dim) or not 1 <= shape[1] <= most:
            raise ContractError(
                f"a chunk has shape {list(shape)}, not [1,H,{self.spec.action_dim}] with H up to {most}, so the robot "
                "does not move; send chunks of its spec."
            )
        if self._last is None and not np.isfinite(chunk).all():
            raise NonFiniteError("the chunk holds a NaN or infinity, so the robot does not move; look at the policy.")
        actions: np.ndarray = chunk[0]
        return actions

    def _next(self) -> Record:
        return self._control.receive().record

    def _seen(self, record: Record, time: int) -> Observation:
        return self._observe(measurement_of(record), time)
