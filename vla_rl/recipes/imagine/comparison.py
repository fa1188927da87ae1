"""RL in a world model beside the same PPO in the simulator, from one imitation policy, and a page about both."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vla_rl.evaluation import suite
from vla_rl.evaluation.agreement import policy_agreement
from vla_rl.experience.trajectories import Trajectories
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.imagine.closed_loop import closed_loop
from vla_rl.recipes.imagine.prediction_quality import likeness
from vla_rl.recipes.imagine.report import write_page
from vla_rl.recipes.imagine.saved_run import DreamRun, opened
from vla_rl.recipes.metrics import watched
from vla_rl.recipes.sweep import Cell, run_cells
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class ImagineStory:
    """The cells are separate processes, one per core; those whose ``summary.json`` exists are not run again."""

    seed: int = 1
    policy: str = ""  # a checkpoint folder; without one, the demo's imitation is made first
    recipe: str = "imagine.py:lift"
    simulator: str = "demo.py:last_step"  # what dreams are compared with
    scenes: int = 128  # test scenes for each policy whose dreams are compared with the truth
    processes: int = 2
    out: str = "runs/imagine"


def judged(run: Path, scenes: int) -> dict[str, Any]:
    """Open and closed loop, for the world model of a finished or unfinished run."""
    recipe, dreamt = opened(run)[0], DreamRun.load(run)
    trained = dreamt.trained
    trained.model.to(recipe.plan.device)
    names = {"imitation": "start", "imagined RL": "best"}
    kept = {name: run / "checkpoints" / folder for name, folder in names.items()}
    policies = {name: TinyVLA.from_pretrained(at) for name, at in kept.items() if at.exists()}
    seeds = suite.held_out(suite.TEST, scenes)
    rated = closed_loop(trained, recipe.env, policies, seeds, recipe.evaluation.num_envs, recipe.seed)
    rates = [one.imagined.success for one in rated], [one.true.success for one in rated]
    learnt = Trajectories.load(run / "episodes" / "learnt.npz")
    return {
        "replays": [asdict(table) for table in trained.agreement(dreamt.held_out)],
        "likeness": likeness(trained, recipe.env, learnt, dreamt.held_out, recipe.seed),
        "horizon": trained.dream.horizon,
        "policies": asdict(policy_agreement(*rates)),
        "rated": [asdict(one) for one in rated],
        "test_episodes": len(rated) * scenes,
    }


def story(config: ImagineStory) -> dict[str, Any]:
    """Imitate, dream, compare, judge; leaves ``summary.json`` and ``report.html``, and returns the summary."""
    for function in (config.recipe, config.simulator):
        load_config(function)  # an unknown name should be known before minutes of work
    out, seed = Path(config.out), ("--seed", str(config.seed))
    policy = config.policy or str(out / "imitation" / "checkpoints" / "imitation")
    given = (*seed, "--policy", policy)
    every_five = ("--rl.loop.validate-every", "5")  # how many episodes it needs is to be read from its curve
    try:
        if not config.policy:
            run_cells([Cell(out / "imitation", "demo.py:imitate", seed)], 1, "imitate")
        cells = [
            Cell(out / "dreams", config.recipe, given),
            Cell(out / "simulator", config.simulator, (*given, *every_five)),
        ]
        run_cells(cells, config.processes, "improve")
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; what is finished stays in {out}, the same command goes on.") from stop
    found = judged(out / "dreams", config.scenes)
    write_json(out / "agreement.json", found)
    summary = summarised(out, found)
    write_json(out / "summary.json", summary)
    write_page(out, summary, found)
    return summary | {"report": str(out / "report.html")}


def summarised(out: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The three ways beside each other; ``simulator_episodes`` are all after imitation but those of the final test."""
    dreams, simulator = (json.loads((out / name / "summary.json").read_text()) for name in ("dreams", "simulator"))
    curve = watched(out / "simulator")
    imagined = dreams["imagined_rl"]
    enough = [row["episodes"] for row in curve if row["success"] >= imagined["success"]]
    return {
        "imitation": dreams["imitation"] | {"simulator_episodes": 0, "seconds": 0.0},
        "imagined_rl": imagined
        | {"simulator_episodes": dreams["simulator_episodes"], "seconds": sum(dreams["seconds"].values())},
        "simulator_rl": simulator["rl"]
        | {
            "simulator_episodes": simulator["episodes"],
            "seconds": sum(simulator["seconds"].values()),
            "episodes_to_imagined_success": enough[0] if enough else None,
            "validation_episodes": sum(row["played"] for row in curve),
        },
        "gain": dreams["gain"],
        "agreement": agreed(found),
    }


def agreed(found: dict[str, Any]) -> dict[str, Any]:
    """What a world model is judged by, at the horizon that is used."""
    table = next(one for one in found["replays"] if one["horizon"] == found["horizon"])
    hallucinated, policies = table["hallucinated"], found["policies"]
    return {
        "horizon": found["horizon"],
        "accuracy": table["accuracy"]["success"],
        "hallucinated": hallucinated and hallucinated["success"],
        "hallucinated_high": 1.0 if hallucinated is None else hallucinated["high"],
        **{name: policies[name] for name in ("policies", "r", "r_low", "r_high")},
    }
