"""Lance tables in the place of parquet files and MP4s, as LeRobot reads them (huggingface/lerobot#4363).

meta/          as of v3.0, with ``"storage_format": "lance"`` in info.json
frames.lance   a row for each frame; its columns have underscores for the points in their names
videos.lance   a row for each MP4: ``video_key``, ``chunk_index``, ``file_index`` and ``video_bytes``, its content

Read only, by pylance, in a process of its own (this file): tables that are damaged can ask for any amount of memory,
and end the process that reads them.  What lies outside of the dataset is not followed: tables may name such files.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import resource
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from vla_rl.contract.child import Answering, ChildError, SharingChild, serve_owner
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, check_memory
from vla_rl.contract.wire import Arrays
from vla_rl.experience.lerobot.disk import DamagedError, Problem, first_line
from vla_rl.experience.lerobot.features import INDEX, Feature
from vla_rl.experience.lerobot.metadata import EpisodeRow, Place
from vla_rl.experience.lerobot.parquet import WrongError, require_type

_NAME = "lance tables"  # of the process
_MEMORY = 8 << 30  # bytes of addresses for the library and its threads; besides, _TIMES those of the dataset
_TIMES = 8
_OWN_END = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")  # by which damaged tables end it
_OWNER = "episode_index"


def require_lance(root: Path) -> None:
    """Raise UserError where pylance is missing, which is not imported: it does not stand a fork."""
    if importlib.util.find_spec("lance") is None:
        raise UserError(
            f"pylance is not installed, so {str(root)!r}, which is stored in Lance tables, is not read; pip install "
            "'vla-rl[lance]'."
        )


class LanceTables:
    """The two tables of a dataset, read by another process, for any thread; a process that was forked has its own."""

    def __init__(self, root: Path) -> None:
        self._root, self._size = root, 0
        self._child: SharingChild | None = None
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._videos: dict[str, tuple[Place, bytes]] = {}  # the last of every camera

    def episode(self, name: str, row: EpisodeRow, columns: list[str], declared: dict[str, Feature]) -> pa.Table:
        """The frames of an episode; raises DamagedError, and UserError where the process was ended from outside."""
        wanted = {item.replace(".", "_"): item for item in columns if item in declared}
        request = {"columns": [*wanted], "episode": row.index, "length": row.length}
        content = self._ask(Problem(name, "", (row.index,)), do="rows", **request)
        try:
            table = pa.ipc.open_stream(content).read_all()
            check_memory(table.nbytes, self._size)
            for stored, column in {**wanted, _OWNER: _OWNER}.items():
                require_type(table.schema, stored, declared.get(column, Feature(INDEX[_OWNER])), column)
            if set(table[_OWNER].to_pylist()) != {row.index}:
                raise WrongError("holds frames of another episode")
            return table.select([*wanted]).rename_columns([*wanted.values()])
        except WrongError as error:
            problem = Problem(name, str(error), (row.index,), error.column)
            raise DamagedError(self._root, problem) from error
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise DamagedError(self._root, Problem(name, _unreadable(error), (row.index,))) from error

    def video(self, name: str, row: EpisodeRow, column: str) -> io.BytesIO:
        """The MP4 with the episode's frames of a camera; raises as :meth:`episode`."""
        place, held = row.videos[column][0], self._videos.get(column)
        if held is None or held[0] != place:
            request = {"column": column, "chunk": place.chunk, "file": place.file}
            held = place, self._ask(Problem(name, "", (row.index,), column), do="video", **request)
            self._videos[column] = held
        return io.BytesIO(held[1])

    def _ask(self, asked: Problem, **request: Any) -> bytes:
        """What the process answers; whatever comes in between ends it, lest its answer is taken for the next one."""
        if self._owner != os.getpid():
            self._owner, self._lock, self._child = os.getpid(), threading.Lock(), None
        with self._lock:
            child = self._child = self._child or self._started()
            try:
                child.send({**request, "table": asked.file, "arrays": {}})
                answer, arrays = child.receive()
                content = arrays.get("content", np.zeros(0, np.uint8))
                if not answer["wrong"]:
                    check_memory(content.nbytes, self._size)
                    return content.tobytes()
                said = str(answer["wrong"])
            except BaseException as error:
                self._child = None
                child.kill()
                child.close()
                if isinstance(error, ValueError):
                    said = _unreadable(error)
                elif not isinstance(error, ChildError):
                    raise
                elif not str(error).endswith(_OWN_END):
                    words = (str(error), child.last_words())
                    raise self._not_read(asked, ": ".join(filter(None, words))) from error
                else:
                    said = f"cannot be read (the process that tried {error}, for lack of memory or over damage)"
        problem = Problem(asked.file, said, asked.episodes, asked.column)
        raise DamagedError(self._root, problem)

    def _started(self) -> SharingChild:
        require_lance(self._root)
        self._size = check_folder(self._root)
        given = str(self._root.absolute()), str(_MEMORY + _TIMES * self._size)
        child = SharingChild([sys.executable, "-P", "-m", "vla_rl.experience.lerobot.lance", *given], name=_NAME)
        weakref.finalize(self, _end, child, os.getpid())
        return child

    def _not_read(self, asked: Problem, fate: str) -> UserError:
        return UserError(
            f"the process that reads {str(self._root / asked.file)!r} {fate}, so episode {asked.episodes[0]} was not "
            "read; look for what ended it (memory may be short), and run this again."
        )


