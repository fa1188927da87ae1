"""Where the columns of a replay live: in memory, or in files of a folder that outlive the process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.errors import UserError

Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Numbers: TypeAlias = Mapping[str, float]
_META = "replay.json"


class Storage(Protocol):
    """Makes columns {name: [capacity,...]} and knows what of them must be saved with a run's state."""

    def open(self, numbers: Numbers) -> tuple[dict[str, Tensor], int, int]:
        """Begin, with the replay's ``numbers``, "capacity" among them, that give its columns their meaning.

        Returns the columns that are there already, where to write next, and how many slots are filled.
        """

    def allocate(self, shapes: Shapes) -> dict[str, Tensor]:
        """Columns of zeros, by name the shape and dtype of one slot."""

    def note(self, cursor: int, size: int) -> None:
        """Remember how far the columns are filled."""

    def state(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What belongs into the state of a run."""


class InMemory:
    """Columns as tensors; all of them belong to the state of a run, which then goes on bit for bit."""

    def __init__(self) -> None:
        self._capacity = self._size = 0

    def open(self, numbers: Numbers) -> tuple[dict[str, Tensor], int, int]:
        self._capacity = int(numbers["capacity"])
        return {}, 0, 0

    def allocate(self, shapes: Shapes) -> dict[str, Tensor]:
        return {name: torch.zeros(self._capacity, *shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}

    def note(self, cursor: int, size: int) -> None:
        self._size = size

    def state(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: item[: self._size] for name, item in columns.items()}


class OnDisk:
    """Columns as memory-mapped files in ``folder``: larger than memory, and there for the next process.

    A resumed run goes on with the decisions as the files have them: none is lost, but those that were added after its
    last saved state are there as well, so it is not repeated bit for bit.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._meta: dict[str, Any] = {}

    def open(self, numbers: Numbers) -> tuple[dict[str, Tensor], int, int]:
        """Raises UserError for a folder of another contract version or other numbers, or one that is damaged."""
        wanted = {"contract_version": CONTRACT_VERSION, **numbers}
        path = self.folder / _META
        if not path.exists():
            self._meta = wanted
            return {}, 0, 0
        try:
            self._meta = json.loads(path.read_text(encoding="utf-8"))
            made_with = {name: self._meta[name] for name in wanted}
            listed = self._meta["columns"].items()
            shapes = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in listed}
            cursor, size = int(self._meta["cursor"]), int(self._meta["size"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{str(path)!r} is damaged ({error!r}), so its decisions cannot be told apart; delete the folder."
            ) from error
        for name, value in wanted.items():
            if made_with[name] != value:
                raise UserError(
                    f"the replay in {str(self.folder)!r} was made with {name} {made_with[name]} but this is {value}, "
                    "so its decisions would be misread; choose another folder, or use what it was made with."
                )
        return self._map(shapes), cursor, size

    def allocate(self, shapes: Shapes) -> dict[str, Tensor]:
        self._meta["columns"] = {
            name: (list(shape), str(dtype).removeprefix("torch.")) for name, (shape, dtype) in shapes.items()
        }
        return self._map(shapes)

    def _map(self, shapes: Shapes) -> dict[str, Tensor]:
        """Raises UserError when a file has another size or cannot be made."""
        columns, capacity = {}, int(self._meta["capacity"])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, (shape, dtype) in shapes.items():
                path, slot = self.folder / (name.replace("/", "__") + ".bin"), torch.Size(shape).numel()
                found, needed = path.stat().st_size if path.exists() else None, capacity * slot * dtype.itemsize
                if found is not None and found != needed:
                    raise UserError(
                        f"{str(path)!r} has {found} bytes where {needed} are needed, so its decisions would be "
                        "misread; delete the folder."
                    )
                flat = torch.from_file(str(path), shared=True, size=capacity * slot, dtype=dtype)
                columns[name] = flat.view(capacity, *shape)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"the replay folder {str(self.folder)!r} cannot be used ({error}), so nothing was kept; free some disk "
                "space or choose another folder."
            ) from error
        return columns

    def note(self, cursor: int, size: int) -> None:
        writing = self.folder / (_META + ".writing")
        writing.write_text(json.dumps({**self._meta, "cursor": cursor, "size": size}), encoding="utf-8")
        os.replace(writing, self.folder / _META)

    def state(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}
