"""``python -m tests.benchmarks.asynchronous [OUT]``: what it brings that sources play on, and what it costs.

The demo's lift by PPO from the same imitation policies, 4 sources of 32 environments.  In "slow" one decision of
twenty takes the simulator a second longer, as a reset that loads a scene does, and the policy sleeps 10 ms; in "even"
nothing is slow, and 2 sources have 64 environments each.  Nothing is validated before the end, as sources would play on
meanwhile and be ahead at no cost.  A quarter of an hour on two idle cores; what is finished is not run again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import sims.catalog
from vla_rl.contract.config import JsonObject
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes import metrics
from vla_rl.recipes.compare import Cell, run_sweep
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import Improve
from vla_rl.training.tracking import write_json

SEEDS, AHEAD = (1, 2, 3), (0, 1, 2, 8)
SECONDS = {"slow": (1.0, 0.01), "even": (0.0, 0.0)}
SOURCES = {"slow": 4, "even": 2}
STEP = "env/steps"


class UnevenEnv:
    """``env``, of which one step in twenty takes ``seconds`` longer and each ``policy_seconds``."""

    def __init__(self, env: Any, seconds: float, policy_seconds: float) -> None:
        self._env, self._seconds, self._policy_seconds = env, seconds, policy_seconds
        self._lot = Random()  # when a step is slow is no part of what a seed decides

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, chunk: Any, observe: Any = "last") -> Any:
        time.sleep(self._policy_seconds + self._seconds * (self._lot.random() < 0.05))
        return self._env.step(chunk, observe)


def make(num_envs: int, seconds: float = 0.0, policy_seconds: float = 0.0, **options: Any) -> Any:
    """Lift with steps that take longer; see :class:`UnevenEnv`."""
    return UnevenEnv(sims.catalog.make("lift", num_envs=num_envs, threads=1, **options), seconds, policy_seconds)


def _improve(kind: str) -> Improve:
    demo, (seconds, policy_seconds) = load_config("demo.py:last_step"), SECONDS[kind]
    training = {"deadline": 25, "seconds": seconds, "policy_seconds": policy_seconds}
    loop = replace(demo.rl.loop, iterations=40, validate_every=40, save_every=10, collectors=SOURCES[kind])
    return replace(
        demo,
        rl=replace(demo.rl, loop=loop),
        env=EnvConfig("tests.benchmarks.asynchronous:make", training_options=training),
        evaluation=EvaluationConfig(validation=128, test=512),
    )


def slow() -> Improve:
    """Steps of very different length."""
    return _improve("slow")


def even() -> Improve:
    """Steps of equal length."""
    return _improve("even")


def main(out: Path) -> None:
    """Run all cells, print a table, and write ``results.json``."""
    base = {seed: Cell(out / f"imitate-{seed}", "demo.py:imitate", ("--seed", str(seed))) for seed in SEEDS}
    cells = {
        (kind, ahead, seed): _cell(out, kind, ahead, seed)
        for kind in SECONDS
        for ahead in (AHEAD if kind == "slow" else AHEAD[:2])
        for seed in SEEDS
    }
    run_sweep(out, {"imitation": list(base.values())}, 2)
    run_sweep(out, {"improvement, one at a time": list(cells.values())}, 1)
    rows = [{"kind": k, "staleness": ahead, "seed": seed, **_measured(c.out)} for (k, ahead, seed), c in cells.items()]
    write_json(out / "results.json", rows)
    for line in _table(rows):
        print(line)


def _cell(out: Path, kind: str, ahead: int, seed: int) -> Cell:
    policy = str(out / f"imitate-{seed}" / "checkpoints" / "imitation")
    given = ("--seed", str(seed), "--policy", policy, "--staleness", str(ahead))
    return Cell(out / f"{kind}-{ahead}-{seed}", f"{__file__}:{kind}", given)


def _measured(run: Path) -> JsonObject:
    """Steps per second without validation, from the second iteration on; the final rate."""
    rows, summary = metrics.rows(run, "rl"), metrics.summary(run)
    spent = [row["time/iteration_s"] - row.get("time/validate_s", 0.0) for row in rows[2:]]
    return {
        "steps_per_second": sum(row[STEP] for row in rows[2:]) / sum(spent),
        "stale": sum(row.get("rollout/stale", 0.0) for row in rows[2:]) / len(spent),
        "age": sum(row.get("rollout/age", 0.0) for row in rows[2:]) / len(spent),
        "success": summary["rl"],
    }


def _table(rows: Sequence[JsonObject]) -> list[str]:
    lines = ["| | staleness | steps/s by seed | ratio to 0 | age | test success by seed |", "|---|---|---|---|---|---|"]
    for kind in SECONDS:
        for ahead in sorted({row["staleness"] for row in rows if row["kind"] == kind}):
            here = [row for row in rows if (row["kind"], row["staleness"]) == (kind, ahead)]
            plain = [row for row in rows if (row["kind"], row["staleness"]) == (kind, 0)]
            rates = [row["steps_per_second"] for row in here]
            ratio = sum(rates) / sum(row["steps_per_second"] for row in plain)
            success = ", ".join(f"{100 * Rate(**row['success']).success:.1f}" for row in here)
            age = sum(row["age"] for row in here) / len(here)
            lines.append(
                f"| {kind} | {ahead} | {', '.join(f'{r:,.0f}' for r in rates)} | {ratio:.2f} | {age:.2f} | {success} |"
            )
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/async"))
