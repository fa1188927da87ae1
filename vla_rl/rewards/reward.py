"""What a reward model can do: see frames of several rows, read what was asked for, and judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vla_rl import pretrained
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.policy import State


@dataclass(frozen=True)
class Judgement:
    """What a reward model says about ``T`` frames of each of ``E`` rows.

    progress  float32 [E,T]  from 0 (nothing is done) to 1 (all is)
    done      bool [E,T]     the task is done; not latched, so whoever ends an episode ends it at the first True
    """

    progress: np.ndarray
    done: np.ndarray


@runtime_checkable
class Reward(Protocol):
    """Judges from pictures and words alone, so that it works in simulators, imagined worlds and on robots alike.

    What it must remember between calls (frames seen, how long something has been so) is in ``state``, one entry per
    row, which its caller resets with the row.
    """

    def initial_state(self, rows: int) -> State:
        """The memory of ``rows`` rows before their first frame, as {name: [E,...]}."""

    def reset_state(self, state: State, rows: Array) -> State:
        """``state`` with ``rows`` (int [R]) forgotten: their next frame is the first of a new episode."""

    def judge(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[Judgement, State]:
        """Judge the next ``T`` frames of every row, in order.

        ``frames`` {camera: uint8 [E,T,h,w,c]}, ``text`` [E] what was asked for, ``valid`` bool [E,T]: False where a
        frame only repeats the one before it because the row's episode ended.  Raises ContractError for cameras or
        picture sizes that the model does not know, and for words that it cannot read.
        """


def in_order(frames: Sequence[Observation]) -> dict[str, np.ndarray]:
    """The pictures of ``Step.frames`` (observe="all") as :meth:`Reward.judge` takes them: {camera: [E,T,h,w,c]}."""
    return {name: np.stack([frame.images[name] for frame in frames], axis=1) for name in frames[0].images}


def load_reward(folder: str | Path) -> Any:
    """The reward model in a checkpoint folder, whichever class wrote it."""
    return pretrained.load_module(folder, "reward")
