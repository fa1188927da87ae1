"""``vla-rl imagine``: RL in a world model beside the same PPO in the simulator; and one part more or less at a time.

Both begin with imitation, run every part as a process of its own, and end with a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vla_rl.contract.config import JsonMapping, JsonObject
from vla_rl.contract.trust import read_json
from vla_rl.evaluation.report import Point, Report, Series, Tile, percent
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes import metrics
from vla_rl.recipes.compare import Cell, Comparison, Task, on_device, run_sweep
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.imagine.agreement import evaluate_world_model
from vla_rl.recipes.imagine.recipe import Imagine, SavedRun
from vla_rl.recipes.imagine.rollout import clips
from vla_rl.recipes.metrics import rows, validation_curve, watched
from vla_rl.recipes.workers import EngineOptions
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class ImagineComparison(EngineOptions):
    """Runs are separate processes, one per core; those whose ``summary.json`` exists are not repeated."""

    seed: int = 1
    policy: str = ""  # a checkpoint folder; without one, the demo's imitation is made first
    recipe: str = "imagine.py:lift"
    simulator: str = "demo.py:last_step"  # the same RL without a world model
    scenes: int = 128  # test scenes for each policy that is rated in both
    processes: int = 2
    device: str = "cpu"  # of all runs: "cpu", "cuda", "cuda:1", "auto"
    out: str = "runs/imagine"


def compare(config: ImagineComparison) -> JsonObject:
    """Imitate, improve in imagination and in the simulator, evaluate; write ``summary.json`` and ``report.html``."""
    for function in (config.recipe, config.simulator):
        load_config(function)  # an unknown name should be known before minutes of work
    out = Path(config.out)
    first_given = ("--seed", str(config.seed), *on_device(config.device))
    policy = config.policy or str(out / "imitation" / "checkpoints" / "imitation")
    given = (*first_given, "--policy", policy)
    every_five = ("--rl.loop.validate-every", "5")  # how many episodes it needs is to be read from its curve
    first = [] if config.policy else [Cell(out / "imitation", "demo.py:imitate", first_given)]
    second = [
        Cell(out / "imagination", config.recipe, given),
        Cell(out / "simulator", config.simulator, (*given, *every_five)),
    ]
    run_sweep(out, {"imitate": first, "improve": second}, config.processes)
    found = evaluate_world_model(out / "imagination", config.scenes)
    write_json(out / "agreement.json", found)
    summary = summarize(out)
    write_json(out / "summary.json", summary)
    write_report(out, summary, found)
    return summary | {"report": str(out / "report.html")}


def summarize(out: Path) -> JsonObject:
    """The three policies side by side; ``simulator_episodes`` counts all after imitation except the final test's."""
    imagination, simulator = metrics.summary(out / "imagination"), metrics.summary(out / "simulator")
    curve, imagined = metrics.watched(out / "simulator"), imagination["imagined_rl"]
    enough = [row["episodes"] for row in curve if row["success"] >= imagined["success"]]
    spent = {
        "simulator_episodes": imagination["simulator_episodes"],
        "seconds": sum(imagination["seconds"].values()),
    }
    return {
        "imitation": imagination["imitation"] | {"simulator_episodes": 0, "seconds": 0.0},
        "imagined_rl": imagined | spent,
        "simulator_rl": simulator["rl"]
        | {
            "simulator_episodes": simulator["episodes"],
            "seconds": sum(simulator["seconds"].values()),
            "episodes_to_imagined_success": enough[0] if enough else None,
            "validation_episodes": sum(row["played"] for row in curve),
        },
        "gain": imagination["gain"],
    }


# -- its page ----------------------------------------------------------------------------------------------------------

_CLIPS = 6
_LOSSES = {
    "state_dynamics": "State dynamics",
    "mode_classifier": "Mode classifier",
    "video": "Video",
    "outcome": "Outcome",
}


