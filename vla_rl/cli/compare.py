"""``vla-rl compare`` and ``vla-rl study``: methods side by side, from the same imitation policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.cli.override import override
from vla_rl.recipes.compare import Comparison, Task
from vla_rl.recipes.terminal import console
from vla_rl.recipes.workers import EngineOptions


@dataclass(frozen=True)
class Compare(EngineOptions):
    """Algorithms on the same budget.  Each run is a process of its own; what is finished is not run again.

    An algorithm's name is that of a function in ``config``; on another task than lift, it is "TASK_NAME".
    """

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
    config: str = "compare.py"  # besides the algorithms, "imitate_lift" and "imitate_place"
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    target: float = 0.85  # validation success whose cost in control steps is tabled
    out: str = "runs/compare"


@dataclass(frozen=True)
class Study(EngineOptions):
    """Flow samplers on the same budget.  Each run is a process of its own; what is finished is not run again."""

    samplers: tuple[str, ...] = ("last_step", "one_step", "all_steps", "flow_ou", "flow_ddim", "flow_noise")
    config: str = "demo.py"  # its functions of these names, and "imitate"
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    target: float = 0.85  # validation success whose cost in control steps is tabled
    out: str = "runs/study"


def compare(arguments: Sequence[str]) -> None:
    """Every algorithm on lift and, unless none is named, on place."""
    config: Compare = override(Compare(), arguments, "vla-rl compare")
    out = Path(config.out)
    tasks = (
        Task("lift", "imitate_lift", {name: name for name in config.lift}, out / "lift"),
        Task("place", "imitate_place", {name: f"place_{name}" for name in config.place}, out / "place"),
    )
    chosen = tuple(task for task in tasks if task.methods)
    comparison = Comparison(config.config, chosen, config.seeds, config.processes, config.target, out, "vla-rl compare")
    _run(comparison, config)


def study(arguments: Sequence[str]) -> None:
    """Every sampler on the demo's task."""
    config: Study = override(Study(), arguments, "vla-rl study")
    out = Path(config.out)
    task = Task("lift", "imitate", {name: name for name in config.samplers}, out)
    comparison = Comparison(config.config, (task,), config.seeds, config.processes, config.target, out, "vla-rl study")
    _run(comparison, config)


def _run(comparison: Comparison, options: EngineOptions) -> None:
    with options.on_engine():
        comparison.run()
    console.print(f"{comparison.out}/results.json, {comparison.out}/report.html")
