"""The reward model protocol: progress and success from frames and an instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vla_rl import pretrained
from vla_rl.contract.env import Array
from vla_rl.contract.policy import State


@dataclass(frozen=True)
class RewardOutput:
    """The output of a reward model for ``T`` frames of each of ``E`` environments.

    progress  float32 [E,T]  0 (nothing is done) to 1 (the task is done)
    done      bool [E,T]     the task is done; not latched, so an episode ends at the first True
    """

    progress: np.ndarray
    done: np.ndarray


@runtime_checkable
class Reward(Protocol):
    """Evaluates images and instructions only, so that it works in simulators, world models and on robots.

    What it remembers between calls (earlier frames, durations) is its ``state``, with one entry per environment; the
    caller resets it with the environment.
    """

    def initial_state(self, num_envs: int) -> State:
        """The state of ``num_envs`` environments before their first frame, {name: [E,...]}."""

    def reset_state(self, state: State, env_ids: Array) -> State:
        """``state`` with the initial one in ``env_ids`` (int [R]): their next frame is the first of an episode."""

    def evaluate(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[RewardOutput, State]:
        """Evaluate the next ``T`` frames of every environment, in order.

        ``frames`` {camera: uint8 [E,T,h,w,c]}, ``text`` [E] instructions, ``valid`` bool [E,T]: False where a frame
        repeats the one before it because the episode has ended.  Raises ContractError for cameras or image sizes that
        do not fit the model, and for unknown words.
        """


def load_reward(folder: str | Path) -> Any:
    """The reward model in a checkpoint folder, by the class that wrote it."""
    return pretrained.load_module(folder, "reward")
