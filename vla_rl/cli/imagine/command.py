"""``vla-rl imagine [train|improve|agreement|rollout|play|study] ...``: a policy that gets better in its dreams.

Without a word, the whole story: imitation, a world model, RL in it, the same PPO in the simulator, and a page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vla_rl.cli.imagine.alike import likeness
from vla_rl.cli.imagine.closed_loop import closed_loop
from vla_rl.cli.imagine.page import write_page
from vla_rl.cli.imagine.run import DreamRun, located, opened
from vla_rl.cli.override import override
from vla_rl.cli.train import run_in, take_option
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.evaluation import suite
from vla_rl.evaluation.agreement import policy_agreement
from vla_rl.experience.trajectories import Trajectories
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.metrics import watched
from vla_rl.recipes.progress import console
from vla_rl.recipes.sweep import Cell, run_cells
from vla_rl.training.tracking import RunFolder, write_json


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


def imagine(arguments: Sequence[str]) -> None:
    """Run one of the commands, or the whole story."""
    given = list(arguments)
    if given and not given[0].startswith("-"):
        if given[0] not in _COMMANDS:
            raise UserError(f"imagine has no command {given[0]!r}; {did_you_mean(given[0], _COMMANDS)}")
        load(_COMMANDS[given[0]])(given[1:])
        return
    story(override(ImagineStory(), given, "vla-rl imagine"))


def train(arguments: Sequence[str]) -> None:
    """``vla-rl imagine train [FILE.py:function] [--out RUN] [--field value ...]``: gather and learn a world model."""
    config, rest = _named(arguments, "imagine.py:lift")
    out, rest = take_option(rest, "--out", "runs/dreams")
    folder = RunFolder(out, override(load_config(config), rest, f"vla-rl imagine train {config}"))
    if folder.moved_to:
        console.print(f"an earlier run was in {out}; it is now {folder.moved_to}.")
    try:
        folder.config.prepare(folder)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; go on with: vla-rl imagine improve {out}") from stop
    finally:
        folder.close()
    console.print(f"a world model is in {out}/checkpoints/world; go on with: vla-rl imagine improve {out}")


def improve(arguments: Sequence[str]) -> None:
    """``vla-rl imagine improve RUN``: RL in the dreams of a world model that was trained there."""
    run_in(RunFolder.resume(_run("improve", arguments)))


def agreement(arguments: Sequence[str]) -> None:
    """``vla-rl imagine agreement RUN [--scenes N]``: replays and policies, dreamt and true; ``RUN/agreement.json``."""
    scenes, rest = take_option(list(arguments), "--scenes", "128")
    run = _run("agreement", rest)
    if not scenes.isdigit() or int(scenes) < 1:
        raise UserError(f"--scenes {scenes!r} is no number of scenes, so nothing was played; write --scenes 128.")
    found = judged(run, int(scenes))
    write_json(run / "agreement.json", found)
    for table in found["replays"]:
        console.print(
            f"{table['horizon']:3d} steps: {table['tp']} true and dreamt, {table['fp']} dreamt only, {table['fn']} "
            f"true only, {table['tn']} neither; kappa {table['kappa']:.2f}"
        )
    console.print(f"r {found['policies']['r']:.2f} over {found['policies']['policies']} policies; {run}/agreement.json")


def judged(run: Path, scenes: int) -> dict[str, Any]:
    """Open and closed loop, for the world model of a finished or unfinished run."""
    recipe, dreamt = opened(run)[0], DreamRun.load(run)
    trained = dreamt.trained
    trained.model.to(recipe.plan.device)
    names = {"imitation": "start", "imagined RL": "best"}
    kept = {name: run / "checkpoints" / folder for name, folder in names.items()}
    policies = {name: TinyVLA.from_pretrained(at) for name, at in kept.items() if at.exists()}
    seeds = suite.held_out(suite.TEST, scenes)
    rated = closed_loop(trained, recipe.world, policies, seeds, recipe.evaluation.num_envs, recipe.seed)
    rates = [one.imagined.success for one in rated], [one.true.success for one in rated]
    learnt = Trajectories.load(run / "episodes" / "learnt.npz")
    return {
        "replays": [asdict(table) for table in trained.agreement(dreamt.held_out)],
        "likeness": likeness(trained, recipe.world, learnt, dreamt.held_out, recipe.seed),
        "horizon": trained.dream.horizon,
        "policies": asdict(policy_agreement(*rates)),
        "rated": [asdict(one) for one in rated],
        "test_episodes": len(rated) * scenes,
    }


def story(config: ImagineStory) -> None:
    """Imitate, dream, compare, judge; leaves ``summary.json`` and ``report.html``."""
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
    before, after = summary["imitation"], summary["imagined_rl"]
    console.print(
        f"\n[bold]imitation {before['success']:.1%}  ->  RL in dreams {after['success']:.1%}[/bold] on "
        f"{after['episodes']} test episodes, with {after['simulator_episodes']} simulated ones.  Open {out}/report.html"
    )


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


def _named(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """The config that the first argument names, and the others."""
    given = list(arguments)
    return (given[0], given[1:]) if given and not given[0].startswith("-") else (default, given)


def _run(command: str, arguments: Sequence[str]) -> Path:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError(f"imagine {command} needs one run folder, so it knows where to dream; write its path.")
    return located(arguments[0])


_COMMANDS = {
    "train": "vla_rl.cli.imagine.command:train",
    "improve": "vla_rl.cli.imagine.command:improve",
    "agreement": "vla_rl.cli.imagine.command:agreement",
    "rollout": "vla_rl.cli.imagine.rollout:rollout",
    "play": "vla_rl.cli.imagine.play:play",
    "study": "vla_rl.cli.imagine.study:study",
}
