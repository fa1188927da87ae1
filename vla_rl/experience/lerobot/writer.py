"""Writing a dataset one episode at a time: a killed process loses at most the episode that it was writing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.experience.lerobot import live
from vla_rl.experience.lerobot.compact import compact, recover
from vla_rl.experience.lerobot.disk import DamagedError, Problem, move, remove_locked, take_lock
from vla_rl.experience.lerobot.features import Schema, is_numeric
from vla_rl.experience.lerobot.live import Header, Limits
from vla_rl.experience.lerobot.video import FAILURES

_WRITE_ERRORS = (*FAILURES, pa.ArrowException)


class DatasetWriter:
    """A LeRobotDataset v3.0 in ``root``, new or grown by episodes with the same columns.

    :meth:`add` returns when an episode is synced to the disk, in a folder of its own that our reader can read.
    :meth:`finalise` turns these folders into v3.0 files, which lerobot can read.  As a context manager it finalises
    unless an exception is raised; :func:`repair` does so later for a process that was killed.

    ``tasks`` are texts whose numbers are fixed in advance.  An existing dataset keeps its limits and video settings.
    ``lock``: of ``disk.take_lock``, where the caller has it; it belongs to the writer from here on.
    Raises UserError when ``root`` is something else, ContractError when its columns differ.
    """

    def __init__(
        self,
        root: Path,
        schema: Schema,
        tasks: Sequence[str] = (),
        limits: Limits | None = None,
        lock: int | None = None,
    ) -> None:
        self.root = root
        self._header = _header(root, schema, tasks, limits or Limits())
        self._lock, self._begun = lock, False
        self._count = 0

    @property
    def schema(self) -> Schema:
        """The columns that :meth:`add` expects."""
        return self._header.schema

    def add(self, columns: Mapping[str, np.ndarray], tasks: str | Sequence[str]) -> int:
        """Keep one episode and return its number.

        ``columns`` {name: [n,*shape], or [n] for shape (1,)} with the schema's names and dtypes, cameras as uint8
        [n,h,w,c]; ``tasks`` is one text, or one per frame.  Raises ContractError or NonFiniteError for wrong
        columns and UserError when writing fails; the episode is then not added, and the others stay.
        """
        length = _check(self.schema, columns)
        texts = [tasks] * length if isinstance(tasks, str) else list(tasks)
        if len(texts) != length:
            raise ContractError(
                f"an episode of {length} frames comes with {len(texts)} task texts, so they cannot be matched; give "
                "one text, or one per frame."
            )
        table = live.task_table(texts)
        numbers = np.array([table.index(text) for text in texts])
        shaped = {
            name: np.asarray(columns[name]).reshape(length, *([] if item.shape == (1,) else item.shape))
            for name, item in self.schema.features.items()
        }
        try:
            self._begin()
            folder = live.next_folder(self.root, self._count)
            live.write(folder, self.schema, shaped, table, numbers)
        except _WRITE_ERRORS as error:
            self._abandon()
            raise UserError(
                f"the episode could not be written to {str(self.root)!r} ({_reason(error)}), so it is not in the "
                "dataset, but those before it are; free some disk space or choose another folder."
            ) from error
        return self._count + len(live.folders(self.root, self._count)) - 1

    def finalise(self, splits: Mapping[str, float] | None = None) -> None:
        """Turn all added episodes into v3.0 files; raises DamagedError when an episode has changed on the disk.

        Such an episode is moved aside and all others are finished.  ``splits`` {"train": 0.9, "validation": 0.1} are
        shares of all episodes, in their order; without them, new episodes join the split of the last one.
        """
        if splits is not None and (min(splits.values(), default=0) <= 0 or abs(sum(splits.values()) - 1) > 1e-6):
            raise ContractError(
                f"the splits {dict(splits)} do not share all episodes, so nothing was finished; give positive shares "
                "that add up to 1."
            )
        problems = list[Problem]()
        if self._lock is not None or (self.root / live.RECORDING).exists():
            self._hold()
            problems = _finish(self.root, splits)
        self.close()
        if problems:
            raise DamagedError(self.root, problems[0])

    def close(self) -> None:
        """Release the lock for other writers; added episodes stay as they are."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock, self._begun = None, False

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finalise()
        finally:
            self.close()

    def _begin(self) -> None:
        """Before the first episode: take the lock, recover from a killed process, write the header."""
        self._hold()
        if self._begun:
            return
        self._begun = True
        recover(self.root)
        self._count = live.read(self.root).total if (self.root / live.INFO).exists() else 0
        self._header.save(self.root / live.RECORDING)

    def _hold(self) -> None:
        """Take the lock, or see that the folder is still the one that it is of."""
        if self._lock is None:
            self._lock = take_lock(self.root / live.RECORDING)
        _require_own(self.root / live.RECORDING, self._lock)

    def _abandon(self) -> None:
        """Remove everything but finished episodes."""
        recording = self.root / live.RECORDING
        for leftover in recording.glob("episode-*.writing"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not any(recording.glob("episode-*")) and not (recording / live.DAMAGED).exists():
            with suppress(OSError):
                remove_locked(recording)
            self.close()
            if self.root.is_dir() and not any(self.root.iterdir()):
                self.root.rmdir()


def repair(root: Path) -> list[Problem]:
    """Finish the recording of a process that was killed; returns the damaged episodes.

    All episodes that were added become v3.0 files.  Those whose files no longer match their SHA-256 are moved to
    ``recording/damaged``.  Raises UserError when there is nothing to repair, or while another process writes.
    """
    if not (root / live.RECORDING).is_dir():
        raise UserError(
            f"{str(root)!r} holds no unfinished recording, so there is nothing to repair; read it as it is."
        )
    handle = take_lock(root / live.RECORDING)
    try:
        return _finish(root)
    finally:
        os.close(handle)


def _finish(root: Path, splits: Mapping[str, float] | None = None) -> list[Problem]:
    recording = root / live.RECORDING
    try:
        recover(root)
        if live.is_blank(recording):
            remove_locked(recording)
            return []
        known, header = live.read(root), Header.load(recording)
        _require_whole(known)
        episodes, problems = [], []
        for i, folder in enumerate(live.folders(root, known.total)):
            try:
                episodes.append(live.load(folder, root, known.total + i))
            except DamagedError as error:
                problems.append(error.problem)
                move(folder, recording / live.DAMAGED / folder.name)
        if episodes:
            compact(root, header, known, episodes, splits or {})
    except _WRITE_ERRORS as error:
        raise UserError(
            f"the episodes in {str(recording)!r} could not be made into v3.0 files ({_reason(error)}), so they stay "
            "where they are; free some disk space and repair the dataset."
        ) from error
    if not (recording / live.DAMAGED).exists():
        remove_locked(recording)
    return problems


def _header(root: Path, schema: Schema, tasks: Sequence[str], limits: Limits) -> Header:
    for name, feature in schema.features.items():
        if feature.dtype not in ("image", "video", "string") and not is_numeric(feature.dtype):
            raise ContractError(
                f"column {name!r} has the type {feature.dtype!r}, which vla-rl does not write; use a numpy type, "
                "'string', 'image' or 'video'."
            )
    recording = root / live.RECORDING
    if not root.exists() or (root.is_dir() and set(root.iterdir()) <= {recording} and live.is_blank(recording)):
        return Header(schema, tuple(tasks), limits)
    if not (root / live.INFO).exists() and not (recording / live.HEADER).exists():
        raise UserError(
            f"{str(root)!r} exists and is no dataset, so nothing is written into it; choose another folder."
        )
    known = live.read(root)
    _require_whole(known)
    if not known.schema.same_columns(schema):
        raise ContractError(
            f"{str(root)!r} {_difference(known.schema, schema)}, so the episodes cannot be added to it; choose another "
            "folder."
        )
    if (recording / live.HEADER).exists():
        header = Header.load(recording)
        return Header(header.schema, live.task_table(header.tasks, tasks), header.limits)
    info = known.info
    kept = Limits(info["data_files_size_in_mb"], info["video_files_size_in_mb"], info["chunks_size"])
    return Header(known.schema, live.task_table(known.tasks, tasks), kept)


def _difference(known: Schema, other: Schema) -> str:
    if abs(known.fps - other.fps) >= 1e-6:
        return f"has {known.fps:g} frames per second and not {other.fps:g}"
    for name in {**known.features, **other.features}:
        mine, theirs = known.features.get(name), other.features.get(name)
        if mine is None or theirs is None:
            return f"{'lacks' if mine is None else 'has'} the column {name!r}, unlike them"
        if (mine.dtype, mine.shape, mine.labels()) != (theirs.dtype, theirs.shape, theirs.labels()):
            return f"has another type, shape or names in its column {name!r}"
    return "has other columns"


def _require_whole(known: live.Metadata) -> None:
    if known.problems:
        raise DamagedError(known.root, known.problems[0])
    if known.rows and known.rows[-1].index >= known.total:
        raise UserError(
            f"the episodes of {str(known.root)!r} have numbers up to {known.rows[-1].index} but are {known.total}, so "
            "a new one would get a number that is taken; record into a new folder, and learn from both."
        )


def _check(schema: Schema, columns: Mapping[str, np.ndarray]) -> int:
    """The number of frames; raises ContractError or NonFiniteError when ``columns`` do not fit."""
    if set(columns) != set(schema.features):
        raise ContractError(
            f"an episode has the columns {sorted(columns)} but the dataset has {sorted(schema.features)}, so it cannot "
            "be added; give exactly those."
        )
    lengths = {name: len(values) for name, values in columns.items()}
    length = next(iter(lengths.values()))
    if length < 1 or set(lengths.values()) != {length}:
        raise ContractError(
            f"the columns of an episode have {lengths} frames, so it cannot be added; give all the same."
        )
    for name, feature in schema.features.items():
        values = np.asarray(columns[name])
        wanted = "uint8" if feature.is_camera else feature.dtype
        right = values.dtype.kind == "U" if wanted == "string" else str(values.dtype) == wanted
        shapes = {(length, *feature.shape)} | ({(length,)} if feature.shape == (1,) else set())
        if not right or values.shape not in shapes:
            raise ContractError(
                f"column {name!r} of an episode is {values.dtype}{list(values.shape)} but {wanted}"
                f"{[length, *feature.shape]} is declared, so it cannot be added; mend one of them."
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            frame = int(np.argwhere(~np.isfinite(values))[0][0])
            raise NonFiniteError(
                f"column {name!r} of an episode is not finite in frame {frame}, so it was not added; leave such "
                "episodes out or replace the number."
            )
    return length


def _require_own(recording: Path, lock: int) -> None:
    """Raise UserError when the folder that this process has locked is no longer at its place."""
    own = recording / live.LOCK
    if not own.exists() or not os.path.samestat(own.stat(), os.fstat(lock)):
        raise UserError(
            f"{str(recording.parent)!r} was moved or removed while this process recorded into it, so the episode is "
            "not in the dataset, but those before it are where the folder went; start again in a new folder."
        )


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
