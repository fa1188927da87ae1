"""A checkpoint folder as entries of a manifest, its content as chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.manifest import CHUNK_BYTES, MAX_FILES, Blob, FileEntry, TensorEntry, check_path
from vla_rl.fleet.safetensors_header import read_header

Put = Callable[[bytes], str]  # stores a chunk and returns its SHA-256


def put_folder(folder: Path, put: Put) -> tuple[FileEntry, ...]:
    """Hand every chunk of the files in ``folder`` to ``put``; returns their entries, by path.

    Raises UserError for a folder that is no checkpoint, too many files, links, and names that are not plain.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{str(folder)!r} has no config.json, so it is no checkpoint to publish; name its folder.")
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    if len(paths) > MAX_FILES:
        raise UserError(
            f"{str(folder)!r} holds {len(paths)} files, more than {MAX_FILES}, so it is not published; name the folder "
            "of one checkpoint."
        )
    return tuple(_entry(folder, path, put) for path in paths)


def put_bytes(data: bytes, put: Put) -> Blob:
    """``data`` in chunks."""
    return Blob(len(data), tuple(put(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)))


def _entry(folder: Path, path: Path, put: Put) -> FileEntry:
    name = path.relative_to(folder).as_posix()
    try:
        check_path(name)
    except ValueError as error:
        raise UserError(f"{error}, so it cannot be published; rename it.") from error
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{str(path)!r} is no regular file, so it cannot be published; put a copy in its place.")
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return FileEntry(name, _blob(file, path.stat().st_size, put))
        head, places = read_header(file, path.stat().st_size)
        tensors = (TensorEntry(at.name, at.dtype, at.shape, _blob(file, at.size, put)) for at in places)
        return FileEntry(name, put_bytes(head, put), tuple(tensors))


def _blob(file: BinaryIO, size: int, put: Put) -> Blob:
    chunks = []
    for begin in range(0, size, CHUNK_BYTES):
        data = file.read(min(CHUNK_BYTES, size - begin))
        if len(data) < min(CHUNK_BYTES, size - begin):
            raise ContractError(f"{file.name!r} shrank while it was read, so it is not published; do not write to it.")
        chunks.append(put(data))
    return Blob(size, tuple(chunks))
