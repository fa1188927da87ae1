"""``python -m tests.benchmarks.peers`` (``make peers``): PPO of other libraries and ours, to the same return.

Every cell, a learner with a seed, is written to ``OUT/results.json`` as soon as it ends, and what is there is not run
again; so the command can be stopped and goes on.  Remove the folder to measure anew.  ``OUT/results.md`` is the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.peers.race import Row, Task, race, to_json
from tests.benchmarks.peers.report import HEADS, markdown, table
from tests.benchmarks.peers.sides import PEERS
from tests.benchmarks.peers.state_ppo import GOAL, RECIPE
from vla_rl.contract.errors import UserError
from vla_rl.recipes.terminal import bar
from vla_rl.training.tracking import write_json

OUT = Path("runs/peers")
SEEDS = tuple(range(21, 29))
TASK = Task("HalfCheetah-v5", RECIPE, GOAL)
COMMAND = "make peers"


def small(task: Task) -> Task:
    """``task`` for a test: two environments, one turn, episodes of ten steps."""
    recipe = task.recipe
    env = replace(recipe.env, options={**recipe.env.options, "time_limit": 10})
    rl = replace(recipe.rl, experience=replace(recipe.rl.experience, num_envs=2, decisions=32))
    return replace(task, recipe=replace(recipe, env=env, rl=rl), longest=1, turn=1, episodes=1)


def measure(task: Task, seeds: Sequence[int], peers: Sequence[str], out: Path) -> list[Row]:
    """The rows of all cells of ``peers`` and ``seeds``, those in ``out`` first; every new one is written at once."""
    results = out / "results.json"
    rows = [Row(**row) for row in json.loads(results.read_text())["rows"]] if results.exists() else []
    out.mkdir(parents=True, exist_ok=True)
    there = {row.key for row in rows}
    cells = [(task.name, peer, seed) for seed in seeds for peer in peers]
    left = len(set(cells) - there)
    with bar("peers", len(cells)) as update:
        update(len(cells) - left)
        for seed in seeds:
            missing = [peer for peer in peers if (task.name, peer, seed) not in there]
            for row in race(task, seed, missing, out / "log.txt"):
                if task.ends(row):
                    rows.append(row)
                    left -= 1
                    write_json(results, {"machine": _machine(), "rows": [to_json(item) for item in rows]})
                update(
                    len(cells) - left, f"{left} left; {row.peer}, seed {row.seed}: {row.steps:,} steps, {row.score:.0f}"
                )
    return rows


def main(arguments: Sequence[str]) -> list[Row]:
    """Measure, print the table and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--small", action="store_true", help="a few steps of everything, to see that it works")
    given = parser.parse_args(arguments)
    try:
        rows = measure(small(TASK) if given.small else TASK, given.seeds, given.peers, given.out)
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    page = given.out / "results.md"
    page.write_text(markdown(rows, _machine(), COMMAND), encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    shown = Table(*HEADS, title="a ratio above 1: ours is faster")
    for line in table(rows):
        shown.add_row(*line)
    console.print(shown)
    console.print(f"written: {given.out / 'results.json'} and {page}")
    return rows


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    """The processor's name where Linux says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


if __name__ == "__main__":
    main(sys.argv[1:])
