"""Runs side by side, cells (methods) x training seeds: unattended and resumable, with one table and one page.

Each run is a process of its own, and those that are finished are not run again.  Training seeds are never pooled: each
has its value and interval, then follow mean, minimum and maximum.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from vla_rl.contract.config import JsonMapping, JsonObject
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, read_json
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import Bar, Report, across_seeds
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.worker import LostWorkerError
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import metrics
from vla_rl.recipes.config_files import config_function, load_config
from vla_rl.recipes.evaluators import play
from vla_rl.recipes.terminal import bar, console
from vla_rl.recipes.workers import EngineOptions, Launcher, chosen_engine
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


# -- one table and one page --------------------------------------------------------------------------------------------


def seeds_table(report: Report, rows: Sequence[Sequence[str]], seeds: Sequence[int], caption: str = "") -> None:
    """A line per method: what it is, its cell for every seed, and :func:`across_seeds`' summary."""
    report.table(["", *(f"seed {seed}" for seed in seeds), "mean (min to max)"], rows, caption)


def line(name: str, rates: Sequence[JsonMapping]) -> list[str]:
    """The line of a table, from the rates of its seeds as ``summary.json`` has them."""
    return [name, *across_seeds([Rate(**rate) for rate in rates])]


def seed_bars(rates: Mapping[str, Mapping[int, Rate]], reference: str) -> list[Bar]:
    """A bar for every method, grouped by seed; ``reference`` is grey."""
    bars = [
        Bar.of(name, rate, f"seed {seed}", reference=name == reference)
        for name, found in rates.items()
        for seed, rate in found.items()
    ]
    return sorted(bars, key=lambda one: one.group)


# -- one config on several seeds ---------------------------------------------------------------------------------------

_RESULTS = ("imitation", "validation", "rl")  # rates of a summary, in the order in which they come about
_RETURN = "return"  # of one without a rule of success


def train_seeds(config: str, count: int, out: Path, arguments: Sequence[str], processes: int) -> None:
    """Train in ``out/seed-1`` to ``out/seed-N``; ``{seed}`` in an argument stands for the seed.

    Writes ``results.json`` and ``report.html``.  What is finished is not run again; what was stopped goes on.
    """
    if count < 1 or processes < 1:
        raise UserError(f"--seeds {count} --processes {processes} runs nothing; give both at least 1.")
    given = {seed: [item.replace("{seed}", str(seed)) for item in arguments] for seed in range(1, count + 1)}
    cells = [Cell(out / f"seed-{seed}", config, ("--seed", str(seed), *own)) for seed, own in given.items()]
    run_sweep(out, {"train": cells}, processes)
    rows = [{"seed": seed, **metrics.summary(cell.out)} for seed, cell in enumerate(cells, 1)]
    write_json(out / "results.json", rows)
    command = f"vla-rl train {config} --seeds {count} --out {out} {shlex.join(arguments)}".strip()
    _seeds_page(out, rows, command)
    for cells_of_line in _lines(rows):
        console.print("  ".join(cells_of_line))
    console.print(f"{out}/results.json, {out}/report.html")


def _lines(rows: Sequence[JsonObject]) -> list[list[str]]:
    """A line per result and, where there are several kinds of tasks, per kind; intervals are those of each seed."""
    lines = [line(name, [row[name] for row in rows]) for name in _RESULTS if name in rows[0]]
    if _RETURN in rows[0]:
        means = [row[_RETURN]["mean"] for row in rows]
        each = ["{mean:.4g} [{low:.4g}, {high:.4g}]".format(**row[_RETURN]) for row in rows]
        lines.append([_RETURN, *each, f"{sum(means) / len(means):.4g} ({min(means):.4g} to {max(means):.4g})"])
    families = rows[0].get("families", {})
    return lines + [line(name, [row["families"][name] for row in rows]) for name in families if len(families) > 1]


def _seeds_page(out: Path, rows: Sequence[JsonObject], command: str) -> None:
    last = next((name for name in (_RETURN, *reversed(_RESULTS)) if name in rows[0]), "")
    what, seeds = "Mean return" if last == _RETURN else "Success", [row["seed"] for row in rows]
    subtitle = f"{what}, each seed with its own interval; {rows[0][last]['episodes']} episodes each" if last else ""
    report = Report("Training seeds side by side", subtitle)
    seeds_table(report, _lines(rows), seeds)
    seconds = [[stage, *(f"{row['seconds'].get(stage, 0):.0f}" for row in rows)] for stage in rows[0]["seconds"]]
    report.table(["seconds", *(f"seed {seed}" for seed in seeds)], seconds)
    families = list(rows[0].get("families", {}))
    for name in ["", *families] if len(families) > 1 else [""]:
        runs = {f"seed {seed}": metrics.rows(out / f"seed-{seed}") for seed in seeds}
        found = [metrics.validation_curve(label, lines, "env/steps_total", name) for label, lines in runs.items()]
        if curves := [curve for curve in found if len(curve.x)]:
            title = f"Validation {what.lower()}"
            report.curves(f"{title}: {name}" if name else title, "control steps", what.lower(), curves, last != _RETURN)
    report.command(command)
    report.write(out / "report.html")


