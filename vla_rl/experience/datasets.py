"""Demonstrations as LeRobotDataset folders: saving, loading, recording episode by episode.

pyarrow and PyAV are optional dependencies, so what needs them is imported when it is used.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.contract import hub
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import installed
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.disk import DamagedError, Problem, drop_lock, free_name, require_unlocked, take_lock

if TYPE_CHECKING:
    from vla_rl.experience.lerobot.features import Schema
    from vla_rl.experience.lerobot.reader import DatasetReader, RecordedEpisode
    from vla_rl.experience.lerobot.writer import DatasetWriter

STATE, ACTION, SEED = "observation.state", "action", "complementary_info.seed"
_CAMERA, _RECORDING = "observation.images.", "recording"


def _require_libraries() -> None:
    """Raise UserError where pyarrow or PyAV are missing."""
    for library in ("pyarrow", "av"):
        installed(library, "datasets can be neither written nor read", "data")


class Recording:
    """A dataset at ``root`` that grows by episodes, with the columns of the first ones; see ``DatasetWriter``.

    ``video`` as in :func:`save_demonstrations`.  As a context manager it is the folder's one writer from its beginning:
    before the first episode is played.  Leaving it finishes the dataset; :func:`repair` does so after the process was
    killed.
    """

    def __init__(self, root: Path, video: str = "auto") -> None:
        """Raises UserError where pyarrow or PyAV are missing."""
        _require_libraries()
        self.root, self._video = root, video
        self._writer: DatasetWriter | None = None
        self._lock: int | None = None  # until there is a writer

    def add(self, episodes: Demonstrations) -> None:
        """Add all ``episodes``; each is synced to the disk before the next is written."""
        if self._writer is None:
            from vla_rl.experience.lerobot.writer import DatasetWriter

            schema = schema_of(episodes, self._video)
            self._writer = DatasetWriter(self.root, schema, episodes.tasks, lock=self._lock)
            self._lock = None
        columns = {_CAMERA + name: frames for name, frames in episodes.images.items()}
        columns |= {STATE: episodes.state, ACTION: episodes.action, SEED: episodes.seed, **episodes.extras}
        texts = np.array(episodes.tasks, dtype=np.str_)[episodes.task]
        if len(set(episodes.tasks)) < len(episodes.tasks):
            raise ContractError("two tasks have the same text, so they would become one; give each its own text.")
        if any((episodes.time[begin:end] != np.arange(end - begin)).any() for begin, end in episodes.spans()):
            raise ContractError(
                "an episode's time does not count 0, 1, 2, ... as a dataset's frame index does; record it from its "
                "start."
            )
        for begin, end in episodes.spans():
            self._writer.add({name: values[begin:end] for name, values in columns.items()}, texts[begin:end].tolist())

    def __enter__(self) -> Recording:
        self._lock = take_lock(self.root / _RECORDING)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._writer is not None:
            self._writer.__exit__(*error)
        elif self._lock is not None:
            drop_lock(self.root / _RECORDING, self._lock)


recording = Recording  # what programs from before call it


def save_demonstrations(episodes: Demonstrations, path: Path, video: str = "auto") -> None:
    """Write a LeRobotDataset v3.0 folder; an existing dataset at ``path`` is moved to ``path.1``, ``path.2``, ...

    ``video``: "never" keeps every pixel (PNG), "always" makes AV1 videos of all cameras, "auto" only of those cameras
    whose videos are smaller (``lerobot.video.camera``).  Raises UserError when the folder cannot be written; nothing
    has changed then.
    """
    writing = path.with_name(path.name + ".writing")
    require_unlocked(writing)
    shutil.rmtree(writing, ignore_errors=True)
    try:
        with Recording(writing, video) as dataset:
            dataset.add(episodes)
        move_aside(path)
        os.replace(writing, path)
    except OSError as error:
        raise UserError(
            f"the episodes could not be written to {str(path)!r} ({error.strerror}), so the folder has not changed; "
            "free some disk space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def load_demonstrations(
    path: str | Path,
    episodes: Iterable[int] | None = None,
    on_damage: Callable[[Problem], None] | None = None,
    cameras: Collection[str] = (),
) -> Demonstrations:
    """Read all, or the listed, ``episodes`` of any LeRobotDataset (v3.0, v2.1, v2.0); they are renumbered from 0.

    ``path`` may be its name on the Hugging Face hub, and ``cameras`` those that are read, () for all but those of
    depth, which keep its type and unit: only what they need is downloaded.
    Raises UserError when ``path`` is no dataset, and DamagedError, naming file, column and episode, when a part of it
    cannot be read.  With ``on_damage`` the other parts are read, and ``on_damage`` is called with each problem.
    """
    return joined_episodes(path, list(stream_demonstrations(path, episodes, on_damage, cameras)))


def joined_episodes(path: str | Path, parts: Sequence[Demonstrations]) -> Demonstrations:
    """Episodes of the dataset ``path``, renumbered from 0; raises UserError where there are none."""
    if not parts:
        raise UserError(
            f"{str(path)!r} holds no readable episodes, so there is nothing to imitate; record some with 'vla-rl "
            "collect'."
        )
    return Demonstrations.joined(parts)


def stream_demonstrations(
    path: str | Path,
    episodes: Iterable[int] | None = None,
    on_damage: Callable[[Problem], None] | None = None,
    cameras: Collection[str] | None = (),
) -> Iterator[Demonstrations]:
    """Like :func:`load_demonstrations`, but one episode at a time, numbered as in the dataset.

    ``cameras`` None: no pictures.

    ``observation.state`` and ``action`` are the state (without entries where there is none) and the action; every
    camera and every other column comes along.  Raises UserError when there is no ``action``.
    """
    _require_libraries()
    chosen = None if episodes is None else list(episodes)
    reader = _opened(str(path), chosen, cameras)
    if ACTION not in reader.names:
        raise UserError(
            f"{str(path)!r} has no column {ACTION!r}, so there is nothing to imitate; its columns are "
            f"{', '.join(reader.names)}."
        )
    for episode in reader.episodes(chosen, on_damage=on_damage):
        problem = _not_finite(episode)
        if problem is None:
            yield _demonstrations(reader, episode)
        elif on_damage is None:
            raise DamagedError(reader.root, problem)
        else:
            on_damage(problem)


def _opened(path: str, chosen: list[int] | None, cameras: Collection[str] | None) -> DatasetReader:
    """The reader of ``cameras``; of a dataset on the hub, what its ``chosen`` episodes need is there."""
    from vla_rl.experience.lerobot.lance import require_lance
    from vla_rl.experience.lerobot.reader import DatasetReader

    found = hub.repository(path, "dataset")
    root = Path(path) if found is None else found.download((hub.DATASET_META,))
    reader = _seeing(DatasetReader(root), path, cameras)
    if found is None:
        return reader
    if reader.is_lance:
        require_lance(root)  # before anything large is fetched
    wanted = sorted(reader.files(chosen))
    missing = [file for file in wanted if reader.is_lance or not (root / file).exists()]
    if not missing:
        return reader
    names = [glob.escape(file) for file in missing]
    if reader.is_lance:  # what is missing of a table, only the client knows
        names = [os.path.join(name, "*") for name in names]
    elif chosen is None:  # the client compares every file with every name, and v2 has some for each episode
        names = sorted({os.path.join(os.path.dirname(name), "*") for name in names})
    replace(found, revision=root.name).download(names)
    return _seeing(DatasetReader(root), path, cameras)


def _seeing(reader: DatasetReader, path: str, cameras: Collection[str] | None) -> DatasetReader:
    """``reader`` of ``cameras`` alone, if any; raises UserError for one that the dataset does not have."""
    own = _cameras(reader)
    if cameras is None:
        reader.names = [name for name in reader.names if name not in own.values()]
        return reader
    if missing := [name for name in cameras if name not in own]:
        raise UserError(
            f"the dataset {path!r} has no camera {missing[0]!r}, so nothing was read; it has "
            f"{', '.join(own) or 'none'}."
        )
    if cameras:
        others = [name for name in reader.names if name not in own.values()]
        reader.names = others + [name for short, name in own.items() if short in cameras]
    return reader


def _cameras(reader: DatasetReader) -> dict[str, str]:
    """The columns of pictures by their cameras' names."""
    features = reader.schema.features
    return {_camera_name(name, features): name for name, item in features.items() if item.is_picture}


