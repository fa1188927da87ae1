"""``vla-rl train``, ``demo``, ``collect`` and ``compare``: everything that runs configs and records for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from vla_rl.cli.override import override, take_option
from vla_rl.cli.push import PushWhenDone
from vla_rl.contract.config import at_least, within
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.terminal import bar, console

Number = TypeVar("Number", int, float)
USAGE = """vla-rl train FILE.py:function [options] [--field value ...]
vla-rl train --resume RUN

Run the config that the function returns.  FILE.py is a path, or the name of a config that vla-rl ships.

  --out FOLDER       the run folder (default: runs/FUNCTION); an earlier run there is moved aside
  --seeds N          train on the seeds 1 to N in OUT/seed-1 ... with one table; {seed} in a value is the seed
  --processes P      with --seeds: how many run at a time (default: 2)
  --resume RUN       go on with a run that was stopped, with the config that it began with; a finished one goes on to
                     a larger --rl.loop.iterations or --rl.loop.env-steps
  --collectors N     collect in N processes (short for --rl.loop.collectors)
  --staleness K      which play on while the policy learns, at most K updates ahead (--rl.loop.staleness)
  --engine ray       start those processes, and those that evaluate, in a Ray cluster (default: local);
                     with --seeds: the runs themselves, on machines that share the disk
  --address ADDRESS  HOST:PORT of its head node (default: RAY_ADDRESS, or a new one on this machine)
  --gpus G           that each of them takes there (default: 0)
  --env NAME         environment of the catalogue, or package.module:make (short for --env.name)
  --field value      any field of the config, nested ones with dots (--rl.algorithm.gamma 0.98)