# -- methods that improve the same imitation policies ------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One task: ``imitate`` and the values of ``methods`` {shown name: name} are functions of the config file."""

    name: str
    imitate: str
    methods: Mapping[str, str]
    out: Path


@dataclass(frozen=True)
class Comparison(EngineOptions):
    """Methods on the same budget.  Each run is a process of its own; what is finished is not run again."""

    preset: ClassVar[str]

    config: str = "compare.py"  # where the methods are
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    target: float = 0.85  # validation success whose cost in control steps is tabled
    out: str = "runs/compare"

    def tasks(self) -> tuple[Task, ...]:
        raise NotImplementedError

    def run(self) -> None:
        """Imitate once per task and seed, improve by every method, write ``results.json`` and ``report.html``."""
        tasks, out = self.tasks(), Path(self.out)
        for task in tasks:
            for function in (task.imitate, *task.methods.values()):
                load_config(f"{self.config}:{function}")  # an unknown name should be known before hours of work
        first = [
            Cell(task.out / f"imitate-{seed}", f"{self.config}:{task.imitate}", ("--seed", str(seed)))
            for task in tasks
            for seed in self.seeds
        ]
        second = [self._cell(task, name, seed) for task in tasks for seed in self.seeds for name in task.methods]
        run_sweep(out, {"imitate": first, "improve": second}, self.processes)
        compared = [self._compared(task, name) for task in tasks for name in task.methods]
        write_json(out / "results.json", [row for item in compared for curve in item.curves.values() for row in curve])
        before = {task.name: {seed: self._before(task, seed) for seed in self.seeds} for task in tasks}
        write_page(out / "report.html", compared, before, self.target, f"vla-rl compare {self.preset}")

    def _cell(self, task: Task, name: str, seed: int) -> Cell:
        start = task.out / f"imitate-{seed}"
        policy, demonstrations = start / "checkpoints" / "imitation", start / "demonstrations"
        given = ("--seed", str(seed), "--policy", str(policy), "--demonstrations", str(demonstrations))
        return Cell(task.out / f"{name}-{seed}", f"{self.config}:{task.methods[name]}", given)

    def _before(self, task: Task, seed: int) -> JsonObject:
        """The imitation policy's own success on the test scenes, played once."""
        folder = task.out / f"imitate-{seed}"
        if not (folder / "test.json").exists():
            recipe = load_config(f"{self.config}:{task.imitate}")
            policy = load_policy(folder / "checkpoints" / "imitation")
            scenes = seed_ranges.held_out(seed_ranges.TEST, recipe.evaluation.test)
            outcomes = play(recipe.env, policy, scenes, recipe.evaluation, seed, f"test {folder.name}")
            write_json(folder / "test.json", asdict(outcomes.rate))
        rate: JsonObject = read_json(folder / "test.json")
        return rate

    def _compared(self, task: Task, name: str) -> Compared:
        about = inspect.getdoc(config_function(f"{self.config}:{task.methods[name]}")) or ""
        folders = {seed: task.out / f"{name}-{seed}" for seed in self.seeds}
        curves = {seed: _curve(folder, task.name, name, seed) for seed, folder in folders.items()}
        after = {seed: metrics.summary(folder) for seed, folder in folders.items()}
        return Compared(name, task.name, about, curves, after)


@dataclass(frozen=True)
class Algorithms(Comparison):
    """Algorithms on the same budget.  Each run is a process of its own; what is finished is not run again.

    An algorithm's name is that of a function in ``config``; on another task than lift, it is "TASK_NAME".
    """

    preset = "algorithms"

    lift: tuple[str, ...] = (
        "flow_sde",
        "flow_noise",
        "grpo",
        "residual_td3",
        "residual_step",
        "residual_ppo",
        "rlpd",
        "wsrl",
        "dsrl",
        "dppo",
        "gorl",
    )
    place: tuple[str, ...] = ("residual_td3", "residual_step", "rlpd", "wsrl", "grpo")  # the best four on lift

    def tasks(self) -> tuple[Task, ...]:
        """Every algorithm on lift and, unless none is named, on place."""
        out = Path(self.out)
        lift = Task("lift", "imitate_lift", {name: name for name in self.lift}, out / "lift")
        place = Task("place", "imitate_place", {name: f"place_{name}" for name in self.place}, out / "place")
        return tuple(task for task in (lift, place) if task.methods)


@dataclass(frozen=True)
class Samplers(Comparison):
    """Flow samplers on the same budget.  Each run is a process of its own; what is finished is not run again."""

    preset = "samplers"

    config: str = "demo.py"  # its functions of these names, and "imitate"
    out: str = "runs/study"
    samplers: tuple[str, ...] = ("last_step", "one_step", "all_steps", "flow_ou", "flow_ddim", "flow_noise")

    def tasks(self) -> tuple[Task, ...]:
        return (Task("lift", "imitate", {name: name for name in self.samplers}, Path(self.out)),)


