"""Unattended runs side by side: each is a process of its own, and those that are finished are not run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, read_json
from vla_rl.evaluation.report import Report, Series, across_seeds
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.worker import LostWorkerError
from vla_rl.recipes import metrics
from vla_rl.recipes.terminal import bar, console
from vla_rl.recipes.workers import Launcher, chosen_engine
from vla_rl.training.tracking import await_unlocked, write_json

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


_RESULTS = ("imitation", "validation", "rl")  # rates of a summary, in the order in which they come about
_RETURN = "return"  # of one without a rule of success


def train_seeds(config: str, count: int, out: Path, arguments: Sequence[str], processes: int) -> None:
    """Train in ``out/seed-1`` to ``out/seed-N``; ``{seed}`` in an argument stands for the seed.

    Writes ``results.json`` and ``report.html``.  What is finished is not run again; what was stopped goes on.
    """
    if count < 1 or processes < 1:
        raise UserError(f"--seeds {count} --processes {processes} runs nothing; give both at least 1.")
    cells = [
        Cell(
            out / f"seed-{seed}",
            config,
            ("--seed", str(seed), *(argument.replace("{seed}", str(seed)) for argument in arguments)),
        )
        for seed in range(1, count + 1)
    ]
    run_sweep(out, {"train": cells}, processes)
    rows = [{"seed": seed, **metrics.summary(cell.out)} for seed, cell in enumerate(cells, 1)]
    write_json(out / "results.json", rows)
    command = f"vla-rl train {config} --seeds {count} --out {out} {shlex.join(arguments)}".strip()
    _report(out, rows, cells, command)
    for line in _table(rows):
        console.print("  ".join(line))
    console.print(f"{out}/results.json, {out}/report.html")


def _table(rows: list[JsonObject]) -> list[list[str]]:
    """A line per result and, where there are several kinds of tasks, per kind; intervals are those of each seed."""
    lines = []
    for name in _RESULTS:
        if name in rows[0]:
            lines.append(_line(name, [row[name] for row in rows]))
    if _RETURN in rows[0]:
        means = [row[_RETURN]["mean"] for row in rows]
        each = ["{mean:.4g} [{low:.4g}, {high:.4g}]".format(**row[_RETURN]) for row in rows]
        lines.append([_RETURN, *each, f"{sum(means) / len(means):.4g} ({min(means):.4g} to {max(means):.4g})"])
    families = rows[0].get("families", {})
    for name in families if len(families) > 1 else ():
        lines.append(_line(name, [row["families"][name] for row in rows]))
    return lines


def _line(name: str, rates: list[JsonObject]) -> list[str]:
    return [name, *across_seeds([Rate(**rate) for rate in rates])]


def _report(out: Path, rows: list[JsonObject], cells: Sequence[Cell], command: str) -> None:
    last = next((name for name in (_RETURN, *reversed(_RESULTS)) if name in rows[0]), "")
    what = "Mean return" if last == _RETURN else "Success"
    subtitle = f"{what}, each seed with its own interval; {rows[0][last]['episodes']} episodes each" if last else ""
    report = Report("Training seeds side by side", subtitle)
    report.table(["", *(f"seed {row['seed']}" for row in rows), "mean (min to max)"], _table(rows))
    seconds = [[stage, *(f"{row['seconds'].get(stage, 0):.0f}" for row in rows)] for stage in rows[0]["seconds"]]
    report.table(["seconds", *(f"seed {row['seed']}" for row in rows)], seconds)
    families = list(rows[0].get("families", {}))
    for name in ["", *families] if len(families) > 1 else [""]:
        found = [_curve(cell.out, f"seed {row['seed']}", name) for row, cell in zip(rows, cells, strict=True)]
        if curves := [curve for curve in found if curve]:
            title = f"Validation {what.lower()}"
            report.curves(f"{title}: {name}" if name else title, "control steps", what.lower(), curves, last != _RETURN)
    report.command(command)
    report.write(out / "report.html")


def _curve(folder: Path, label: str, family: str = "") -> Series | None:
    """Validation success over control steps, of one kind of task if ``family`` is given; None where there is none."""
    key = f"eval/{family}" if family else "eval/score"
    lines = metrics.rows(folder)
    found = [line for line in lines if key in line and "env/steps_total" in line]
    if not found:
        return None
    return Series(label, [line["env/steps_total"] for line in found], [line[key] for line in found])
