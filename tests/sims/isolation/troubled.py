"""A counting environment whose worker gets into trouble: killed, stopped, failing, or returning a NaN."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sims.toy.counting import CountingEnv
from vla_rl.contract.env import Observation, Step


def killed() -> None:
    """As by the kernel when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def hung() -> None:
    """It neither answers nor ends, also when somebody lets it go on."""
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


def failing() -> None:
    """An exception of the simulator."""
    raise RuntimeError("the joint came off")


TROUBLES: dict[str, Callable[[], None]] = {"killed": killed, "hung": hung, "failing": failing, "nan": lambda: None}


class TroubledEnv(CountingEnv):
    """In trouble when ``method`` is called, in the worker that plays ``seed`` and ``times`` times in all.

    ``folder`` counts the times across workers.
    """

    def __init__(self, num_envs: int, method: str, trouble: str, folder: str, seed: int, times: int) -> None:
        self._when = method, trouble, Path(folder), seed, times
        super().__init__(num_envs)
        self._in_trouble("make")

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        obs = super().reset(env_ids, seeds)
        return replace(obs, state=obs.state * np.float32(np.nan)) if self._in_trouble("reset") else obs

    def step(self, chunk: Any, observe: Any = "last") -> Step:
        step = super().step(chunk, observe)
        trouble = self._in_trouble("step")
        return replace(step, reward=step.reward * np.float32(np.nan)) if trouble else step

    def snapshot(self, env_ids: Any) -> dict[str, np.ndarray]:
        self._in_trouble("snapshot")
        return super().snapshot(env_ids)

    def restore(self, env_ids: Any, snapshot: Any) -> Observation:
        self._in_trouble("restore")
        return super().restore(env_ids, snapshot)

    def _in_trouble(self, method: str) -> bool:
        when, trouble, folder, seed, times = self._when
        if method != when or (seed >= 0 and seed not in self._seed) or len(list(folder.iterdir())) >= times:
            return False
        (folder / str(os.getpid())).write_text(trouble)
        print("the last words", method, file=sys.stderr, flush=True)
        TROUBLES[trouble]()
        return True


def make(num_envs: int, method: str, trouble: str, folder: str, seed: int = -1, times: int = 1) -> TroubledEnv:
    """See the class."""
    return TroubledEnv(num_envs, method, trouble, folder, seed, times)


def lying(num_envs: int, what: str) -> CountingEnv:
    """A counting environment whose steps break its own spec in ``what``."""
    changes: dict[str, Callable[[Step], Step]] = {
        "dtype": lambda step: replace(step, reward=step.reward.astype(np.float64)),
        "shape": lambda step: replace(step, obs=replace(step.obs, state=step.obs.state[:, :2])),
        "task": lambda step: replace(step, obs=replace(step.obs, task=step.obs.task + 7)),
        "ends": lambda step: replace(step, cause=["bored"] * len(step.cause)),
        "cameras": lambda step: replace(step, obs=replace(step.obs, images={})),
    }

    class Lying(CountingEnv):
        def step(self, chunk: Any, observe: Any = "last") -> Step:
            return changes[what](super().step(chunk, observe))

    return Lying(num_envs)


def meeting(num_envs: int, folder: str, count: int) -> CountingEnv:
    """Its steps end when ``count`` processes with such an environment have begun one."""
    here = Path(folder)

    class Meeting(CountingEnv):
        def step(self, chunk: Any, observe: Any = "last") -> Step:
            (here / str(os.getpid())).touch()
            end = time.monotonic() + 60  # longer than any other process needs to begin
            while len(list(here.iterdir())) < count:
                if time.monotonic() > end:
                    raise RuntimeError(f"{count} processes did not compute at the same time")
                time.sleep(0.001)
            return super().step(chunk, observe)

    return Meeting(num_envs)


def unmade(num_envs: int) -> None:
    """Cannot be made."""
    raise ModuleNotFoundError(f"no module named 'simulator' for {num_envs}")


def variable(num_envs: int) -> CountingEnv:
    """Fails without its environment variable."""
    assert os.environ["OF_THE_WORKER"] == "7"
    return CountingEnv(num_envs)