def write_report(out: Path, summary: JsonMapping, found: JsonMapping) -> None:
    """Write ``report.html`` into ``out``, which holds the runs "imagination" and "simulator"."""
    before, after = summary["imitation"]["success"], summary["imagined_rl"]["success"]
    report = Report(
        f"{before:.0%} by imitation, {after:.0%} after reinforcement learning in imagination",
        "A small vision-language-action policy that gets better in a learned video model, on two CPU cores",
    )
    _headline(report, summary)
    _learning(report, out)
    _decisions(report, out / "imagination")
    _replays(report, found)
    _prediction_quality(report, found)
    _clips(report, out / "imagination")
    _policies(report, found)
    _fine_print(report, summary, found)
    report.write(out / "report.html")


def _headline(report: Report, summary: JsonMapping) -> None:
    methods = {"Imitation": "imitation", "RL in imagination": "imagined_rl", "RL in the simulator": "simulator_rl"}
    tiles = []
    for title, name in methods.items():
        way = summary[name]
        note = f"{way['simulator_episodes']:,} simulated episodes after imitation"
        tone: Literal["", "good"] = "good" if name == "imagined_rl" and summary["gain"]["low"] > 0 else ""
        tiles.append(Tile(title, way["success"], way["low"], way["high"], note=note, tone=tone))
    report.tiles(tiles)
    gain, imagined, simulator = summary["gain"], summary["imagined_rl"], summary["simulator_rl"]
    needed = simulator["episodes_to_imagined_success"]
    beside = (
        f"The same PPO in the simulator was first as good after **{needed:,}** episodes."
        if needed is not None
        else f"The same PPO in the simulator was never as good in {simulator['simulator_episodes']:,} episodes."
    )
    interval = f"[{100 * gain['low']:.1f}, {100 * gain['high']:.1f}]"
    report.text(
        f"Success changed by **{100 * gain['mean']:+.1f} points** {interval} on {imagined['episodes']} test scenes of "
        f"the simulator (same scenes, Tango's interval; McNemar's exact test: p = {gain['mcnemar_p']:.2g}). For that "
        f"**{imagined['simulator_episodes']:,}** episodes were simulated in all; everything else was imagined. "
        f"{beside} All intervals are 95 %."
    )


def _learning(report: Report, out: Path) -> None:
    report.section(
        "While it learned",
        "Success during training is that of imagined rollouts; only the test says what it means in the simulator.",
    )
    lines = rows(out / "imagination", "rl")
    deployed = validation_curve("in imagination", lines, "step")
    exploring = [row for row in lines if row.get("rollout/episodes")]
    tried = Series(
        "exploring",
        [row["step"] for row in exploring],
        [row["rollout/successes"] / row["rollout/episodes"] for row in exploring],
    )
    report.curves("Success in imagination", "iteration", "success", [deployed, tried], percent=True)
    found = watched(out / "simulator")
    simulator = metrics.curve_of("PPO in the simulator", found, "episodes", "success", "low", "high")
    report.curves("The same PPO in the simulator", "simulated episodes", "success", [simulator], percent=True)
    stages = sorted({row["stage"] for row in rows(out / "imagination") if row["stage"].startswith("world")})
    for name, title in _LOSSES.items():
        losses = [_trained(out / "imagination", stage, name) for stage in stages]
        report.curves(f"World model: {title.lower()}", "step", "loss", [loss for loss in losses if loss.x])


def _trained(run: Path, stage: str, name: str) -> Series:
    lines = [row for row in rows(run, stage) if name in row]
    steps = [row["step"] - lines[0]["step"] for row in lines]
    return Series(stage.removeprefix("world "), steps, [row[name] for row in lines])


