"""Where a replay buffer keeps its columns: in memory, or in files of a folder that outlive the process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json

Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Numbers: TypeAlias = Mapping[str, float]
Filled: TypeAlias = tuple[int, int, int]  # next slot, slots of ended episodes, slots of running ones behind them
_META = "replay.json"


class Storage(Protocol):
    """Allocates columns {name: [capacity,...]} and says which of them must be saved with a run's state."""

    @property
    def device(self) -> torch.device:
        """Where sampled decisions go."""

    def open(self, numbers: Numbers) -> tuple[dict[str, Tensor], Filled, Sequence[str]]:
        """Start with the replay buffer's ``numbers``, "capacity" among them, that give its columns their meaning.

        Returns the columns that exist already, which slots are filled, and the names of the robots.
        """

    def allocate(self, shapes: Shapes) -> dict[str, Tensor]:
        """Columns of zeros, by name the shape and dtype of one slot."""

    def note(self, filled: Filled, robots: Sequence[str]) -> None:
        """Remember which slots are filled, and the names of the robots."""

    def state(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The columns that belong to the state of a run; {} when the storage keeps them itself."""


class InMemory:
    """Columns as tensors on ``device``; all of them belong to the state of a run, which then resumes bit for bit."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._capacity = self._used = 0

    def open(self, numbers: Numbers) -> tuple[dict[str, Tensor], Filled, Sequence[str]]:
        self._capacity = int(numbers["capacity"])
        return {}, (0, 0, 0), ()

    def allocate(self, shapes: Shapes) -> dict[str, Tensor]:
        return {
            name: torch.zeros(self._capacity, *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in shapes.items()
        }

    def note(self, filled: Filled, robots: Sequence[str]) -> None:
        self._used = min(self._capacity, filled[1] + filled[2])

    def state(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: item[: self._used] for name, item in columns.items()}


class OnDisk:
    """Columns as memory-mapped files in ``folder``: larger than memory, and available to the next process.

    A resumed run continues with the decisions in the files: none is lost, but the decisions that were added after its
    last saved state are still there, so the run is not repeated bit for bit.  The columns are on the host; sampled
    decisions go to ``device``.
    """

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu") -> None:
        self.folder, self.device = Path(folder), torch.device(device)
        self._meta: dict[str, Any] = {}

    def open(self, numbers: Numbers) -> tuple[dict[str, Tensor], Filled, Sequence[str]]:
        """Raises UserError for a folder of another contract version or other numbers, or one that is damaged."""
        wanted = {"contract_version": CONTRACT_VERSION, **numbers}
        path = self.folder / _META
        if not path.exists():
            self._meta = wanted
            return {}, (0, 0, 0), ()
        try:
            self._meta = read_json(path)
            made_with = {name: self._meta[name] for name in wanted}
            listed = self._meta["columns"].items()
            shapes = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in listed}
            cursor, size, running = (int(number) for number in self._meta["filled"])
            robots = [str(name) for name in self._meta["robots"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{str(path)!r} is damaged ({error!r}), so its decisions cannot be read; delete the folder."
            ) from error
        for name, value in wanted.items():
            if made_with[name] != value:
                raise UserError(
                    f"the replay buffer in {str(self.folder)!r} was made with {name} {made_with[name]} but this is "
                    f"{value}, so its decisions would be misread; choose another folder, or use {made_with[name]}."
                )
        return self._map(shapes), (cursor, size, running), robots

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
                f"the folder {str(self.folder)!r} cannot be used ({error}), so nothing was kept; free some disk "
                "space or choose another folder."
            ) from error
        return columns

    def note(self, filled: Filled, robots: Sequence[str]) -> None:
        meta = {**self._meta, "filled": list(filled), "robots": list(robots)}
        writing = self.folder / (_META + ".writing")
        writing.write_text(json.dumps(meta), encoding="utf-8")
        os.replace(writing, self.folder / _META)

    def state(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}
