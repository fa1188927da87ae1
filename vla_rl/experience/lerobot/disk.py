"""Writes that a crash or a power cut leaves whole or undone: write beside, fsync, rename, fsync the folder."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

WRITING = ".writing"  # ends the names of what is not there yet


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make ``path`` and its parents, each of them safe on the disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename a file or folder whose content is on the disk already; what was at ``target`` is replaced."""
    make_folder(target.parent)
    os.replace(source, target)
    sync(target.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON in lerobot's style (indent 4, text as it is) in one step."""
    writing = path.with_name(path.name + WRITING)
    make_folder(path.parent)
    writing.write_text(json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    sync(writing)
    move(writing, path)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