def _curve(folder: Path, task: str, name: str, seed: int) -> list[JsonObject]:
    """One row per validation."""
    found = [row for row in metrics.rows(folder, "rl") if "eval/score" in row]
    return [
        {
            "algorithm": name,
            "task": task,
            "seed": seed,
            "env_steps": int(row["env/steps_total"]),
            "seconds": round(row["elapsed_s"] - found[0]["elapsed_s"], 1),
            "success": row["eval/score"],
            "low": row["eval/score_low"],
            "high": row["eval/score_high"],
            "episodes": int(row["eval/episodes"]),
        }
        for row in found
    ]


_Curve = Sequence[JsonMapping]
_KEYS = ("env_steps", "success", "low", "high")


@dataclass(frozen=True)
class Compared:
    """One algorithm on one task, by seed.

    about   what it is, the first paragraph, and what was found about it
    curves  rows of ``results.json``
    after   ``summary.json``
    """

    name: str
    task: str
    about: str
    curves: Mapping[int, _Curve]
    after: Mapping[int, JsonMapping]

    def gains(self, before: Mapping[int, JsonMapping]) -> list[float]:
        """Test success minus that of the imitation policy, by seed."""
        return [float(item["rl"]["success"] - before[seed]["success"]) for seed, item in self.after.items()]


def steps_to(curve: _Curve, target: float) -> int | None:
    """Control steps at the first of two consecutive validations of at least ``target``; None if there are none."""
    for one, two in pairwise(curve):
        if min(one["success"], two["success"]) >= target:
            return int(one["env_steps"])
    return None


def write_page(
    path: Path,
    compared: Sequence[Compared],
    before: Mapping[str, Mapping[int, JsonMapping]],
    target: float,
    command: str = "vla-rl compare",
) -> None:
    """``before`` {task: {seed: the imitation policy's test success}}."""
    subtitle = (
        "The same imitation policies and demonstrations, the same budget of control steps, never pooled over seeds"
    )
    report = Report("Methods that improve a policy, side by side", subtitle)
    for task in before:
        chosen = [item for item in compared if item.task == task]
        report.section(task.capitalize())
        _results(report, chosen, before[task], target)
        report.text("While learning, on validation scenes:")
        for item in chosen:
            lines = [metrics.curve_of(f"seed {seed}", curve, *_KEYS) for seed, curve in item.curves.items()]
            report.curves(f"{task}: {item.name}", "control steps", "validation success", lines, percent=True)
        report.text("\n".join(f"- **{item.name}**: {' '.join(item.about.split())}" for item in chosen))
    report.command(command)
    report.write(path)


def _results(report: Report, chosen: Sequence[Compared], before: Mapping[int, JsonMapping], target: float) -> None:
    """Test success, gain over imitation, in how many steps the target was reached, and seconds; the best first."""
    ordered = sorted(chosen, key=lambda item: -sum(item.gains(before)))
    reached: dict[str, Mapping[int, JsonMapping]] = {"imitation": before}
    reached |= {item.name: {seed: after["rl"] for seed, after in item.after.items()} for item in ordered}
    episodes = next(iter(before.values()))["episodes"]
    rows = [line(name, list(rates.values())) for name, rates in reached.items()]
    seeds_table(report, rows, list(before), f"Success on {episodes} test scenes with 95 % intervals.")
    header = ["", "points gained over imitation, by seed", f"control steps to {target:.0%}, by seed", "seconds"]
    steps = f"{target:.0%} is reached at the first of two validations in a row that are at least as good."
    report.table(header, [_cost(item, before, target) for item in ordered], steps)
    report.text("\n".join(_worse(item, before) for item in ordered if min(item.gains(before)) < 0))
    rates = {name: {seed: Rate(**rate) for seed, rate in found.items()} for name, found in reached.items()}
    report.bars("Test success", seed_bars(rates, "imitation"))


def _cost(item: Compared, before: Mapping[int, JsonMapping], target: float) -> list[str]:
    reached = [steps_to(curve, target) for curve in item.curves.values()]
    seconds = [after["seconds"]["rl"] for after in item.after.values()]
    return [
        item.name,
        ", ".join(f"{100 * gain:+.1f}" for gain in item.gains(before)),
        ", ".join("–" if steps is None else f"{steps / 1000:.0f}k" for steps in reached),
        f"{sum(seconds) / len(seconds):.0f}",
    ]


def _worse(item: Compared, before: Mapping[int, JsonMapping]) -> str:
    """The seeds on which it is worse, and what its description says after the first paragraph."""
    gains = zip(item.after, item.gains(before), strict=True)
    lost = ", ".join(f"seed {seed} ({100 * gain:+.1f} points)" for seed, gain in gains if gain < 0)
    found = " ".join(item.about.partition("\n\n")[2].split()) or "Why has not been found out."
    return f"- **Worse than imitation: {item.name} on {lost}.** {found}"
