"""The page of ``vla-rl imagine``: the gain of RL in imagination, the world model's accuracy, and clips of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vla_rl.contract.config import JsonMapping
from vla_rl.contract.trust import read_json
from vla_rl.evaluation.report import Point, Report, Series, Tile, percent
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.imagine.recipe import SavedRun
from vla_rl.recipes.imagine.rollout import clips
from vla_rl.recipes.metrics import rows, validation_curve, watched

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
    curve = watched(out / "simulator")
    episodes, success, low, high = ([row[name] for row in curve] for name in ("episodes", "success", "low", "high"))
    simulator = Series("PPO in the simulator", episodes, success, low, high)
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
    asked = [one["iteration"] for one in decisions]
    signals = {
        name: [one["signals"][name] for one in decisions]
        for name in ("imagined", "uncertain", "inverse_dynamics_error")
    }
    played = [one for one in decisions if one["signals"]["real"] is not None]
    real = [one["iteration"] for one in played], [one["signals"]["real"] for one in played]
    pair = [
        Series("in imagination", asked, signals["imagined"]),
        *([Series("in reality, as last played", *real)] if played else []),
    ]
    report.curves("Success of the exploring policy", "iteration", "success", pair, percent=True)
    truncated = [Series("imagined rollouts", asked, signals["uncertain"])]
    report.curves("Rollouts truncated by uncertainty", "iteration", "share", truncated, percent=True)
    report.curves(
        "Inverse-dynamics error",
        "iteration",
        "half ranges",
        [Series("imagined rollouts", asked, signals["inverse_dynamics_error"])],
    )
    table = [
        [
            one["iteration"],
            f"{one['signals']['imagined']:.0%}",
            "not played" if one["signals"]["real"] is None else f"{one['signals']['real']:.0%}",
            f"{one['signals']['uncertain']:.0%}",
            f"{one['signals']['inverse_dynamics_error']:.3f}",
            one["buy"],
            "; ".join(one["reasons"]) or "none",
        ]
        for one in decisions
    ]
    report.table(["iteration", "imagined", "real", "uncertain", "error", "episodes bought", "reasons"], table)


def _replays(report: Report, found: JsonMapping) -> None:
    count = sum(found["replays"][-1][name] for name in ("tp", "fp", "fn", "tn"))
    report.section(
        "World-model accuracy on held-out episodes",
        f"{count} recorded episodes that the world model was not trained on, replayed from their first picture with "
        f"the recorded actions. RL used rollouts of {found['horizon']} control steps.",
    )
    table = [
        [
            one["horizon"],
            one["tp"],
            one["fp"],
            one["fn"],
            one["tn"],
            percent(Rate(**one["accuracy"])),
            percent(Rate(**one["hallucinated"])) if one["hallucinated"] else None,
            f"{one['kappa']:.2f}",
        ]
        for one in found["replays"]
    ]
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
