"""Pairs of frames of one episode, and how much progress lies between them: what a progress critic learns from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.rewards.frames import LabelledFrames


@dataclass(frozen=True)
class FramePairs:
    """``B`` pairs of pictures under one instruction each, in either order of time.

    first, second  one picture of each pair; ``second.label`` says whether it shows the task done
    before, after  float32 [B], the progress in the first and in the second, 0 to 1
    """

    first: LabelledFrames
    second: LabelledFrames
    before: np.ndarray
    after: np.ndarray


def episode_progress(label: np.ndarray) -> np.ndarray:
    """Progress float32 [T] of an episode from ``label`` bool [T], in order of time.

    Of one that ends in success it is the share of time until the last success began, and 1 from there on (as VLAC takes
    the share of a demonstration's time).  Of any other it is 0 throughout: what was done there did not lead to what
    was asked for, whether it failed or was asked for something else.
    """
    if not label[-1]:
        return np.zeros(len(label), np.float32)
    misses = np.flatnonzero(~label)
    began = int(misses[-1]) + 1 if misses.size else 0
    return np.minimum(np.arange(len(label)) / max(began, 1), 1.0).astype(np.float32)


class PairSampler:
    """Draws pairs from the episodes of ``frames``, half of them from episodes that end in success.

    The second frame lies at any distance from the first, before or after it; in half of the pairs at most ``near``
    frames away, which is what a critic is asked about when it judges.  Raises UserError if no episode ends in success.
    """

    def __init__(self, frames: LabelledFrames, near: int, random: np.random.Generator) -> None:
        self._frames, self._near, self._random = frames, near, random
        tracks = frames.track_rows()
        self._tracks = [track for track in tracks if len(track) > 1]
        self._progress = np.zeros(len(frames), np.float32)
        for track in self._tracks:
            self._progress[track] = episode_progress(frames.label[track])
        good = np.array([bool(frames.label[track[-1]]) for track in self._tracks], bool)
        self._good, self._bad = np.flatnonzero(good), np.flatnonzero(~good)
        if not self._good.size:
            raise UserError(
                f"none of the {len(tracks)} episodes ends in success, so no progress can be learnt from them; add some "
                "that do."
            )

    def draw(self, batch: int) -> FramePairs:
        """``batch`` pairs."""
        index = np.array([self._pair(k % 2 == 0) for k in range(batch)])
        first, second = index[:, 0], index[:, 1]
        frames, progress = self._frames, self._progress
        return FramePairs(frames.select(first), frames.select(second), progress[first], progress[second])

    def batches(self, batch: int) -> Iterator[FramePairs]:
        """Endlessly many draws."""
        while True:
            yield self.draw(batch)

    def _pair(self, good: bool) -> tuple[int, int]:
        among = self._good if good or not self._bad.size else self._bad
        track = self._tracks[self._random.choice(among)]
        i, reach = int(self._random.integers(len(track))), self._near if self._random.random() < 0.5 else len(track)
        low, high = max(0, i - reach), min(len(track) - 1, i + reach)
        return int(track[i]), int(track[self._random.integers(low, high + 1)])
