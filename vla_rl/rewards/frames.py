"""Labelled frames: images, an instruction, and whether the image shows it fulfilled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.trust import read_arrays, write_arrays

_NAMES = ("text", "label", "episode")


@dataclass(frozen=True)
class LabelledFrames:
    """``N`` labelled frames.  One image may occur with several instructions.

    images {camera: uint8 [N,h,w,3]}, text [N] of str: the instruction, label bool [N]: whether the image shows it
    fulfilled, episode int64 [N]: the source.  Frames of one episode and instruction are in order of time.
    """

    images: dict[str, np.ndarray]
    text: np.ndarray
    label: np.ndarray
    episode: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.label)
        wrong = [name for name, image in self.images.items() if image.dtype != np.uint8 or image.ndim != 4]
        wrong += [name for name, item in self._arrays().items() if len(item) != count]
        wrong += [] if self.label.dtype == bool else ["label"]
        wrong += [] if self.text.dtype.kind == "U" else ["text"]
        if wrong or not self.images or not count:
            what = f"{wrong[0]!r} does not fit" if wrong else "there are none"
            raise ContractError(
                f"these are no labelled frames ({what}), so nothing can be trained on them; give images uint8 "
                "[N,h,w,3], text [N] of str, label bool [N] and episode int [N]."
            )

    def __len__(self) -> int:
        return len(self.label)

    def select(self, index: np.ndarray) -> LabelledFrames:
        images = {name: image[index] for name, image in self.images.items()}
        return LabelledFrames(images, self.text[index], self.label[index], self.episode[index])

    @classmethod
    def concatenate(cls, parts: Sequence[LabelledFrames]) -> LabelledFrames:
        images = {name: np.concatenate([part.images[name] for part in parts]) for name in parts[0].images}
        return cls(images, *(np.concatenate([getattr(part, name) for part in parts]) for name in _NAMES))

    def split(self, shares: Sequence[float], seed: int) -> list[LabelledFrames]:
        """One part per share; episodes are never split, so that no scene occurs in two parts.

        Raises UserError when there are fewer episodes than parts.
        """
        episodes = np.random.default_rng(seed).permutation(np.unique(self.episode))
        if len(episodes) < len(shares):
            raise UserError(
                f"{len(episodes)} episodes cannot be split into {len(shares)} parts, so nothing can be held out; "
                "label frames of more episodes."
            )
        ends = np.cumsum(shares) / sum(shares) * len(episodes)
        # Every part gets at least one episode.
        cuts = [max(i + 1, min(round(end), len(episodes) - len(shares) + i + 1)) for i, end in enumerate(ends[:-1])]
        return [self.select(np.isin(self.episode, part)) for part in np.split(episodes, cuts)]

    def tracks(self) -> list[LabelledFrames]:
        """The frames of each episode and instruction, in order of time."""
        return [self.select(index) for index in self.track_indices()]

    def track_indices(self) -> list[np.ndarray]:
        """Indices of the frames of each episode and instruction, in order of time."""
        found: dict[tuple[int, str], list[int]] = {}
        for i, key in enumerate(zip(self.episode.tolist(), self.text.tolist(), strict=True)):
            found.setdefault(key, []).append(i)
        return [np.array(index) for index in found.values()]

    def save(self, path: Path) -> None:
        """Write one compressed ``.npz`` atomically; raises UserError when it cannot be written."""
        try:
            write_arrays(path, self._arrays())
        except OSError as error:
            raise UserError(
                f"the labelled frames could not be written to {str(path)!r} ({error}), so the old file is unchanged; "
                "free some disk space or choose another folder."
            ) from error

    @classmethod
    def load(cls, path: Path) -> LabelledFrames:
        """Read what :meth:`save` wrote, or any ``.npz`` with the arrays ``images/CAMERA``, text, label, episode.

        Raises UserError when the file is missing or damaged or lacks one of them.
        """
        try:
            file = read_arrays(path)
            images = {name[len("images/") :]: file[name] for name in file if name.startswith("images/")}
            return cls(images, *(file[name] for name in _NAMES))
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{str(path)!r} holds no readable labelled frames ({error}), so no model can be trained on it; it "
                "should be an .npz with images/CAMERA, text, label and episode."
            ) from error

    def _arrays(self) -> dict[str, np.ndarray]:
        images = {f"images/{name}": image for name, image in self.images.items()}
        return images | {name: getattr(self, name) for name in _NAMES}


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