vla-rl train FILE.py:function --help lists the fields of that config, vla-rl inspect FILE.py:function their values."""


def train(arguments: Sequence[str]) -> None:
    """Run the recipe that a config function returns, or go on with a run that was stopped."""
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE)
        return
    engine, rest = take_option(list(arguments), "--engine", "local")
    address, rest = take_option(rest, "--address", "")
    gpus, rest = take_option(rest, "--gpus", "0")
    stopped, others = take_option(rest, "--resume", "")
    from vla_rl.recipes.recipe import resume
    from vla_rl.recipes.workers import new_engine, on_engine

    command = ["vla-rl", "train", *arguments]
    with on_engine(new_engine(engine, address, _number("--gpus", gpus, float))):
        if stopped:
            resume(stopped, partial(_changed, others, f"vla-rl train --resume {stopped}"), command)
        else:
            _begin(others, command)


def _changed(others: list[str], command: str, config: object) -> object:
    """``config`` with the fields that a resumed run was given."""
    return override(config, others, command) if others else config


def _begin(arguments: list[str], command: Sequence[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        raise UserError("train needs a config, so it knows what to run; write vla-rl train FILE.py:function.")
    target = arguments[0]
    out, rest = take_option(arguments[1:], "--out", f"runs/{target.rpartition(':')[2]}")
    seeds, rest = take_option(rest, "--seeds", "")
    if {"-h", "--help"} & set(rest):
        print(USAGE, end="\n\n", flush=True)
    from vla_rl.recipes.compare import train_seeds
    from vla_rl.recipes.recipe import run

    processes = "2"
    if seeds:
        processes, rest = take_option(rest, "--processes", processes)
    recipe = override(load_config(target), rest, f"vla-rl train {target}")  # a mistake is said before any run starts
    if seeds:
        count, at_a_time = _number("--seeds", seeds, int), _number("--processes", processes, int)
        train_seeds(target, count, Path(out), rest, at_a_time)
        return
    run(recipe, out, file_of(target), command)


def _number(name: str, given: str, kind: Callable[[str], Number]) -> Number:
    try:
        return kind(given)
    except ValueError as error:
        raise UserError(f"{name} {given!r} is no number, so nothing was run; write for example {name} 3.") from error


DEMO = "demo.py:demo"


def demo(arguments: Sequence[str]) -> None:
    """Collect, ground, imitate, improve by RL, evaluate, report; nothing is downloaded."""
    from vla_rl.recipes.recipe import run

    out, rest = take_option(list(arguments), "--out", "runs/demo")
    recipe = override(load_config(DEMO), rest, "vla-rl demo")
    summary = run(recipe, out, file_of(DEMO), ["vla-rl", "demo", *arguments])
    before, after, seconds = summary["imitation"], summary["rl"], sum(summary["seconds"].values())
    console.print(
        f"\n[bold]imitation {before['success']:.1%}  ->  RL {after['success']:.1%}[/bold] on {after['episodes']} test "
        f"episodes in {seconds:.0f} s.  Open {out}/report.html"
    )


@dataclass(frozen=True)
class Collect(PushWhenDone):
    """Record a LeRobotDataset v3.0: successes of the scripted expert, or all that a policy does, failures too.

    Every episode is on the disk when the next ones begin: ``--repair FOLDER`` finishes a recording that was killed.
    """

    env: EnvConfig = NO_ENV
    expert: str = ""  # "module:Class" instead of the expert that the task declares
    policy: str = ""  # a checkpoint or run instead of an expert: all of its episodes are kept, with their outcomes
    random: float = within(0.0, 0, 1)  # share of the policy's decisions that are one random action, held for the chunk
    vla: VLAOptions = VLAOptions()  # how ``policy`` is opened if it is a public folder; ours have their own
    device: str = "cpu"  # where the policy computes: "cpu", "cuda", "cuda:1", "auto"
    count: int = at_least(30, 1)
    seed: int = 1  # of the training run that they are for
    num_envs: int = at_least(16, 1)  # episodes played side by side
    out: str = "runs/demonstrations"
    video: Literal["auto", "always", "never"] = "auto"  # cameras as video: where it pays, all, or none (PNG)
    repair: str = ""  # record nothing: finish what is in this folder


def collect(arguments: Sequence[str]) -> None:
    """Record episode by episode, then finish the dataset."""
    from vla_rl.experience.datasets import Recording, move_aside
    from vla_rl.policies.pretrained import default_options

    named = take_option(list(arguments), "--policy", "")[0]
    config: Collect = override(Collect(vla=default_options(named)), arguments, "vla-rl collect")
    command = ["vla-rl", "collect", *arguments]
    if config.repair:
        _repair(Path(config.repair))
        config.push_dataset(Path(config.repair), command)
        return
    env_config, out = config.env.required("collect"), Path(config.out)
    env_config.check()
    with ExitStack() as closing_all:
        played = _played(config, env_config, closing_all)
        move_aside(out, console.print)
        episodes = steps = successes = 0
        try:
            kept = closing_all.enter_context(Recording(out, config.video))
            for episode in played:
                kept.add(episode)
                episodes, steps = episodes + 1, steps + len(episode.state)
                successes += bool(episode.extras["next.success"][-1])
        except KeyboardInterrupt as stop:
            if not episodes:
                raise
            raise KeyboardInterrupt(
                f"stopped with {episodes} episodes recorded; finish them with: vla-rl collect --repair {out}"
            ) from stop
    failed = f", {episodes - successes} of them failures" if config.policy else ""
    console.print(f"{episodes} episodes{failed}, {steps} control steps: {config.out}")
    config.push_dataset(out, command)


def _played(config: Collect, env_config: EnvConfig, closing_all: ExitStack) -> Iterator[Demonstrations]:
    """The episodes to record; what they need is closed with ``closing_all``."""
    from vla_rl.experience.collect import iter_demonstrations, iter_episodes
    from vla_rl.experience.driver import Driver
    from vla_rl.policies.function import EpsilonRandomPolicy
    from vla_rl.recipes.policies import deployed
    from vla_rl.recipes.trainers import generator

    env = env_config.make(min(config.num_envs, config.count))
    closing_all.callback(env.close)
    update = closing_all.enter_context(bar("collect", config.count))
    if not config.policy:
        expert = load(config.expert)(horizon=1) if config.expert else env_config.make_expert()
        shown = list(seed_ranges.training_seeds(config.seed, "demonstrations")[: config.count])
        return iter_demonstrations(env, expert.act, shown, lambda done: update(done, "demonstrations"))
    opened = deployed(config.policy, env_config, config.device, config.seed, config.vla)
    policy = closing_all.enter_context(opened)
    if config.random:
        policy = EpsilonRandomPolicy(policy, env.spec, config.random)
    driver = Driver(env, policy, generator(config.seed, 7), "eval", observe="all")
    seeds = list(seed_ranges.training_seeds(config.seed, "reinforcement")[: config.count])
    return iter_episodes(driver, seeds, lambda done, good: update(done, f"success {good / done:.0%}"))


def _repair(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"there is no folder {str(path)!r}, so nothing can be repaired; check its name.")
    from vla_rl.experience.datasets import repair

    lost = repair(path)
    for problem in lost:
        console.print(f"put aside, it is damaged: {problem}")
    console.print(f"finished, {len(lost)} episodes put aside: {path}")


PRESETS = {
    "algorithms": "vla_rl.recipes.compare:Algorithms",
    "samplers": "vla_rl.recipes.compare:Samplers",
    "imagination": "vla_rl.recipes.imagine.comparison:ImagineStudy",
}


def compare(arguments: Sequence[str]) -> None:
    """``vla-rl compare [algorithms | samplers | imagination] [--field value ...]``: methods x seeds, table, page."""
    given = list(arguments)
    name = given.pop(0) if given and not given[0].startswith("-") else "algorithms"
    if name not in PRESETS:
        raise UserError(f"compare knows no {name!r}; {did_you_mean(name, PRESETS)}")
    config = override(load(PRESETS[name])(), given, f"vla-rl compare {name}")
    with config.on_engine():
        config.run()
    console.print(f"{config.out}/results.json, {config.out}/report.html")
