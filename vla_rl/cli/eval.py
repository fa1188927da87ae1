"""``vla-rl eval``: a checkpoint on held-out seeds, a suite, two evaluations compared, another's trace replayed."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from rich.table import Table

from vla_rl.cli.override import override, take_option
from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.hub import located
from vla_rl.contract.policy import Policy
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import mean_text, percent
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.run import evaluate as play_seeds
from vla_rl.evaluation.stats import MeanReturn
from vla_rl.policies.flow_policy import at_temperature
from vla_rl.policies.function import Renumbered
from vla_rl.policies.pretrained import default_options
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.pretrained import checkpoint_of
from vla_rl.recipes.config_files import env_config_of
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.evaluators import shown
from vla_rl.recipes.parity import (
    Compared,
    Trace,
    TraceRecorder,
    first_difference,
    read_traces,
    replay_checkpoint,
    replay_env,
)
from vla_rl.recipes.policies import deployed, fingerprint
from vla_rl.recipes.suite import find_suite
from vla_rl.recipes.suite_run import (
    COMMON_RATES,
    COMPARISON,
    SuiteRun,
    compare,
    needed_between,
    needed_from,
    rate_of,
    read_results,
    row,
)
from vla_rl.recipes.terminal import bar, console
from vla_rl.recipes.workers import EngineOptions
from vla_rl.serving.access import names_server
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class Evaluate:
    """Play a policy once per held-out seed.  Test seeds are for a number that will be reported, once.

    Of a run, its checkpoint "best" is played; ws://HOST:PORT is a policy server.  The environment is that of the run,
    otherwise --env names it.
    """

    seeds: str = "validation"  # or "test"
    episodes: int = 512
    num_envs: int = 64
    seed: int = 1  # of the flow's starting noise
    temperature: float | None = None  # std of that noise; None: the checkpoint's, which is 1 unless set otherwise
    out: str = ""  # write the result there as JSON
    device: str = "cpu"  # where the policy computes: "cpu", "cuda", "cuda:1", "auto"
    trace: str = ""  # write every decision there, see docs/commands.md
    env: EnvConfig = NO_ENV
    vla: VLAOptions = VLAOptions()  # how a public folder is opened; a checkpoint of ours has its own


def evaluate_checkpoint(arguments: Sequence[str]) -> None:
    """Load, check that policy and environment fit together, play, print."""
    given = list(arguments)
    if given in (["-h"], ["--help"]):
        override(Evaluate(), given, "vla-rl eval CHECKPOINT")
    if not given or given[0].startswith("-"):
        raise UserError(
            "eval needs a checkpoint or run folder, for example vla-rl eval runs/demo; or --suite NAME --policy POLICY "
            "--out FOLDER."
        )
    checkpoint = given[0] if names_server(given[0]) else str(checkpoint_of(located(given[0])))
    named = "".join(take_option([*given[1:], ""], name, "")[0] for name in ("--env", "--env.name"))
    default = Evaluate(env=env_config_of(checkpoint, named) or NO_ENV, vla=default_options(checkpoint))
    config: Evaluate = override(default, given[1:], "vla-rl eval CHECKPOINT")
    ranges = {"validation": seed_ranges.VALIDATION, "test": seed_ranges.TEST}
    if config.seeds not in ranges:
        raise UserError(f"there are no {config.seeds!r} seeds; {did_you_mean(config.seeds, ranges)}")
    if min(config.episodes, config.num_envs) < 1:
        raise UserError(
            f"{config.episodes} episodes in {config.num_envs} environments measure nothing; give both at least 1."
        )
    seeds = seed_ranges.held_out(ranges[config.seeds], config.episodes)
    config.env.required("eval").check()
    with deployed(checkpoint, config.env, config.device, options=config.vla) as policy:
        at_temperature(policy.policy if isinstance(policy, Renumbered) else policy, config.temperature, "--temperature")
        outcomes, remarks = _play(config, policy, seeds)
    ends = ", ".join(f"{cause.replace('_', ' ')} {count}" for cause, count in Counter(outcomes.cause).most_common())
    earned = MeanReturn.of(outcomes.returns)
    mean = f"mean return {mean_text(earned.mean, earned.low, earned.high)}"
    headline = percent(outcomes.rate) if outcomes.has_success else mean
    console.print(f"{checkpoint}: {headline} of {config.episodes} {config.seeds} episodes ({ends})")
    if outcomes.has_success and not np.array_equal(outcomes.returns, outcomes.success):  # rewards add something
        console.print(f"  {mean}")
    for remark in remarks:
        console.print(f"  {remark}")
    families = outcomes.families if outcomes.has_success and len(outcomes.families) > 1 else {}
    for name, rate in families.items():
        console.print(f"  {name}: {percent(rate)} of {rate.episodes}")
    result = {**asdict(outcomes.score), "families": {name: asdict(rate) for name, rate in families.items()}}
    result["returns"] = asdict(earned)
    if config.out:
        played = {"env": config.env.name, "seeds": config.seeds, "checkpoint": checkpoint}
        write_json(Path(config.out), {**result, **played, "sha256": fingerprint(checkpoint)})
    else:
        print(json.dumps(result))


def _play(config: Evaluate, policy: Policy, seeds: list[int]) -> tuple[Outcomes, list[str]]:
    """Evaluate with a progress bar, and with a trace if one is wanted; also what can hardly be meant."""
    with bar(config.seeds, len(seeds)) as update, closing(config.env.make(config.num_envs)) as env:
        recorder = TraceRecorder(Path(config.trace), env.spec.tasks, config.seed) if config.trace else None
        watch = recorder.watch if recorder else lambda decision: None
        outcomes = play_seeds(env, policy, seeds, config.seed, report=shown(update), watch=watch)
        return outcomes, outcomes.remarks(env.spec.time_limit)


@dataclass(frozen=True)
class EvaluateSuite(EngineOptions):
    """Play a policy on every task of a suite; stopped, the same command goes on.

    Neither --num-envs nor --processes changes a result: a policy decides for every episode by itself.
    """

    suite: str = ""  # tabletop, metaworld-mt10, ...; or FILE.py:function
    policy: str = ""  # checkpoint or run folder, module:Class, expert, or ws://HOST:PORT
    out: str = ""  # the results' folder
    tasks: tuple[str, ...] = ()  # some of the suite's tasks; all without
    seeds: str = "test"  # or "validation", to choose by
    episodes: int = 0  # of each task; 0: as many as the suite says
    num_envs: int = 16
    processes: int = 1  # that play
    videos: int = 2  # episodes of each task
    device: str = "cpu"  # where the policy computes: "cpu", "cuda", "cuda:1", "auto"
    vla: VLAOptions = VLAOptions()  # how a public folder is opened; a checkpoint of ours has its own


def evaluate_suite(arguments: Sequence[str]) -> None:
    """Evaluate, print a table, say where the files are."""
    named = take_option(list(arguments), "--policy", "")[0]
    config: EvaluateSuite = override(EvaluateSuite(vla=default_options(named)), arguments, "vla-rl eval")
    for name in ("suite", "policy", "out"):
        if not getattr(config, name):
            raise UserError(
                f"--{name} is missing, so nothing can be evaluated; write vla-rl eval --suite NAME --policy POLICY "
                "--out FOLDER."
            )
    suite = find_suite(config.suite).of(config.tasks, config.episodes, config.seeds)
    counts = config.num_envs, config.processes, config.videos
    run = SuiteRun(suite, config.policy, Path(config.out), *counts, config.device, config.vla)
    with config.on_engine():
        results = run.run()
    print_results(results)
    console.print(f"{config.out}: report.html, results.json, episodes.csv, latency.csv")


def print_results(results: JsonObject) -> None:
    """The score and every task, on the terminal."""
    console.print(f"{results['policy']['name']} on {results['protocol']}")
    width = max(len(name) for name in (*results["tasks"], "all"))
    for name, task in results["tasks"].items():
        ends = ", ".join(f"{cause.replace('_', ' ')} {count}" for cause, count in task["causes"].items())
        console.print(f"  {name:<{width}}  {_score(task)} of {task['returns']['episodes']} ({ends})")
        for remark in results.get("remarks", {}).get(name, []):
            console.print(f"    {remark}")
    if "score" in results and len(results["tasks"]) > 1:
        console.print(f"  {'all':<{width}}  {_score(results['score'])} of {results['score']['episodes']}")


def _score(found: JsonObject) -> str:
    if rate := rate_of(found):
        return percent(rate)
    earned = found["returns"]
    return f"mean return {mean_text(earned['mean'], earned['low'], earned['high'])}"


@dataclass(frozen=True)
class Parity:
    """Replay a recorded trace through a checkpoint, and through an environment if --env names one."""

    parity: str = ""  # an .npz file or a folder of them
    tolerance: float = 1e-4  # of the largest number of an array
    env: EnvConfig = NO_ENV


def check_parity(arguments: Sequence[str]) -> None:
    """Print every compared key and, in a sentence, the first difference."""
    given = list(arguments)
    if given[0].startswith("-"):
        raise UserError("--parity needs a checkpoint to compare; write vla-rl eval CHECKPOINT --parity TRACE.")
    config: Parity = override(Parity(), given[1:], "vla-rl eval CHECKPOINT")
    checkpoint = checkpoint_of(given[0])
    for trace in read_traces(Path(config.parity)):
        _print(trace, "policy", replay_checkpoint(checkpoint, trace, config.tolerance))
        if config.env.name:
            with closing(config.env.make(1)) as env:
                _print(trace, config.env.name, replay_env(env, trace, config.tolerance))


def _print(trace: Trace, what: str, compared: list[Compared]) -> None:
    table = Table(title=f"{trace.name}: {what}")
    table.add_column("key", no_wrap=True)
    for name in ("decisions", "largest difference", "first beyond the tolerance"):
        table.add_column(name, justify="right")
    for one in compared:
        table.add_row(one.key, str(one.steps), f"{one.largest:.3g}", "–" if one.first is None else str(one.first))
    console.print(table)
    found = first_difference(compared)
    if found is None:
        console.print(f"no difference in {len(trace)} decisions.")
    else:
        why = f": {found.reason}" if found.reason else ""
        console.print(f"first difference: decision {found.first}, {found.key}{why}")


@dataclass(frozen=True)
class Compare:
    """Compare two evaluations of one suite on the same seeds; say how many episodes a difference takes."""

    against: str = ""  # the other results' folder
    power: float = 0.0  # a difference of success rates, such as 0.05


def compare_results(arguments: Sequence[str]) -> None:
    """Print the comparison, the numbers of episodes, or both."""
    given = list(arguments)
    folder = Path(given.pop(0)) if given and not given[0].startswith("-") else None
    config: Compare = override(Compare(), given, "vla-rl eval RESULTS")
    found = _compared(folder, Path(config.against)) if config.against else None
    if config.power:
        _power(folder, found, config.power)


def _compared(folder: Path | None, other: Path) -> JsonObject:
    if folder is None:
        raise UserError("--against compares two folders and one was named; write vla-rl eval RESULTS --against OTHER.")
    found = compare(folder, other)
    console.print(f"{found['protocol']}\n  first   {found['first']['name']}\n  second  {found['second']['name']}")
    table = Table("task", "first", "second", "difference", "first alone", "second alone", "p")
    for name, task in found["tasks"].items():
        table.add_row(*("–" if cell is None else str(cell) for cell in row(name, task)))
    console.print(table)
    console.print(f"{folder / COMPARISON}, {folder / 'comparison.html'}")
    return found


def _power(folder: Path | None, found: JsonObject | None, difference: float) -> None:
    """By the measured discordance of two policies, by the measured rates of one, or for a few rates."""
    if not 0 < difference < 1:
        raise UserError(f"--power {difference:g} is no difference of success rates; write for example --power 0.05.")
    console.print(f"Episodes that show a difference of {difference:.1%} with probability 80 % (McNemar's test at 5 %):")
    if found is not None:
        for name, task in found["tasks"].items():
            if task["p_value"] is not None:
                console.print(f"  {name:<24} {needed_between(task, difference):,}, as often as these two disagree")
        return
    tasks = read_results(folder)["tasks"] if folder else {}
    rates = {name: task["success"] for name, task in tasks.items() if "success" in task}
    table = Table("", "if outcomes are independent", "if one wins wherever the other does")
    for name, rate in rates.items() if folder else ((f"success {rate:.0%}", rate) for rate in COMMON_RATES):
        if needed := needed_from(rate, difference):
            table.add_row(name, *(f"{episodes:,}" for episodes in needed))
    console.print(table)


USAGE = """vla-rl eval CHECKPOINT|RUN [options]
vla-rl eval --suite NAME --policy POLICY --out FOLDER
vla-rl eval RESULTS --against OTHER
vla-rl eval [RESULTS] --power DIFFERENCE
vla-rl eval CHECKPOINT --parity TRACE

Play a policy once per held-out seed; compare two results of one suite.  --help after any of them shows its options."""

_WAYS: dict[str, Callable[[Sequence[str]], None]] = {
    "--suite": evaluate_suite,
    "--against": compare_results,
    "--power": compare_results,
    "--parity": check_parity,
}


def evaluate(arguments: Sequence[str]) -> None:
    """Do what the option that only one of the ways has asks for; without one, play a checkpoint.

    Raises UserError for an option that is none but nearly that of another way.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    if given & {"-h", "--help"}:
        print(USAGE, end="\n\n", flush=True)
    for option, way in _WAYS.items():
        if option in given:
            way(arguments)
            return
    own, others = _options(Evaluate), _options(EvaluateSuite, Compare, Parity)
    for option in sorted(item for item in given - own - others if item.startswith("--") and "." not in item):
        near = difflib.get_close_matches(option, sorted(own | others), n=1)
        if near and near[0] not in own:
            raise UserError(f"eval has no option {option!r}, so nothing was evaluated; did you mean {near[0]!r}?")
    evaluate_checkpoint(arguments)


def _options(*configs: type) -> set[str]:
    """The options that set the fields of ``configs``."""
    return {f"--{field.name.replace('_', '-')}" for config in configs for field in fields(config)}
