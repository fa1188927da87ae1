"""A disk that loses power: whatever was not synced may be lost, in part or whole, in any combination."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fleet.sqlite_files import NAME, VFS, PowerCut
from vla_rl.fleet.disk import Disk, File

FOLDER = -1  # in place of a file's number
SECTOR = 64  # bytes that are written together; real ones are larger, and a record of a test smaller


class Write(NamedTuple):
    offset: int
    data: bytes


class Truncate(NamedTuple):
    size: int


class Point(NamedTuple):
    """One thing that a program asked of the disk: the n-th, "write", "sync", ... and of which file."""

    number: int
    what: str
    name: str


Content = tuple[bytes, list[Write | Truncate]]


class TornDisk(Disk):
    """A disk below ``root``, whose files are real ones: what the operating system has in memory.

    ``before(point)`` is called before every change and every sync; it may raise OSError, or PowerCut by ``cut``.
    ``taken``: how many bytes of a write the disk takes at most, None for all.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.points = root, 0
        self.before: Callable[[Point], None] = lambda point: None
        self.taken: int | None = None
        self.room = 1 << 40
        self.identity_of_machine = "machine"
        self._off = False
        self._files: dict[int, Content] = {}
        self._names: dict[Path, int] = {}  # those in memory
        self._safe_names: dict[Path, int] = {}
        self._changed_names: list[tuple[Path | None, Path | None, int]] = []  # (old, new, file): not synced yet
        VFS.watchers[root] = self

    # What the operating system is asked

    def make_folder(self, folder: Path) -> None:
        self._point("folder", folder)
        super().make_folder(folder)
        self._rename(None, folder, FOLDER)

    def open(self, path: Path) -> File:
        if not path.exists():
            self.created(path)
        return _TornFile(self, path, super().open(path))

    def rename(self, path: Path, target: Path) -> None:
        self._point("rename", path)
        super().rename(path, target)
        change = (path, target, self._names[path])
        _change(self._names, *change)
        self._changed_names.append(change)

    def remove(self, path: Path) -> None:
        self.removed(path)
        super().remove(path)

    def sync_folder(self, folder: Path) -> None:
        self.synced_names(folder)

    def free(self, folder: Path) -> int:
        return self.room

    def database(self, path: Path) -> sqlite3.Connection:
        uri = f"{path.as_uri()}?vfs={NAME}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0)

    # What is seen of it, also by SQLite's files

    def created(self, path: Path) -> None:
        self._point("create", path)
        number = max(self._files, default=0) + 1
        self._files[number] = (b"", [])
        self._rename(None, path, number)

    def wrote(self, path: Path, offset: int, data: bytes) -> None:
        self._point("write", path)
        self._files[self._names[path]][1].append(Write(offset, data))

    def truncated(self, path: Path, size: int) -> None:
        self._point("truncate", path)
        self._files[self._names[path]][1].append(Truncate(size))

    def synced(self, path: Path) -> None:
        self._point("sync", path)
        number = self._names[path]
        self._files[number] = (_applied(*self._files[number]), [])

    def synced_names(self, folder: Path) -> None:
        self._point("sync_folder", folder)
        here = [change for change in self._changed_names if folder in {p.parent for p in change[:2] if p}]
        self._changed_names = [change for change in self._changed_names if change not in here]
        for change in here:
            _change(self._safe_names, *change)

    def removed(self, path: Path) -> None:
        self._point("remove", path)
        self._rename(path, None, self._names.pop(path))

    def _rename(self, old: Path | None, new: Path | None, number: int) -> None:
        if new is not None:
            self._names[new] = number
        self._changed_names.append((old, new, number))

    def _point(self, what: str, path: Path) -> None:
        if self._off:
            raise PowerCut
        self.points += 1
        self.before(Point(self.points, what, path.name))

    def cut(self) -> None:
        """No power from now on."""
        self._off = True
        raise PowerCut

    def kill(self, close: Callable[[], None]) -> None:
        """The process ends without another word to the disk: ``close`` releases what it held."""
        self._off = True
        with contextlib.suppress(OSError, sqlite3.Error, PowerCut):
            close()
        self._off = False

    def adopt(self) -> None:
        """Take what is below ``root`` for files that were synced."""
        for number, path in enumerate(sorted(self.root.rglob("*"))):
            self._names[path] = self._safe_names[path] = FOLDER if path.is_dir() else number
            if path.is_file():
                self._files[number] = (path.read_bytes(), [])

    # What is left

    def left(self, target: Path, what: str, seed: int = 0) -> TornDisk:
        """A disk below ``target`` with what a power cut leaves of what was not synced: "nothing", "all", or "torn".

        Torn: any of the changes, and of a write any of its sectors, some of them rubbish.
        """
        chance = random.Random(seed)
        target.mkdir()
        disk, names = TornDisk(target), dict(self._safe_names)
        for change in self._changed_names:
            if _kept(what, chance):
                _change(names, *change)
        for path, number in sorted(names.items()):
            parents = [parent for parent in path.parents if self.root in parent.parents]
            if all(names.get(parent) == FOLDER for parent in parents):
                self._leave(disk, target / path.relative_to(self.root), number, what, chance)
        return disk

    def _leave(self, disk: TornDisk, path: Path, number: int, what: str, chance: random.Random) -> None:
        disk._names[path] = disk._safe_names[path] = number
        if number == FOLDER:
            path.mkdir()
            return
        content, changes = self._files[number]
        made = [part for change in changes if _kept(what, chance) for part in _torn(change, what, chance)]
        disk._files[number] = (_applied(content, made), [])
        path.write_bytes(disk._files[number][0])


