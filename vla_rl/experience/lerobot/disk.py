"""Atomic writes that survive a crash or a power cut: write a temporary file, fsync, rename, fsync the folder."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

WRITING = ".writing"  # suffix of unfinished files and folders


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
    """Rename a file or folder that is already synced; an existing ``target`` is replaced."""
    make_folder(target.parent)
    os.replace(source, target)
    sync(target.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically in lerobot's style (indent 4, UTF-8 without escapes)."""
    writing = path.with_name(path.name + WRITING)
    make_folder(path.parent)
    writing.write_text(json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    sync(writing)
    move(writing, path)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
