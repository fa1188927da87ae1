"""Unattended runs side by side: each is a process of its own, and those that are finished are not run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, read_json
from vla_rl.experience.worker import LostWorkerError
from vla_rl.recipes.launchers import Launcher
from vla_rl.recipes.progress import bar
from vla_rl.recipes.workers import chosen_engine
from vla_rl.training.run_lock import await_unlocked
from vla_rl.training.tracking import write_json

ATTEMPTS = 5  # at a cell whose machine dies
_LEASE = 120.0  # seconds after which a network disk has let go of a dead machine's locks; NFS servers take 90


@dataclass(frozen=True)
class Cell:
    """One run in the folder ``out``, which is finished when it has a ``summary.json``."""

    out: Path
    config: str
    arguments: tuple[str, ...]

    def finished(self) -> bool:
        """Whether it is; raises UserError when what is in the folder was started with other arguments."""
        if (self.out / "config.json").exists():
            self._require_same()
        return (self.out / "summary.json").exists()

    def run(self, launcher: Launcher) -> None:
        """Run it, or go on with it where it was stopped, with its output in a file beside its folder.

        When what runs it dies, it goes on elsewhere from its last state, ``ATTEMPTS`` times at most.  Raises UserError
        when the run fails, which is not tried again.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._launch(launcher)
            except LostWorkerError as error:
                if attempt == ATTEMPTS:
                    raise UserError(
                        f"{self.out.name} was lost {ATTEMPTS} times, as what ran it {error.__cause__}, so it is not "
                        "finished; run the same command to go on from its last state."
                    ) from error
                await_unlocked(self.out, _LEASE)

    def _launch(self, launcher: Launcher) -> None:
        if self.finished():
            return
        started = (self.out / "config.json").exists()
        new = [self.config, "--out", str(self.out), *self.arguments]
        write_json(self._arguments_file, [self.config, *self.arguments])
        log = self.out.with_suffix(".log")
        if launcher.launch(["train", *(["--resume", str(self.out)] if started else new)], log):
            last = " ".join(log.read_text(errors="replace").strip().splitlines()[-1:])
            raise UserError(f"{self.out.name} failed ({last}); see {log}, then run the same command to go on.")

    @property
    def _arguments_file(self) -> Path:
        return self.out.with_suffix(".asked.json")

    def _require_same(self) -> None:
        """Raise UserError when what is in the folder was started with other arguments."""
        given = read_json(self._arguments_file) if self._arguments_file.exists() else None
        if given != [self.config, *self.arguments]:
            before = "something else" if given is None else " ".join(map(str, given))
            raise UserError(
                f"{str(self.out)!r} holds a run of {before}, so it cannot stand for this one; choose another --out, or "
                "delete that folder."
            )


def on_device(device: str) -> tuple[str, ...]:
    """The arguments that put a run on ``device``; none for the host, so a config needs no such field there."""
    return () if device == "cpu" else ("--device", device)


def run_sweep(out: Path, steps: Mapping[str, Sequence[Cell]], processes: int) -> None:
    """Run the cells of every step {what it does: cells} in order; Ctrl-C is raised again with how to go on.

    Raises UserError where a link in ``out`` would have files written elsewhere, and without processes.
    """
    check_folder(out)
    if processes < 1:
        raise UserError(f"--processes {processes} runs nothing, so {str(out)!r} stays as it is; give at least 1.")
    try:
        for what, cells in steps.items():
            run_cells(cells, processes, what)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; what is finished stays in {out}, the same command goes on.") from stop


def run_cells(cells: Sequence[Cell], processes: int, what: str) -> None:
    """Run what is not finished, ``processes`` at a time, on the engine that was chosen (``on_engine``)."""
    left = [cell for cell in cells if not cell.finished()]
    if not left:
        return
    count = min(processes, len(left))
    with (
        closing(chosen_engine().launcher(count, left[0].out.parent)) as launcher,
        ThreadPoolExecutor(count) as pool,
        bar(what, len(cells)) as update,
    ):
        try:
            for done, _ in enumerate(pool.map(lambda cell: cell.run(launcher), left), 1):
                update(len(cells) - len(left) + done, left[done - 1].out.name)
        except KeyboardInterrupt:
            launcher.close()  # the pool waits for what runs
            raise