class _TornFile(File):
    def __init__(self, disk: TornDisk, path: Path, file: File) -> None:
        self._disk, self._path, self._file = disk, path, file

    def write(self, data: bytes, /) -> int:
        data = data[: self._disk.taken]
        self._disk.wrote(self._path, self._path.stat().st_size, data)
        return self._file.write(data)

    def truncate(self, size: int, /) -> None:
        self._disk.truncated(self._path, size)
        self._file.truncate(size)

    def sync(self) -> None:
        self._disk.synced(self._path)

    def close(self) -> None:
        self._file.close()


def _change(names: dict[Path, int], old: Path | None, new: Path | None, number: int) -> None:
    """What is in a folder goes with it."""
    if old is not None and new is not None and number == FOLDER and names.get(old) == FOLDER:
        for path in [path for path in names if old in path.parents]:
            names[new / path.relative_to(old)] = names.pop(path)
    if old is not None and names.get(old) == number:
        del names[old]
    if new is not None:
        names[new] = number


def _kept(what: str, chance: random.Random) -> bool:
    return what == "all" or (what == "torn" and chance.random() < 0.5)


def _torn(change: Write | Truncate, what: str, chance: random.Random) -> list[Write | Truncate]:
    """What is made of a change: of a torn write any of its sectors, each of them right or rubbish."""
    if what != "torn" or isinstance(change, Truncate) or chance.random() < 0.3:
        return [change]
    found: list[Write | Truncate] = []
    sound = chance.choice((0.5, 0.8, 1.0))
    for start in range(0, len(change.data), SECTOR):
        data = change.data[start : start + SECTOR]
        if chance.random() > sound:
            data = chance.choice((bytes(len(data)), chance.randbytes(len(data))))
        if chance.random() < sound:
            found.append(Write(change.offset + start, data))
    return found


def _applied(content: bytes, changes: list[Write | Truncate]) -> bytes:
    found = bytearray(content)
    for change in changes:
        if isinstance(change, Truncate):
            del found[change.size :]
            found.extend(bytes(change.size - len(found)))
        else:
            found.extend(bytes(max(0, change.offset - len(found))))
            found[change.offset : change.offset + len(change.data)] = change.data
    return bytes(found)
