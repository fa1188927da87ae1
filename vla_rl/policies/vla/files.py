"""Files of a downloaded folder: JSON and safetensors, with one sentence about what is missing or damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vla_rl.contract import trust
from vla_rl.contract.errors import UserError

_POINTER = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; raises UserError when the file is missing, damaged or holds something else."""
    try:
        value = trust.read_json(path)
    except FileNotFoundError as error:
        raise missing_file(path) from error
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{str(path)!r} holds a {type(value).__name__} and no JSON object, so it cannot be used; download it again."
        )
    return value


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """``safe_open`` on a file whose tensors are read one by one; raises UserError when it is missing or damaged."""
    if not path.is_file():
        raise missing_file(path)
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def missing_file(path: Path) -> UserError:
    """The sentence about a file that is not there."""
    return UserError(
        f"{str(path.parent)!r} has no {path.name}, so the folder is incomplete; download that file into it."
    )


def _damaged(path: Path, error: Exception) -> UserError:
    """The sentence about a file that cannot be read; a Git LFS pointer is named as what it is."""
    with path.open("rb") as file:
        pointer = file.read(len(_POINTER)) == _POINTER
    if pointer:
        return UserError(
            f"{str(path)!r} is a Git LFS pointer instead of the file itself, so it cannot be read; run `git lfs pull` "
            "in its folder, or download it again."
        )
    return UserError(f"{str(path)!r} is damaged ({error}), so it cannot be read; download it again.")
