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
from statistics import fmean
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
from vla_rl.recipes.trainers import placed
from vla_rl.recipes.workers import EngineOptions, Launcher, chosen_engine
from vla_rl.training.device import resolve_device
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
    """One task: ``imitate`` and the values of ``methods`` {shown name: function} are config functions."""

    name: str
    imitate: str
    methods: Mapping[str, str]
    out: Path

    def run(self, name: str, seed: int) -> Path:
        """The folder of a method's run, or of "imitate"."""
        return self.out / f"{name}-{seed}"


@dataclass(frozen=True)
class Comparison(EngineOptions):
    """Methods that improve the same policies.  Each run is a process of its own; what is finished is not run again."""

    preset: ClassVar[str]

    config: str = "compare.py"  # where the methods are
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    device: str = "cpu"  # of all runs: "cpu", "cuda", "cuda:1", "auto"
    target: float = 0.85  # validation success whose cost in control steps is tabled
    out: str = "runs/compare"

    def tasks(self) -> tuple[Task, ...]:
        raise NotImplementedError

    def improving(self, task: Task) -> dict[str, list[Cell]]:
        """The cells that improve the imitation policies of ``task``, by what they do, in turn."""
        return {"improve": [self.cell(task, name, seed) for seed in self.seeds for name in task.methods]}

    def run(self) -> None:
        """Imitate once per task and seed, improve by every method, write ``results.json`` and ``report.html``."""
        tasks, out = self.tasks(), Path(self.out)
        for task in tasks:
            for function in (task.imitate, *task.methods.values()):
                load_config(function)  # an unknown name should be known before hours of work
        steps: dict[str, list[Cell]] = {}
        for task in tasks:
            first = [Cell(task.run("imitate", seed), task.imitate, self._given(seed)) for seed in self.seeds]
            for what, cells in {"imitate": first, **self.improving(task)}.items():
                steps.setdefault(what, []).extend(cells)
        run_sweep(out, steps, self.processes)
        compared = {task.name: self._compared(task) for task in tasks}
        write_json(out / "results.json", [row for found in compared.values() for one in found for row in one.rows])
        write_page(out / "report.html", compared, self.target, f"vla-rl compare {self.preset}")

    def cell(self, task: Task, name: str, seed: int) -> Cell:
        """The run that improves the imitation policy of its seed."""
        function, start = task.methods[name], task.run("imitate", seed)
        given = [*self._given(seed), "--policy", str(start / "checkpoints" / "imitation")]
        if hasattr(load_config(function), "demonstrations"):
            given += ["--demonstrations", str(start / "demonstrations")]
        return Cell(task.run(name, seed), function, tuple(given))

    def _given(self, seed: int) -> tuple[str, ...]:
        return ("--seed", str(seed), *on_device(self.device))

    def _compared(self, task: Task) -> list[Compared]:
        before: list[JsonObject] = [{"seed": seed, "imitation": self._before(task, seed)} for seed in self.seeds]
        found = []
        for name, function in task.methods.items():
            rows = [{"method": name, "task": task.name, **one, **_end(task.run(name, one["seed"]))} for one in before]
            found.append(Compared(name.replace("_", " "), inspect.getdoc(config_function(function)) or "", rows))
        return found

    def _before(self, task: Task, seed: int) -> JsonObject:
        """The imitation policy's own success on the test scenes, played once."""
        folder = task.run("imitate", seed)
        if not (folder / "test.json").exists():
            recipe = load_config(task.imitate)
            policy = placed(load_policy(folder / "checkpoints" / "imitation"), resolve_device(self.device))
            scenes = seed_ranges.held_out(seed_ranges.TEST, recipe.evaluation.test)
            outcomes = play(recipe.env, policy, scenes, recipe.evaluation, seed, f"test {folder.name}")
            write_json(folder / "test.json", asdict(outcomes.rate))
        return read_json(folder / "test.json")


def _end(run: Path) -> JsonObject:
    """Test success, ``gain`` where a run played imitation on the same scenes, and what it took in the simulator.

    Episodes are all but the test's.  Runs in imagination validate there, which is no validation here.
    """
    found, watched = metrics.summary(run), metrics.watched(run)
    seconds = round(sum(found["seconds"].values()), 1)
    if "imagined_rl" in found:
        after, episodes, watched = found["imagined_rl"], found["simulator_episodes"], []
    else:
        after, episodes = found["rl"], found["episodes"] + sum(row["played"] for row in watched)
    end = {"rl": after, "gain": found.get("gain"), "simulator_episodes": episodes}
    return end | {"seconds": seconds, "validations": watched}


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
        lift = self._task("lift", {name: name for name in self.lift})
        place = self._task("place", {name: f"place_{name}" for name in self.place})
        return tuple(task for task in (lift, place) if task.methods)

    def _task(self, name: str, methods: Mapping[str, str]) -> Task:
        functions = {shown: f"{self.config}:{function}" for shown, function in methods.items()}
        return Task(name, f"{self.config}:imitate_{name}", functions, Path(self.out) / name)