def _end(child: SharingChild, owner: int) -> None:
    if os.getpid() == owner:
        child.close()


def _unreadable(error: BaseException) -> str:
    where = re.compile(r",? ?/\S+\.rs:\d+:\d+")  # in the library's own source
    return f"cannot be read ({where.sub('', first_line(error))})"


# -- the other process -------------------------------------------------------------------------------------------------


class _Tables(Answering):
    does: ClassVar = ("rows", "video")
    who: ClassVar = "reading Lance tables"

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def rows(self, table: str, columns: list[str], episode: int, length: int) -> tuple[dict[str, Any], Arrays]:
        """The frames of an episode as a stream of Arrow; columns that are missing are left out."""
        try:
            opened, mine = self._opened(table), f"{_OWNER} = {episode}"
            if (found := opened.count_rows(mine)) != length or not length:
                raise WrongError(f"holds {found} frames of episode {episode} where meta/ says {length}")
            read = opened.to_table([name for name in (*columns, _OWNER) if name in opened.schema.names], filter=mine)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, read.schema) as stream:
                stream.write_table(read)
            return {"wrong": ""}, {"content": np.frombuffer(sink.getvalue(), np.uint8)}
        except Exception as error:  # whatever a library says of files of others
            return _refused(error), {}

    def video(self, table: str, column: str, chunk: int, file: int) -> tuple[dict[str, Any], Arrays]:
        """The content of an MP4."""
        try:
            opened = self._opened(table)
            [content] = opened.take_blobs("video_bytes", ids=[_row_of_video(opened, column, chunk, file)])
            if content is None:
                raise WrongError(f"has nothing as file {file} in chunk {chunk} of {column}")
            return {"wrong": ""}, {"content": np.frombuffer(content.readall(), np.uint8)}
        except Exception as error:
            return _refused(error), {}

    def _opened(self, name: str) -> Any:
        import lance

        if not (self._root / name).is_dir():
            raise WrongError("is missing")
        table = lance.dataset(self._root / name)
        if table.base_paths():
            raise WrongError("has files in other places, which are not read")
        return table


def _refused(error: Exception) -> dict[str, str]:
    return {"wrong": str(error) if isinstance(error, WrongError) else _unreadable(error)}


def _row_of_video(table: Any, column: str, chunk: int, file: int) -> int:
    names = ["video_key", "chunk_index", "file_index", "video_bytes"]
    described = table.scanner(names, with_row_id=True, blob_handling="blobs_descriptions").to_table()
    for item in described.to_pylist():
        if (item["video_key"], item["chunk_index"], item["file_index"]) == (column, chunk, file):
            found = item["video_bytes"]
            if not isinstance(found, dict):
                raise WrongError("holds videos that are no blobs")
            if found.get("blob_uri"):
                raise WrongError(f"names a video in another place, {found['blob_uri'][:80]!r}")
            return int(item["_rowid"])
    raise WrongError(f"has no file {file} in chunk {chunk} of {column}")


def main() -> None:
    """Read from the tables in ``sys.argv[1]`` for the owner of this process, within so many bytes of addresses."""
    root, memory = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), resource.RLIM_INFINITY))
    tables = _Tables(Path(root))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the library prints when it fails is said in a sentence
    serve_owner(_NAME, lambda request, writer: tables.answer(request))


if __name__ == "__main__":
    main()
