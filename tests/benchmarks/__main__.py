"""``python -m tests.benchmarks [NAME ...]``: measure and print; without a name also write ``RESULTS``."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mujoco
import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.control_rate import executor_jitter
from tests.benchmarks.environments import env_vs_async, env_vs_async_nested, env_vs_rollout
from tests.benchmarks.genesis import genesis_vs_alone
from tests.benchmarks.imagination import imagined_vs_simulator, wan_frames
from tests.benchmarks.ingest import ingest_vs_disk
from tests.benchmarks.ingest_lerobot import ingest_vs_lerobot
from tests.benchmarks.isolation import isolated_vs_inprocess
from tests.benchmarks.learning import iteration_parts, prefix_stored_vs_recomputed, update_stored_vs_recomputed
from tests.benchmarks.maniskill import maniskill_vs_alone
from tests.benchmarks.measure import NotRun, OverBudget, Row, at_most
from tests.benchmarks.memory import memory_estimate
from tests.benchmarks.rendering import render_vs_mujoco
from tests.benchmarks.timeline import timeline_cost
from tests.benchmarks.vla_inference import inference_vs_lerobot
from tests.benchmarks.warp import warp_vs_alone
from vla_rl.contract.errors import did_you_mean
from vla_rl.training.tracking import write_json

BENCHMARKS: dict[str, Callable[[bool], list[Row]]] = {
    bench.__name__: bench
    for bench in (
        env_vs_async,
        env_vs_async_nested,
        env_vs_rollout,
        isolated_vs_inprocess,
        executor_jitter,
        render_vs_mujoco,
        update_stored_vs_recomputed,
        iteration_parts,
        ingest_vs_disk,
        ingest_vs_lerobot,
        imagined_vs_simulator,
        wan_frames,
        memory_estimate,
        timeline_cost,
        prefix_stored_vs_recomputed,
        inference_vs_lerobot,
        warp_vs_alone,
        maniskill_vs_alone,
        genesis_vs_alone,
    )
}
RESULTS = Path("runs/bench/results.json")


BUDGET = 240.0  # seconds for one benchmark


def main(names: Sequence[str], quick: bool = False, results: Path = RESULTS, budget: float = BUDGET) -> list[Row]:
    """Run the benchmarks called ``names``, or all of them, each for at most ``budget`` seconds.

    The rows of each are printed, and without names written to ``results``, as soon as it ends; so Ctrl-C loses only the
    benchmark that is running, and exits with status 130.
    """
    for name in names:
        if name not in BENCHMARKS:
            sys.exit(f"there is no benchmark {name!r}; {did_you_mean(name, BENCHMARKS)}")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    start, machine = time.perf_counter(), {**_machine(), "load_before": os.getloadavg()[0]}
    chosen = list(names or BENCHMARKS)
    rows: list[Row] = []
    missing: dict[str, str] = {}
    for number, name in enumerate(chosen, 1):
        console.print(f"{number}/{len(chosen)} {name}, at most {budget:g} s ...", style="dim")
        found = _measure(name, quick, budget, missing)
        rows += found
        _print(console, name, found, missing)
        machine["seconds"] = round(time.perf_counter() - start, 1)
        if not names:
            write_json(results, {"machine": machine, "rows": [asdict(row) for row in rows], "missing": missing})
        if missing.get(name) == INTERRUPTED:
            sys.exit(130)
    console.print(f"{machine['cores']} cores, load {machine['load_before']:.1f} at first, {machine['seconds']:.0f} s")
    if not names:
        console.print(f"written: {results}")
    return rows


INTERRUPTED = "interrupted"


def _measure(name: str, quick: bool, budget: float, missing: dict[str, str]) -> list[Row]:
    """The rows of one benchmark; without any, ``missing[name]`` says why."""
    try:
        with at_most(budget):
            found = BENCHMARKS[name](quick)
    except NotRun as reason:
        missing[name] = str(reason)
    except OverBudget:
        missing[name] = f"not finished after {budget:g} s"
    except KeyboardInterrupt:
        missing[name] = INTERRUPTED
    else:
        if not found:
            missing[name] = "not measured, it needs a GPU"
        return found
    return []


def _print(console: Console, name: str, rows: Sequence[Row], missing: dict[str, str]) -> None:
    if name in missing:
        console.print(f"{name}: {missing[name]}")
        return
    console.print(_table(rows))
    for row in (row for row in rows if row.detail):
        console.print(f"{row.name}: {', '.join(f'{k} {v}' for k, v in row.detail.items())}", style="dim")


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "mujoco": mujoco.__version__,
    }


def _table(rows: Sequence[Row]) -> Table:
    table = Table("measured", title="ratio > 1: ours is better")
    for column in ("ours", "other", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, _number(row.ours), _number(row.other), ratio, row.unit)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
