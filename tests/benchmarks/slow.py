"""A simulator of known speed: environments that share one core, in any number of processes."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

from sims.toy.counting import CountingEnv
from vla_rl.contract.env import Step


class SlowEnv(CountingEnv):
    """The counting environment, of which one environment takes ``seconds`` a step; ``core`` is held meanwhile."""

    def __init__(self, num_envs: int, seconds: float, core: str) -> None:
        super().__init__(num_envs)
        self._seconds, self._core = seconds * num_envs, Path(core)

    def step(self, chunk: Any, observe: Any = "last") -> Step:
        with self._core.open("a") as core:
            fcntl.flock(core, fcntl.LOCK_EX)
            time.sleep(self._seconds)
        return super().step(chunk, observe)


def make(num_envs: int, seconds: float, core: str) -> SlowEnv:
    """See the class."""
    return SlowEnv(num_envs, seconds, core)
