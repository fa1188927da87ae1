"""Lance tables in the place of parquet files and MP4s, as LeRobot reads them (huggingface/lerobot#4363).

meta/          as of v3.0, with ``"storage_format": "lance"`` in info.json
frames.lance   a row for each frame; its columns have underscores for the points in their names
videos.lance   a row for each MP4: ``video_key``, ``chunk_index``, ``file_index`` and ``video_bytes``, its content

Read only, by pylance, in a process of its own (this file): tables that are damaged can ask for any amount of memory,
and end the process that reads them.  What lies outside of the dataset is not followed: tables may name such files.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from vla_rl.contract.load import installed
from vla_rl.contract.trust import check_folder, check_memory
from vla_rl.experience.lerobot.disk import DamagedError, Problem, first_line
from vla_rl.experience.lerobot.features import Feature
from vla_rl.experience.lerobot.metadata import EpisodeRow
from vla_rl.experience.lerobot.parquet import WrongError, require_type

_MEMORY = 8 << 30  # bytes of addresses for the library and its threads; besides, _TIMES those of the dataset
_TIMES = 8


class LanceTables:
    """The two tables of a dataset, read by another process.  Raises UserError where pylance is missing."""

    def __init__(self, root: Path) -> None:
        installed("lance", f"{str(root)!r}, which is stored in Lance tables, is not read", "lance", "pylance")
        self._root, self._size = root, check_folder(root)
        self._reading: _Process | None = None

    def episode(self, name: str, row: EpisodeRow, columns: list[str], declared: dict[str, Feature]) -> pa.Table:
        """The frames of an episode; raises DamagedError."""
        wanted = [item for item in columns if item in declared]
        stored = [item.replace(".", "_") for item in wanted]

        def checked(content: bytes) -> pa.Table:
            table = pa.ipc.open_stream(content).read_all()
            check_memory(table.nbytes, self._size)
            for column, name in zip(wanted, stored, strict=True):
                require_type(table.schema, name, declared[column], column)
            return table.rename_columns(wanted)

        request = {"do": "rows", "table": name, "columns": stored, "episode": row.index, "length": row.length}
        found: pa.Table = self._asked(request, row, "", checked)
        return found

    def video(self, name: str, row: EpisodeRow, column: str) -> Path:
        """A copy of the MP4 with the episode's frames of a camera, until another is asked for; raises DamagedError."""
        place = row.videos[column][0]
        request = {"do": "video", "table": name, "column": column, "chunk": place.chunk, "file": place.file}
        found: Path = self._asked(request, row, column, lambda content: Path(content.decode()))
        return found

    def _asked(self, request: dict[str, Any], row: EpisodeRow, column: str, use: Callable[[bytes], Any]) -> Any:
        try:
            if self._reading is None or self._reading.ended:
                self._reading = _Process(self._root, _MEMORY + _TIMES * self._size)
            return use(self._reading.ask(request))
        except WrongError as error:
            problem = Problem(request["table"], str(error), (row.index,), error.column or column)
            raise DamagedError(self._root, problem) from error
        except (OSError, pa.ArrowException, ValueError) as error:
            problem = Problem(request["table"], _unreadable(error), (row.index,), column)
            raise DamagedError(self._root, problem) from error


def _unreadable(error: Exception) -> str:
    where = re.compile(r",? ?/\S+\.rs:\d+:\d+")  # in the library's own source
    return f"cannot be read ({where.sub('', first_line(error))})"


class _Process:
    """The other end of :func:`main`, which ends with this object."""

    def __init__(self, root: Path, memory: int) -> None:
        folder = tempfile.TemporaryDirectory(prefix="vla-rl-lance-")
        command = [sys.executable, "-P", "-m", "vla_rl.experience.lerobot.lance", str(root), folder.name, str(memory)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._process = process
        weakref.finalize(self, _end, process, folder)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, request: dict[str, Any]) -> bytes:
        """The answer; raises WrongError for what the process says of the table, and where it ends instead."""
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None and received is not None, "both are pipes"
        content = b""
        with suppress(BrokenPipeError):
            sent.write(json.dumps(request).encode() + b"\n")
            sent.flush()
        if not (line := received.readline()):
            self._process.wait()
            raise WrongError("cannot be read (it ended the process that tried; it is damaged, or memory is short)")
        answer = json.loads(line)
        content = received.read(answer["size"])
        if answer["wrong"]:
            raise WrongError(content.decode())
        return content


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.communicate()
    folder.cleanup()


def main() -> None:
    """Answer requests, a line of JSON each, until there are no more: a line of JSON, and as many bytes as it says."""
    root, copies, memory = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), resource.RLIM_INFINITY))
    tables = _Tables(Path(root), Path(copies))
    for line in sys.stdin.buffer:
        try:
            content, wrong = tables.answer(json.loads(line)), False
        except Exception as error:  # whatever a library says of files of others
            content, wrong = (str(error) if isinstance(error, WrongError) else _unreadable(error)).encode(), True
        sys.stdout.buffer.write(json.dumps({"wrong": wrong, "size": len(content)}).encode() + b"\n" + content)
        sys.stdout.buffer.flush()


class _Tables:
    """What the process has open; a copy of the last video of each camera is in ``copies``."""

    def __init__(self, root: Path, copies: Path) -> None:
        self._root, self._copies, self._open = root, copies, dict[str, Any]()
        self._copied = dict[str, tuple[int, int, Path]]()

    def answer(self, request: dict[str, Any]) -> bytes:
        table = self._opened(request["table"])
        if request["do"] == "video":
            return str(self._video(table, request["column"], request["chunk"], request["file"])).encode()
        return self._rows(table, request["columns"], request["episode"], request["length"])

    def _opened(self, name: str) -> Any:
        import lance

        if name not in self._open:
            if not (self._root / name).is_dir():
                raise WrongError("is missing")
            table = lance.dataset(self._root / name)
            if table.base_paths():
                raise WrongError("has files in other places, which are not read")
            self._open[name] = table
        return self._open[name]

    def _rows(self, table: Any, columns: list[str], episode: int, length: int) -> bytes:
        mine = f"episode_index = {episode}"
        if (found := table.count_rows(mine)) != length or not length:
            raise WrongError(f"holds {found} frames of episode {episode} where meta/ says {length}")
        sink = pa.BufferOutputStream()
        rows = table.to_table([name for name in columns if name in table.schema.names], filter=mine)
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
        return bytes(sink.getvalue())

    def _video(self, table: Any, column: str, chunk: int, file: int) -> Path:
        *place, copy = self._copied.get(column, (-1, -1, self._copies / f"{len(self._copied)}.mp4"))
        if place != [chunk, file]:
            [content] = table.take_blobs("video_bytes", ids=[self._row_of_video(table, column, chunk, file)])
            with copy.open("wb") as target:
                shutil.copyfileobj(content, target)
            self._copied[column] = chunk, file, copy
        return copy

    def _row_of_video(self, table: Any, column: str, chunk: int, file: int) -> int:
        names = ["video_key", "chunk_index", "file_index", "video_bytes"]
        described = table.scanner(names, with_row_id=True, blob_handling="blobs_descriptions").to_table()
        for item in described.to_pylist():
            if (item["video_key"], item["chunk_index"], item["file_index"]) == (column, chunk, file):
                if item["video_bytes"]["blob_uri"]:
                    raise WrongError(f"names a video in another place, {item['video_bytes']['blob_uri'][:80]!r}")
                return int(item["_rowid"])
        raise WrongError(f"has no file {file} in chunk {chunk} of {column}")


if __name__ == "__main__":
    main()
