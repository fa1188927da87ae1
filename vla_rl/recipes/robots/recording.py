"""Episodes of an arm as a LeRobotDataset v3.0: what was seen and executed, and the labels of every control step."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from robot_drivers.limiting import REASONS
from robot_drivers.record import SOURCES, Record
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.datasets import Recording
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.recipes.robots.session import ControlStep

_LABEL = "complementary_info."
_NICE = 10  # of the thread that encodes videos: control and policy come first


def episode_of(seen: Sequence[ControlStep], spec: EnvSpec, seed: int) -> Demonstrations:
    """One episode as it was played; ``action`` is what was executed.

    Columns of its own: "intervention" (bool, LeRobot's name for a person in control) and "complementary_info." with
    requested [D], which is the executed position where ``asked`` is False, clipped [D], source (an index into
    ``record.SOURCES``), reason (into ``limiting.REASONS``, -1 for others), policy_version, chunk, step_in_chunk,
    latency (s) and captured (s since the episode's first measurement).
    """
    records = [one.record for one in seen]
    count, success = len(records), records[-1].outcome == "success"
    last = np.arange(count) == count - 1
    return Demonstrations(
        images={name: np.concatenate([one.obs.images[name] for one in seen]) for name in spec.images},
        state=np.concatenate([one.obs.state for one in seen]),
        task=np.concatenate([one.obs.task for one in seen]),
        time=np.arange(count),
        action=np.stack([record.executed for record in records]).astype(np.float32),
        episode=np.zeros(count, np.int64),
        seed=np.full(count, seed, np.int64),
        tasks=spec.tasks,
        fps=1.0 / spec.control_dt,
        state_names=spec.state.names,
        action_names=spec.action.names,
        extras={
            "next.reward": (last & success).astype(np.float32),
            "next.done": last,
            "next.success": last & success,
            **labels_of(records, records[0].captured),
        },
        robot=spec.name,
    )


def labels_of(records: Sequence[Record], start: float) -> dict[str, np.ndarray]:
    """The columns {name: [N,...]} of control steps beside what was seen and executed; ``start``: when the first was
    measured.
    """
    named = {_LABEL + name: values for name, values in _labels(records).items()}
    captured = np.array([record.captured - start for record in records])
    return {"intervention": np.array([one.intervened for one in records]), **named, f"{_LABEL}captured": captured}


def _labels(records: Sequence[Record]) -> dict[str, np.ndarray]:
    requested = np.stack([record.requested for record in records])
    executed = np.stack([record.executed for record in records])
    asked = np.isfinite(requested).all(axis=1)
    numbers = ("policy_version", "chunk", "step_in_chunk")
    return {
        "requested": np.where(asked[:, None], requested, executed).astype(np.float32),
        "asked": asked,
        "clipped": np.stack([record.clipped for record in records]),
        "source": np.array([SOURCES.index(record.source) for record in records]),
        "reason": np.array([REASONS.index(one.reason) if one.reason in REASONS else -1 for one in records]),
        "latency": np.array([record.latency for record in records], np.float32),
        **{name: np.array([getattr(record, name) for record in records], np.int64) for name in numbers},
    }


class Recorder:
    """Writes episodes in a thread of low priority, one after the other, while the next one is played.

    A context manager; at its end all episodes are on the disk and the dataset is finished.
    """

    def __init__(self, folder: Path) -> None:
        self.episodes = 0  # that were given
        self._recording = Recording(folder)
        self._thread = ThreadPoolExecutor(1, "recorder", initializer=step_back)
        self._writing: Future[None] | None = None

    def __enter__(self) -> Recorder:
        self._recording.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._wait()
        finally:
            self._thread.shutdown()
            self._recording.__exit__(None, None, None)  # what was recorded is whole, also after an error

    def add(self, episode: Demonstrations) -> None:
        """Write ``episode`` from now on; raises UserError when the one before could not be written."""
        self._wait()
        self._writing = self._thread.submit(self._recording.add, episode)
        self.episodes += 1

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()


def step_back() -> None:
    """Let control and policy go before the thread that calls this."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
