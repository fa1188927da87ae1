"""RL in a world model beside the same PPO in the simulator, from one imitation policy, and a page about both."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.agreement import policy_agreement
from vla_rl.experience.trajectories import Trajectories
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import metrics
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.context import placed
from vla_rl.recipes.imagine.closed_loop import rate_policies
from vla_rl.recipes.imagine.prediction_quality import measure_prediction_quality
from vla_rl.recipes.imagine.report import write_report
from vla_rl.recipes.imagine.saved_run import SavedRun, load_run
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.sweep import Cell, on_device, run_sweep
from vla_rl.recipes.workers import EngineOptions
from vla_rl.training.device import resolve_device
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
    summary = summarize(out, found)
    write_json(out / "summary.json", summary)
    write_report(out, summary, found)
    return summary | {"report": str(out / "report.html")}


def evaluate_world_model(run: Path, scenes: int) -> JsonObject:
    """Agreement of the world model of ``run``, finished or not, with the simulator: replays, pictures and policies."""
    recipe, saved = load_run(run)[0], SavedRun.load(run)
    calibrated = saved.calibrated
    device = resolve_device(recipe.device)
    calibrated.model.to(device)
    names = {"imitation": "start", "imagined RL": "best"}
    kept = {name: run / "checkpoints" / folder for name, folder in names.items()}
    policies = {name: placed(load_policy(folder), device) for name, folder in kept.items() if folder.exists()}
    seeds = seed_ranges.held_out(seed_ranges.TEST, scenes)
    ratings = rate_policies(calibrated, recipe.env, policies, seeds, recipe.evaluation.num_envs, recipe.seed)
    rates = [one.imagined.success for one in ratings], [one.true.success for one in ratings]
    learnt = Trajectories.load(run / "episodes" / "learnt.npz")
    quality = measure_prediction_quality(calibrated, recipe.env, learnt, saved.held_out, recipe.seed)
    share, pairs = calibrated.foresight(saved.held_out)
    return {
        "replays": [asdict(table) for table in calibrated.agreement(saved.held_out)],
        "foresight": {"auroc": share, "pairs": pairs},
        "prediction_quality": quality,
        "horizon": calibrated.imagination.horizon,
        "policies": asdict(policy_agreement(*rates)),
        "ratings": [asdict(one) for one in ratings],
        "test_episodes": len(ratings) * scenes,
    }


def summarize(out: Path, found: JsonObject) -> JsonObject:
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
        "agreement": headline_agreement(found),
    }


def headline_agreement(found: JsonObject) -> JsonObject:
    """The agreement at the horizon that RL used, and that of the policies."""
    table = next(one for one in found["replays"] if one["horizon"] == found["horizon"])
    hallucinated, policies = table["hallucinated"], found["policies"]
    return {
        "horizon": found["horizon"],
        "accuracy": table["accuracy"]["success"],
        "hallucinated": hallucinated and hallucinated["success"],
        "hallucinated_high": 1.0 if hallucinated is None else hallucinated["high"],
        **{name: policies[name] for name in ("policies", "r", "r_low", "r_high")},
    }
