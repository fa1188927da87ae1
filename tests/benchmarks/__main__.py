"""``python -m tests.benchmarks [NAME ...]``: measure, print; without a name also write ``runs/bench/results.json``."""

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

from tests.benchmarks.environments import env_vs_async, env_vs_async_nested, env_vs_rollout
from tests.benchmarks.imagination import imagined_vs_simulator, wan_frames
from tests.benchmarks.learning import iteration_parts, update_stored_vs_recomputed
from tests.benchmarks.measure import Row
from tests.benchmarks.rendering import render_vs_mujoco
from tests.benchmarks.replay import replay_add
from tests.benchmarks.state_ppo import ppo_vs_rsl_rl
from vla_rl.contract.errors import did_you_mean
from vla_rl.training.tracking import write_json

BENCHMARKS: dict[str, Callable[[bool], list[Row]]] = {
    bench.__name__: bench
    for bench in (
        env_vs_async,
        env_vs_async_nested,
        env_vs_rollout,
        render_vs_mujoco,
        update_stored_vs_recomputed,
        iteration_parts,
        replay_add,
        ppo_vs_rsl_rl,
        imagined_vs_simulator,
        wan_frames,
    )
}
RESULTS = Path("runs/bench/results.json")


def main(names: Sequence[str], quick: bool = False, results: Path = RESULTS) -> list[Row]:
    """Run the benchmarks called ``names``, or all of them."""
    for name in names:
        if name not in BENCHMARKS:
            sys.exit(f"there is no benchmark {name!r}; {did_you_mean(name, BENCHMARKS)}")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    start, before = time.perf_counter(), os.getloadavg()[0]
    rows: list[Row] = []
    for name in names or BENCHMARKS:
        console.print(f"{name} ...", style="dim")
        found = BENCHMARKS[name](quick)
        rows += found
        if not found:
            console.print(f"{name}: not measured, it needs a GPU")
    machine = {**_machine(), "load_before": before, "seconds": round(time.perf_counter() - start, 1)}
    console.print(_table(rows))
    for row in (row for row in rows if row.detail):
        console.print(f"{row.name}: {', '.join(f'{k} {v}' for k, v in row.detail.items())}", style="dim")
    console.print(f"{machine['cores']} cores, load {before:.1f} when it began, {machine['seconds']:.0f} s")
    if not names:
        write_json(results, {"machine": machine, "rows": [asdict(row) for row in rows]})
        console.print(f"written: {results}")
    return rows


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