def depth_cameras(path: str | Path) -> list[str]:
    """The cameras of a dataset whose pictures are distances; they are read only where they are named."""
    from vla_rl.experience.lerobot.reader import DatasetReader

    _require_libraries()
    found = hub.repository(str(path), "dataset")
    reader = DatasetReader(Path(path) if found is None else found.download((hub.DATASET_META,)))
    return [name for name, column in _cameras(reader).items() if reader.schema.features[column].is_depth]


def repair(path: Path) -> list[Problem]:
    """Finish the recording of a killed process; returns the damaged episodes, which are moved aside."""
    _require_libraries()
    from vla_rl.experience.lerobot import writer

    return writer.repair(path)


def move_aside(path: Path, show: Callable[[str], object] = lambda said: None) -> Path | None:
    """Rename an existing dataset to the first free name ``path.1``, ``path.2``, ... and return it; None if none exists.

    ``show`` is told.
    Raises UserError when ``path`` is something else, and while another process records into it.
    """
    require_unlocked(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not ((path / "meta").is_dir() or (path / _RECORDING).is_dir()):
        raise UserError(
            f"{str(path)!r} exists and is no dataset, so it was left alone and nothing written; choose another folder."
        )
    aside = free_name(path)
    os.replace(path, aside)
    show(f"an earlier dataset was in {path}; it is now {aside}")
    return aside


def schema_of(episodes: Demonstrations, video: str = "auto") -> Schema:
    """The columns that ``episodes`` need; ``video`` says which cameras become video, see ``lerobot.video.camera``."""
    from vla_rl.experience.lerobot.features import Feature, Schema
    from vla_rl.experience.lerobot.video import camera

    features = {
        _CAMERA + name: camera(frames.shape[1:], episodes.fps, video) for name, frames in episodes.images.items()
    }
    features[STATE] = Feature("float32", episodes.state.shape[1:], list(episodes.state_names) or None)
    features[ACTION] = Feature("float32", episodes.action.shape[1:], list(episodes.action_names) or None)
    for name, values in episodes.extras.items():
        if values.dtype.kind not in "fiubU":
            raise ContractError(
                f"a column of type {values.dtype} cannot be kept in a dataset; give numbers, truth values or text."
            )
        text = values.dtype.kind == "U"
        features[name] = Feature("string") if text else Feature(str(values.dtype), values.shape[1:] or (1,))
    features[SEED] = Feature("int64")
    return Schema(episodes.fps, features, episodes.robot)


def _not_finite(episode: RecordedEpisode) -> Problem | None:
    """The first number of state or action that is NaN or infinite."""
    for name in (STATE, ACTION):
        values = episode.columns.get(name, np.zeros(0))
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            frame = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).argmax())
            return Problem("data", f"is not finite in frame {frame}", (episode.index,), name)
    return None


