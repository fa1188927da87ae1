"""Files named by the SHA-256 of what they hold: whatever policies have in common is on the disk once."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from vla_rl.contract.errors import ContractError
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.manifest import check_digest

WRITING = ".writing"  # suffix of what is not whole yet


def write_whole(disk: Disk, path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all; its name survives a power cut after ``sync_folder``."""
    writing = path.with_name(path.name + WRITING)
    file = disk.open(writing)
    try:
        file.truncate(0)
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(bytes(rest)) :]
        file.sync()
    finally:
        file.close()
    disk.rename(writing, path)


def make_folders(disk: Disk, folder: Path) -> None:
    """Make ``folder`` and its parents; their names survive a power cut."""
    if not disk.is_folder(folder):
        make_folders(disk, folder.parent)
        disk.make_folder(folder)
    disk.sync_folder(folder.parent)  # also of a folder that is there: who made it may have been killed before


class ContentStore:
    """Chunks in a folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder, self._disk = folder, disk
        make_folders(disk, folder)

    def put(self, data: bytes) -> str:
        """Store ``data`` unless it is there; returns its SHA-256.  It survives a power cut after :meth:`sync`."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self:
            write_whole(self._disk, self._folder / digest, data)
        return digest

    def sync(self) -> None:
        """Return when all that was put survives a power cut."""
        self._disk.sync_folder(self._folder)

    def __contains__(self, digest: str) -> bool:
        try:
            self._disk.size(self._folder / check_digest(digest))
        except FileNotFoundError:
            return False
        return True

    def read(self, digest: str, offset: int, count: int) -> bytes:
        """``count`` bytes of a chunk from ``offset`` on, fewer at its end; ContractError for one that is not here."""
        path = self._folder / check_digest(digest)
        try:
            return self._disk.read(path, offset, count)
        except FileNotFoundError as error:
            raise ContractError(
                f"there is no chunk {digest[:12]}..., so it cannot be sent; ask for the manifest again: its version "
                "may have been removed."
            ) from error

    def keep_only(self, digests: Collection[str]) -> int:
        """Remove all other chunks, and what was left half written; returns how many bytes that freed."""
        freed = 0
        for name in self._disk.names(self._folder):
            if name not in digests:
                freed += self._disk.size(self._folder / name)
                self._disk.remove(self._folder / name)
        return freed