def _decisions(report: Report, run: Path) -> None:
    decisions = read_json(run / "coevolution.json")
    bought = sum(one["buy"] for one in decisions)
    report.section(
        "Does the world model still fit the policy?",
        "Looked at every few iterations.  Where it no longer fits, real episodes of the policy of that moment may be "
        f"bought, as many as plan.coevolution.budget allows; {bought} were.",
    )
    played = [one for one in decisions if one["signals"]["real"] is not None]

    def signal(name: str, key: str, of: Sequence[JsonMapping] = decisions) -> Series:
        return Series(name, [one["iteration"] for one in of], [one["signals"][key] for one in of])

    pair = [
        signal("in imagination", "imagined"),
        *([signal("in reality, as last played", "real", played)] if played else []),
    ]
    report.curves("Success of the exploring policy", "iteration", "success", pair, percent=True)
    uncertain = [signal("imagined rollouts", "uncertain")]
    report.curves("Rollouts truncated by uncertainty", "iteration", "share", uncertain, percent=True)
    errors = [signal("imagined rollouts", "inverse_dynamics_error")]
    report.curves("Inverse-dynamics error", "iteration", "half ranges", errors)
    header = ["iteration", "imagined", "real", "uncertain", "error", "episodes bought", "reasons"]
    report.table(header, [_decision(one["iteration"], one["signals"], one) for one in decisions])


def _decision(iteration: int, signals: JsonMapping, one: JsonMapping) -> list[str | int]:
    shares = [
        "not played" if signals[key] is None else f"{signals[key]:.0%}" for key in ("imagined", "real", "uncertain")
    ]
    reasons = "; ".join(one["reasons"]) or "none"
    return [iteration, *shares, f"{signals['inverse_dynamics_error']:.3f}", one["buy"], reasons]


def _replays(report: Report, found: JsonMapping) -> None:
    count = sum(found["replays"][-1][name] for name in ("tp", "fp", "fn", "tn"))
    report.section(
        "World-model accuracy on held-out episodes",
        f"{count} recorded episodes that the world model was not trained on, replayed from their first picture with "
        f"the recorded actions. RL used rollouts of {found['horizon']} control steps.",
    )
    table: list[list[str | int | None]] = []
    for one in found["replays"]:
        rates = (percent(Rate(**one[name])) if one[name] else None for name in ("accuracy", "hallucinated"))
        table.append([*(one[name] for name in ("horizon", "tp", "fp", "fn", "tn")), *rates, f"{one['kappa']:.2f}"])
    header = ["steps", "both", "imagined only", "true only", "neither", "agreement", "hallucinated", "kappa"]
    report.table(header, table, "Hallucinated: failures that are imagined as successes.")
    foresight = found["foresight"]
    report.text(
        "Where success is not decided yet, more than a call before an episode's end, the model ranks an episode that "
        f"will succeed above one that will fail, at the same control step, in **{foresight['auroc']:.0%}** of "
        f"{foresight['pairs']:,} pairs (AUROC; chance: 50 %)."
    )


def _prediction_quality(report: Report, found: JsonMapping) -> None:
    report.section(
        "Quality of predicted pictures",
        "PSNR is flattered by a still background, so that of a copied first picture stands beside it; what counts is "
        "where the named object is, found by a probe that was trained on true pictures and has a small error itself.",
    )
    rows = []
    for one in found["prediction_quality"]:
        shown = [one["horizon"], one["replays"], f"{one['psnr']:.1f} dB", f"{one['copied']:.1f} dB"]
        errors = one.get("object", {})
        rows.append([*shown, *(_millimetres(errors.get(name)) for name in ("imagined", "copied", "probe"))])
    header = ["steps", "replays", "predicted", "copied", "object when predicted", "copied", "probe on true pictures"]
    if any("reward" in one for one in found["prediction_quality"]):
        header.append("rewards of the last call, correlation")
        for row, one in zip(rows, found["prediction_quality"], strict=True):
            agreement = one.get("reward") or {}
            row.append(None if agreement.get("correlation") is None else f"{agreement['correlation']:.2f}")
    report.table(header, rows, "Object: median and 90th percentile of the error.")


def _millimetres(error: JsonMapping | None) -> str | None:
    return None if error is None else f"{error['median']:.0f} / {error['p90']:.0f} mm"


