"""Demonstrations as LeRobotDataset v3.0 folders: saving, loading, recording episode by episode."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.contract.errors import UserError
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.disk import require_unlocked

if TYPE_CHECKING:
    from vla_rl.experience.lerobot.disk import Problem
    from vla_rl.experience.lerobot.translate import Recording


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
        with recording(writing, video) as dataset:
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
    path: Path, episodes: Iterable[int] | None = None, on_damage: Callable[[Problem], None] | None = None
) -> Demonstrations:
    """Read all, or the listed, ``episodes`` of any LeRobotDataset v3.0 folder; they are renumbered from 0.

    Raises UserError when ``path`` is no dataset, and DamagedError, naming file, column and episode, when a part of it
    cannot be read.  With ``on_damage`` the other parts are read, and ``on_damage`` is called with each problem.
    """
    parts = list(stream_demonstrations(path, episodes, on_damage))
    if not parts:
        raise UserError(
            f"{str(path)!r} holds no readable episodes, so there is nothing to imitate; record some with 'vla-rl "
            "collect'."
        )
    return Demonstrations.joined(parts)


def stream_demonstrations(
    path: Path, episodes: Iterable[int] | None = None, on_damage: Callable[[Problem], None] | None = None
) -> Iterator[Demonstrations]:
    """Like :func:`load_demonstrations`, but one episode at a time, with the dataset's episode numbers.

    For datasets that do not fit into memory.
    """
    stream: Iterator[Demonstrations] = _lerobot().read(Path(path), episodes, on_damage)
    return stream


def recording(path: Path, video: str = "auto") -> Recording:
    """A dataset that grows by episodes; each is on the disk when ``add`` returns.

    ``video`` as in :func:`save_demonstrations`.  Leaving the ``with`` block finishes the dataset; :func:`repair` does
    so after the process was killed.
    """
    dataset: Recording = _lerobot().Recording(path, video)
    return dataset


def repair(path: Path) -> list[Problem]:
    """Finish the recording of a killed process; returns the damaged episodes, which are moved aside."""
    problems: list[Problem] = _lerobot().repair(path)
    return problems


def move_aside(path: Path) -> Path | None:
    """Rename an existing dataset to the first free name ``path.1``, ``path.2``, ... and return it; None if none exists.

    Raises UserError when ``path`` is something else, and while another process records into it.
    """
    require_unlocked(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not ((path / "meta").is_dir() or (path / "recording").is_dir()):
        raise UserError(
            f"{str(path)!r} exists and is no dataset, so it was left alone and nothing written; choose another folder."
        )
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.replace(path, aside)
    return aside


def _lerobot() -> Any:
    """The package ``lerobot``, imported late because pyarrow and PyAV are optional dependencies."""
    try:
        from vla_rl.experience.lerobot import translate
    except ModuleNotFoundError as error:
        if error.name not in ("pyarrow", "av"):
            raise
        raise UserError(
            f"{error.name} is not installed, so datasets can be neither written nor read; pip install 'vla-rl[data]'."
        ) from error
    return translate
