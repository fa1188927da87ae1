"""Unattended runs side by side: each is a process of its own, and those that are finished are not run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.recipes.progress import bar
from vla_rl.training.threads import ALONE
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class Cell:
    """One run in the folder ``out``, which is finished when it has a ``summary.json``."""

    out: Path
    config: str
    arguments: tuple[str, ...]

    def run(self) -> None:
        """Run it, or go on with it where it was stopped, with its output in a file beside its folder."""
        started = (self.out / "config.json").exists()
        if started:
            self._require_same()
        if (self.out / "summary.json").exists():
            return
        new = [self.config, "--out", str(self.out), *self.arguments]
        write_json(self._arguments_file, [self.config, *self.arguments])
        command = [sys.executable, "-m", "vla_rl.cli", "train", *(["--resume", str(self.out)] if started else new)]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        log = self.out.with_suffix(".log")
        with log.open("a") as file:
            done = subprocess.run(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=_environment())
        if done.returncode:
            last = " ".join(log.read_text(errors="replace").strip().splitlines()[-1:])
            raise UserError(f"{self.out.name} failed ({last}); see {log}, then run the same command to go on.")

    @property
    def _arguments_file(self) -> Path:
        return self.out.with_suffix(".asked.json")

    def _require_same(self) -> None:
        """Raise UserError when what is in the folder was started with other arguments."""
        given = json.loads(self._arguments_file.read_text()) if self._arguments_file.exists() else None
        if given != [self.config, *self.arguments]:
            before = "something else" if given is None else " ".join(given)
            raise UserError(
                f"{str(self.out)!r} holds a run of {before}, so it cannot stand for this one; choose another --out, or "
                "delete that folder."
            )


def on_device(device: str) -> tuple[str, ...]:
    """The arguments that put a run on ``device``; none for the host, so a config needs no such field there."""
    return () if device == "cpu" else ("--device", device)


def run_sweep(out: Path, steps: Mapping[str, Sequence[Cell]], processes: int) -> None:
    """Run the cells of every step {what it does: cells} in order; Ctrl-C is raised again with how to go on."""
    try:
        for what, cells in steps.items():
            run_cells(cells, processes, what)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; what is finished stays in {out}, the same command goes on.") from stop


def run_cells(cells: Sequence[Cell], processes: int, what: str) -> None:
    """Run what is not finished, ``processes`` at a time."""
    with ThreadPoolExecutor(processes) as pool, bar(what, len(cells)) as update:
        for done, _ in enumerate(pool.map(Cell.run, cells), 1):
            update(done, cells[done - 1].out.name)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", ALONE: "1", "TERM": "dumb"}