def _clips(report: Report, run: Path) -> None:
    saved = SavedRun.load(run)
    report.section(
        "What it looks like",
        "Held-out episodes, recorded on the left and imagined with the same actions on the right; errors are shown "
        "more often than they are made. A green line: the task is done; the bar below: uncertainty, its limit in the "
        "middle.",
    )
    report.videos("", clips(saved.calibrated, saved.held_out, _CLIPS))


def _policies(report: Report, found: JsonMapping) -> None:
    agreed = found["policies"]
    report.section(
        "Policies rated in imagination and in the simulator",
        f"{agreed['policies']} policies, fixed beforehand, on the same scenes: r = {agreed['r']:.2f} "
        f"[{agreed['r_low']:.2f}, {agreed['r_high']:.2f}], Kendall's tau {agreed['tau']:.2f}, MMRV "
        f"{agreed['mmrv']:.3f} (gaps of the true rates, strict order), slope {agreed['slope']:.2f}; "
        f"imagined rates are {100 * abs(agreed['optimism']):.1f} points too "
        f"{'high' if agreed['optimism'] > 0 else 'low'} on average, "
        f"and leaving out one policy changes r by at most {agreed['leverage']:.2f}.",
    )
    points = [Point(one["name"], Rate(**one["true"]), Rate(**one["imagined"])) for one in found["ratings"]]
    report.scatter("Success", "true", "imagined", points)
    report.table(["policy", "true", "imagined"], [[one.name, percent(one.x), percent(one.y)] for one in points])


def _fine_print(report: Report, summary: JsonMapping, found: JsonMapping) -> None:
    report.section(
        "How it was done",
        "Simulated episodes are all those after the imitation policy exists: to learn the world from, to calibrate, to "
        "hold out, and bought later. Only the final test is not among them: "
        f"{summary['imagined_rl']['episodes']} scenes for each policy, and {found['test_episodes']:,} episodes to "
        "rate policies in the simulator as well, after everything was learnt and chosen.",
    )
    methods = ("imitation", "imagined_rl", "simulator_rl")
    report.table(["what", "seconds"], [[name.replace("_", " "), round(summary[name]["seconds"])] for name in methods])
    report.command("vla-rl imagine")


# -- one part more or less ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagineStudy(Comparison):
    """Methods of which most learn in imagination; those that would train the same world model share it.

    Each run is a process of its own; what is finished is not run again.
    """

    preset = "imagination"

    methods: tuple[str, ...] = (
        "lift",
        "no_uncertainty",
        "with_keyframes",
        "with_resampling",
        "with_coevolution",
        "residual_td3",
    )
    config: str = "imagine.py"
    imitation: str = "demo.py:imitate"
    out: str = "runs/imagine-study"

    def tasks(self) -> tuple[Task, ...]:
        methods = {name: f"{self.config}:{name}" for name in self.methods}
        return (Task("one part more or less at a time", self.imitation, methods, Path(self.out)),)

    def improving(self, task: Task) -> dict[str, list[Cell]]:
        """Methods that train a world model, then those that begin with the one of another."""
        trained = {name: _training(load_config(function)) or name for name, function in task.methods.items()}
        steps: dict[str, list[Cell]] = {"train and improve": [], "improve": []}
        for seed in self.seeds:
            for name in trained:
                cell, first = self.cell(task, name, seed), next(one for one in trained if trained[one] == trained[name])
                if name == first:
                    steps["train and improve"].append(cell)
                else:
                    given = ("--plan.init-from", str(task.run(first, seed)))
                    steps["improve"].append(replace(cell, arguments=(*cell.arguments, *given)))
        return steps


def _training(recipe: object) -> tuple[object, ...] | None:
    """What a recipe's world model is trained on, and how; None for a recipe without one."""
    if not isinstance(recipe, Imagine):
        return None
    plan = recipe.plan
    return plan.model, plan.collect, plan.demonstrations, plan.fit