def _demonstrations(reader: DatasetReader, episode: RecordedEpisode) -> Demonstrations:
    columns, features, count = dict(episode.columns), reader.schema.features, len(episode.time)
    images = {short: columns.pop(name) for short, name in _cameras(reader).items() if name in columns}
    state = columns.pop(STATE, np.zeros((count, 0))).astype(np.float32).reshape(count, -1)
    action = columns.pop(ACTION).astype(np.float32).reshape(count, -1)
    seed = columns.pop(SEED, np.full(count, -1)).astype(np.int64)
    return Demonstrations(
        images=images,
        state=state,
        task=episode.task.astype(np.int64),
        time=episode.time.astype(np.int64),
        action=action,
        episode=np.full(count, episode.index, np.int64),
        seed=seed,
        tasks=episode.tasks,
        fps=reader.schema.fps,
        state_names=features[STATE].labels() if STATE in features else (),
        action_names=features[ACTION].labels(),
        extras=columns,
        robot=reader.schema.robot,
    )


def _camera_name(name: str, features: Iterable[str]) -> str:
    """``observation.images.front`` -> ``front``, ``observation.image`` -> ``image``, others as they are."""
    short = name.removeprefix(_CAMERA) if name.startswith(_CAMERA) else name.removeprefix("observation.")
    return name if short != name and _CAMERA + short in features and _CAMERA + short != name else short
