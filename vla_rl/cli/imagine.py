"""``vla-rl imagine [train|improve|agreement|rank|rollout|play] ...``: RL in a learned world model.

Without a command, the whole comparison: imitation, a world model, RL in it, the same PPO in the simulator, and a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from vla_rl.cli.override import override, positional, subcommand, take_option
from vla_rl.contract.errors import UserError
from vla_rl.contract.hub import located
from vla_rl.recipes.config_files import file_of, keep_file, load_config, load_kept_files
from vla_rl.recipes.imagine.agreement import Rank, effort, evaluate_world_model, needed, rank_policies
from vla_rl.recipes.imagine.comparison import ImagineComparison, compare
from vla_rl.recipes.imagine.play import Play, serve, steering_of
from vla_rl.recipes.imagine.recipe import SavedRun, find_run
from vla_rl.recipes.imagine.rollout import Rollout, write_rollout
from vla_rl.recipes.recipe import require_recipe, run_in
from vla_rl.recipes.terminal import console, say_the_way, sigterm_like_ctrl_c
from vla_rl.training.tracking import RunFolder, config_of, write_json

Options = TypeVar("Options")


def imagine(arguments: Sequence[str]) -> None:
    """Run one of the commands, or the whole comparison."""
    given = list(arguments)
    if given and not given[0].startswith("-"):
        subcommand("imagine", given, COMMANDS)
        return
    config: ImagineComparison = override(ImagineComparison(), given, "vla-rl imagine")
    with config.on_engine():
        found = compare(config)
    before, after = found["imitation"], found["imagined_rl"]
    console.print(
        f"\n[bold]imitation {before['success']:.1%}  ->  RL in imagination {after['success']:.1%}[/bold] on "
        f"{after['episodes']} test episodes, with {after['simulator_episodes']} simulated ones.  "
        f"Open {found['report']}"
    )


def train(arguments: Sequence[str]) -> None:
    """``vla-rl imagine train [FILE.py:function] [--out RUN] [--field value ...]``: collect and train a world model."""
    given = list(arguments)
    config, rest = (given[0], given[1:]) if given and not given[0].startswith("-") else ("imagine.py:lift", given)
    out, rest = take_option(rest, "--out", "runs/imagination")
    folder = RunFolder(out, override(load_config(config), rest, f"vla-rl imagine train {config}"))
    keep_file(file_of(config), folder.path)
    folder.add_command(["vla-rl", "imagine", "train", *arguments])
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
    """``vla-rl imagine improve RUN``: RL in the world model that was trained there."""
    run = _only_run("improve", arguments)
    load_kept_files(run)
    require_recipe(config_of(run), run)
    run_in(RunFolder.resume(run))


def agreement(arguments: Sequence[str]) -> None:
    """``vla-rl imagine agreement RUN [--scenes N]``: how well it predicts replays and policies; ``agreement.json``."""
    scenes, rest = take_option(list(arguments), "--scenes", "128")
    run = _only_run("agreement", rest)
    if not scenes.isdigit() or int(scenes) < 1:
        raise UserError(f"--scenes {scenes!r} is no number of scenes, so nothing was played; write --scenes 128.")
    found = evaluate_world_model(run, int(scenes))
    write_json(run / "agreement.json", found)
    for table in found["replays"]:
        console.print(
            f"{table['horizon']:3d} steps: {table['tp']} true and imagined, {table['fp']} imagined only, "
            f"{table['fn']} true only, {table['tn']} neither; kappa {table['kappa']:.2f}"
        )
    console.print(f"r {found['policies']['r']:.2f} over {found['policies']['policies']} policies; {run}/agreement.json")


def rank(arguments: Sequence[str]) -> None:
    """``vla-rl imagine rank RUN POLICY POLICY ...``: which is best, and what would decide the rest."""
    given = list(arguments)
    count = next((i for i, text in enumerate(given) if text.startswith("-")), len(given))
    policies = [located(name) for name in given[1:count]]
    folder, config = _run_and_options("rank", [*given[: min(1, count)], *given[count:]], Rank())
    found, searches = rank_policies(SavedRun.load(folder), policies, config)
    for one in found.estimates:
        console.print(f"{one.success:6.1%} [{one.low:.1%}, {one.high:.1%}], best with {one.best:4.0%}: {one.name}")
    open_pairs = [pair for pair in found.pairs if not pair.decided]
    console.print(f"{len(found.pairs) - len(open_pairs)} of {len(found.pairs)} pairs are decided.")
    for pair in open_pairs:
        what = needed(pair)
        console.print(f"  {pair.better} > {pair.worse} with {pair.probability:.1%}; real episodes to decide it: {what}")
    console.print(effort(searches))
    console.print(f"{config.out or find_run(folder)}/rank.html")


def rollout(arguments: Sequence[str]) -> None:
    """``vla-rl imagine rollout RUN``: recorded actions replayed in the world model, as a page of clips."""
    folder, config = _run_and_options("rollout", arguments, Rollout())
    write_rollout(SavedRun.load(folder), config)


def play(arguments: Sequence[str]) -> None:
    """``vla-rl imagine play RUN``: steer an imagined rollout from the keyboard until Ctrl-C."""
    folder, config = _run_and_options("play", arguments, Play())
    run = SavedRun.load(folder)
    steering, policy = steering_of(run, config.steps)
    with sigterm_like_ctrl_c(), serve(steering, str(run.folder), policy, config.port) as server:
        console.print(f"steer it at http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)")
        say_the_way(server.server_port)
        try:
            server.serve_forever()
        except KeyboardInterrupt as stop:
            raise type(stop)(f"stopped playing; nothing in {run.folder} was changed.") from stop


def _only_run(command: str, arguments: Sequence[str]) -> Path:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError(f"imagine {command} needs one run folder with a world model; write its path.")
    return find_run(arguments[0])


def _run_and_options(command: str, arguments: Sequence[str], default: Options) -> tuple[str, Options]:
    """The run folder, first of ``arguments``, and ``default`` overridden by the others; UserError without a folder."""
    (folder,), rest = positional(arguments, f"imagine {command} RUN", default, "runs/imagine")
    options: Options = override(default, rest, f"vla-rl imagine {command} RUN")
    return folder, options


COMMANDS = {
    "train": train,
    "improve": improve,
    "agreement": agreement,
    "rank": rank,
    "rollout": rollout,
    "play": play,
}
