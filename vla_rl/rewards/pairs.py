"""Pairs of frames of one episode with their progress: training data of a progress critic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.rewards.frames import LabelledFrames


@dataclass(frozen=True)
class FramePairs:
    """``B`` pairs of frames with one instruction each, in either order of time.

    first, second  the frames of each pair; ``second.label`` says whether it shows the task done
    before, after  float32 [B], progress in the first and in the second frame, 0 to 1
    """

    first: LabelledFrames
    second: LabelledFrames
    before: np.ndarray
    after: np.ndarray


def episode_progress(label: np.ndarray) -> np.ndarray:
    """Progress float32 [T] of an episode from ``label`` bool [T], in order of time.

    For an episode that ends in success it is the elapsed share of the time until its final success began, and 1 from
    then on (VLAC uses the share of a demonstration's time).  For any other episode it is 0 throughout: it did not lead
    to the instructed goal, because it failed or because the instruction names another one.
    """
    if not label[-1]:
        return np.zeros(len(label), np.float32)
    not_done = np.flatnonzero(~label)
    success_start = int(not_done[-1]) + 1 if not_done.size else 0
    return np.minimum(np.arange(len(label)) / max(success_start, 1), 1.0).astype(np.float32)


class PairSampler:
    """Draws pairs from the episodes of ``frames``, half of them from episodes that end in success.

    The second frame lies at any distance before or after the first; in half of the pairs at most ``near`` frames away,
    as in the pairs that a critic evaluates in use.  Raises UserError if no episode ends in success.
    """

    def __init__(self, frames: LabelledFrames, near: int, rng: np.random.Generator) -> None:
        self._frames, self._near, self._rng = frames, near, rng
        tracks = frames.track_indices()
        self._tracks = [track for track in tracks if len(track) > 1]
        self._progress = np.zeros(len(frames), np.float32)
        for track in self._tracks:
            self._progress[track] = episode_progress(frames.label[track])
        succeeded = np.array([bool(frames.label[track[-1]]) for track in self._tracks], bool)
        self._succeeded, self._failed = np.flatnonzero(succeeded), np.flatnonzero(~succeeded)
        if not self._succeeded.size:
            raise UserError(
                f"none of the {len(tracks)} episodes ends in success, so progress is undefined in them; add some that "
                "do."
            )

    def draw(self, batch: int) -> FramePairs:
        """``batch`` pairs."""
        index = np.array([self._draw_pair(k % 2 == 0) for k in range(batch)])
        first, second = index[:, 0], index[:, 1]
        frames, progress = self._frames, self._progress
        return FramePairs(frames.select(first), frames.select(second), progress[first], progress[second])

    def batches(self, batch: int) -> Iterator[FramePairs]:
        """An endless stream of draws."""
        while True:
            yield self.draw(batch)

    def _draw_pair(self, succeeded: bool) -> tuple[int, int]:
        candidates = self._succeeded if succeeded or not self._failed.size else self._failed
        track = self._tracks[self._rng.choice(candidates)]
        i, reach = int(self._rng.integers(len(track))), self._near if self._rng.random() < 0.5 else len(track)
        low, high = max(0, i - reach), min(len(track) - 1, i + reach)
        return int(track[i]), int(track[self._rng.integers(low, high + 1)])
