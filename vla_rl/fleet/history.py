"""An append-only file of JSON entries, each with its checksum, for one writer at a time and any number of readers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from vla_rl.contract.errors import ContractError
from vla_rl.fleet.disk import Disk


class History:
    """The entries of a file.  What a power cut left half written at its end does not count and is overwritten."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """The folder of ``path`` exists."""
        self._path, self._disk, self._end = path, disk, 0

    def new(self) -> list[dict[str, Any]]:
        """The entries since the last call; raises ContractError for a damaged one that others follow."""
        if self._path.name not in self._disk.names(self._path.parent):
            return []
        entries: list[dict[str, Any]] = []
        lines = self._disk.read(self._path, self._end).split(b"\n")
        for number, line in enumerate(lines[:-1]):  # nothing, or half a line, follows the last end of a line
            entry = _entry(line)
            if entry is None:
                if any(_entry(later) is not None for later in lines[number + 1 :]):
                    raise ContractError(
                        f"{str(self._path)!r} is damaged at byte {self._end} and goes on after it, so what happened is "
                        "unknown; bring the file back from a copy, or look at the disk."
                    )
                break
            entries.append(entry)
            self._end += len(line) + 1
        return entries

    def append(self, entry: dict[str, Any]) -> None:
        """Write ``entry`` behind what :meth:`new` has returned; returns when it survives a power cut."""
        text = json.dumps(entry, sort_keys=True, allow_nan=False).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        file = self._disk.open(self._path)
        try:
            file.truncate(self._end)
            while line:
                line = line[file.write(line) :]
            file.sync()
        finally:
            file.close()
        self._disk.sync_folder(self._path.parent)


def _entry(line: bytes) -> dict[str, Any] | None:
    """The entry in a line; None where its checksum is another."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    entry: dict[str, Any] = json.loads(text)
    return entry
