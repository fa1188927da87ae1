"""``Demonstrations`` to a LeRobotDataset v3.0 folder and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.damage import DamagedError, Problem
from vla_rl.experience.lerobot.disk import drop_lock, take_lock
from vla_rl.experience.lerobot.features import Feature, Schema
from vla_rl.experience.lerobot.live import RECORDING
from vla_rl.experience.lerobot.reader import DatasetReader, RecordedEpisode
from vla_rl.experience.lerobot.video import Codec, camera
from vla_rl.experience.lerobot.writer import DatasetWriter, repair

__all__ = ["Recording", "read", "repair", "schema_of"]

STATE, ACTION, SEED = "observation.state", "action", "complementary_info.seed"
_CAMERA = "observation.images."


def schema_of(episodes: Demonstrations, video: str = "auto", codec: Codec | None = None) -> Schema:
    """The columns that ``episodes`` need; ``video`` says which cameras become video, see ``video.camera``."""
    features = {
        _CAMERA + name: camera(frames.shape[1:], episodes.fps, video, codec) for name, frames in episodes.images.items()
    }
    features[STATE] = Feature("float32", episodes.state.shape[1:], list(episodes.state_names) or None)
    features[ACTION] = Feature("float32", episodes.action.shape[1:], list(episodes.action_names) or None)
    features |= {name: _column(values) for name, values in episodes.extras.items()}
    features[SEED] = Feature("int64")
    return Schema(episodes.fps, features, episodes.robot)


class Recording:
    """A dataset at ``root`` with the columns of the first episodes that are added; see ``DatasetWriter``.

    As a context manager it is the folder's one writer from its beginning: before the first episode is played.
    """

    def __init__(self, root: Path, video: str = "auto", codec: Codec | None = None) -> None:
        self.root = root
        self._video, self._codec = video, codec
        self._writer: DatasetWriter | None = None
        self._lock: int | None = None  # until there is a writer

    def add(self, episodes: Demonstrations) -> None:
        """Add all ``episodes``; each is synced to the disk before the next is written."""
        if self._writer is None:
            schema = schema_of(episodes, self._video, self._codec)
            self._writer = DatasetWriter(self.root, schema, episodes.tasks, lock=self._lock)
            self._lock = None
        _write(self._writer, episodes)

    def __enter__(self) -> Recording:
        self._lock = take_lock(self.root / RECORDING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)
        elif self._lock is not None:
            drop_lock(self.root / RECORDING, self._lock)


def _write(writer: DatasetWriter, episodes: Demonstrations) -> None:
    columns = {_CAMERA + name: frames for name, frames in episodes.images.items()}
    columns |= {STATE: episodes.state, ACTION: episodes.action, SEED: episodes.seed, **episodes.extras}
    texts = np.array(episodes.tasks, dtype=np.str_)[episodes.task]
    if len(set(episodes.tasks)) < len(episodes.tasks):
        raise ContractError("two tasks have the same text, so they would become one; give each its own text.")
    if any((episodes.time[begin:end] != np.arange(end - begin)).any() for begin, end in episodes.spans()):
        raise ContractError(
            "an episode's time does not count 0, 1, 2, ... as a dataset's frame index does; record it from its start."
        )
    for begin, end in episodes.spans():
        writer.add({name: values[begin:end] for name, values in columns.items()}, texts[begin:end].tolist())


def read(
    path: Path, chosen: Iterable[int] | None = None, on_damage: Callable[[Problem], None] | None = None
) -> Iterator[Demonstrations]:
    """The episodes of any dataset, one ``Demonstrations`` each, numbered as there; see ``DatasetReader.episodes``.

    ``observation.state`` and ``action`` are the state (without entries where there is none) and the action; every
    camera and every other column comes along.  Raises UserError when there is no ``action``.
    """
    reader = DatasetReader(path)
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
    images = {_camera_name(name, features): columns.pop(name) for name in reader.schema.cameras}
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
        fps=reader.fps,
        state_names=features[STATE].labels() if STATE in features else (),
        action_names=features[ACTION].labels(),
        extras=columns,
        robot=reader.schema.robot,
    )


def _camera_name(name: str, features: Iterable[str]) -> str:
    """``observation.images.front`` -> ``front``, ``observation.image`` -> ``image``, others as they are."""
    short = name.removeprefix(_CAMERA) if name.startswith(_CAMERA) else name.removeprefix("observation.")
    return name if short != name and _CAMERA + short in features and _CAMERA + short != name else short


def _column(values: np.ndarray) -> Feature:
    if values.dtype.kind == "U":
        return Feature("string")
    if values.dtype.kind not in "fiub":
        raise ContractError(
            f"a column of type {values.dtype} cannot be kept in a dataset; give numbers, truth values or text."
        )
    return Feature(str(values.dtype), values.shape[1:] or (1,))
