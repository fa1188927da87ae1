"""``vla-rl eval --suite NAME --policy POLICY --out FOLDER``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.cli.override import override, take_option
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.report import mean_text, percent
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.policies.pretrained import default_options
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import console
from vla_rl.recipes.suite import find_suite
from vla_rl.recipes.suite_run import SuiteRun
from vla_rl.recipes.workers import EngineOptions


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
    if "success" in found:
        return percent(Rate(found["success"], found["low"], found["high"], found["episodes"]))
    earned = MeanReturn(**found["returns"])
    return f"mean return {mean_text(earned.mean, earned.low, earned.high)}"