@dataclass(frozen=True)
class Samplers(Comparison):
    """Flow samplers on the same budget.  Each run is a process of its own; what is finished is not run again."""

    preset = "samplers"

    config: str = "demo.py"  # its functions of these names, and "imitate"
    out: str = "runs/study"
    samplers: tuple[str, ...] = ("last_step", "one_step", "all_steps", "flow_ou", "flow_ddim", "flow_noise")

    def tasks(self) -> tuple[Task, ...]:
        methods = {name: f"{self.config}:{name}" for name in self.samplers}
        return (Task("lift", f"{self.config}:imitate", methods, Path(self.out)),)


@dataclass(frozen=True)
class Compared:
    """One method on one task.

    about   what it is, the first paragraph, and what was found about it
    rows    of ``results.json``, one for each seed
    """

    name: str
    about: str
    rows: Sequence[JsonMapping]

    @property
    def gains(self) -> list[float]:
        """Points of test success won over the imitation policy, by seed."""
        return [100 * float(row["rl"]["success"] - row["imitation"]["success"]) for row in self.rows]


def steps_to(curve: Sequence[JsonMapping], target: float) -> int | None:
    """Control steps at the first of two consecutive validations of at least ``target``; None if there are none."""
    for one, two in pairwise(curve):
        if min(one["success"], two["success"]) >= target:
            return int(one["env_steps"])
    return None


def write_page(path: Path, compared: Mapping[str, Sequence[Compared]], target: float, command: str) -> None:
    """``compared`` {task: methods}."""
    subtitle = "The same imitation policies and demonstrations, never pooled over seeds"
    report = Report("Methods that improve a policy, side by side", subtitle)
    for task, chosen in compared.items():
        report.section(task.capitalize())
        _results(report, chosen, target)
        if watched := [item for item in chosen if any(row["validations"] for row in item.rows)]:
            report.text("While learning, on validation scenes:")
        for item in watched:
            lines = [metrics.curve_of(f"seed {row['seed']}", row["validations"], *_CURVE) for row in item.rows]
            report.curves(f"{task}: {item.name}", "control steps", "validation success", lines, percent=True)
        report.text("\n".join(f"- **{item.name}**: {' '.join(item.about.split())}" for item in chosen))
    report.command(command)
    report.write(path)


_CURVE = ("env_steps", "success", "low", "high")
_COSTS = (
    "Points have an interval where a run played the imitation policy on the same scenes. The target is reached at the "
    "first of two validations in a row that are at least as good. Episodes are all that were simulated after "
    "imitation, except the test's; methods that share a world model count its episodes, but not the seconds of its "
    "training, except for the first."
)


def _results(report: Report, chosen: Sequence[Compared], target: float) -> None:
    """Test success, and what was won over imitation at which cost; the best first."""
    ordered = sorted(chosen, key=lambda item: -sum(item.gains))
    before = {row["seed"]: row["imitation"] for row in chosen[0].rows}
    reached = {"imitation": before} | {item.name: {row["seed"]: row["rl"] for row in item.rows} for item in ordered}
    rows = [line(name, list(found.values())) for name, found in reached.items()]
    episodes = next(iter(before.values()))["episodes"]
    seeds_table(report, rows, list(before), f"Success on {episodes} test scenes with 95 % intervals.")
    costs = (f"control steps to {target:.0%}", "episodes", "seconds")
    header = ["points won", *(f"seed {seed}" for seed in before), *costs]
    report.table(header, [_cost(item, target) for item in ordered], _COSTS)
    report.text("\n".join(_worse(item) for item in ordered if min(item.gains) < 0))
    grouped = ((f"seed {seed}", name, Rate(**rates[seed])) for seed in before for name, rates in reached.items())
    report.bars("Test success", [Bar.of(name, rate, seed, name == "imitation") for seed, name, rate in grouped])


def _cost(item: Compared, target: float) -> list[str | None]:
    """Points won and control steps, of every seed; mean episodes and seconds."""
    won = [f"{points:+.1f}{_paired(row['gain'])}" for points, row in zip(item.gains, item.rows, strict=True)]
    reached = [steps_to(row["validations"], target) for row in item.rows]
    steps = ["–" if found is None else f"{found / 1000:.0f}k" for found in reached]
    means = [fmean(row[key] for row in item.rows) for key in ("simulator_episodes", "seconds")]
    return [item.name, *won, ", ".join(steps) if set(steps) != {"–"} else None, *(f"{mean:.0f}" for mean in means)]


def _paired(gain: JsonMapping | None) -> str:
    return "" if gain is None else f" [{100 * gain['low']:.1f}, {100 * gain['high']:.1f}]"


def _worse(item: Compared) -> str:
    """The seeds on which it is worse, and what its description says after the first paragraph."""
    gains = ((row["seed"], gain) for row, gain in zip(item.rows, item.gains, strict=True))
    lost = ", ".join(f"seed {seed} ({gain:+.1f} points)" for seed, gain in gains if gain < 0)
    found = " ".join(item.about.partition("\n\n")[2].split()) or "Why has not been found out."
    return f"- **Worse than imitation: {item.name} on {lost}.** {found}"
