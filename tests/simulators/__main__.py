"""``python -m tests.simulators [NAME ...]``: install simulators, run them and print what is missing.

Each is checked by ``check_env``, its expert plays, and PPO trains on it for an iteration.  Meta-World's expert is
imitated from pixels and the policy improved; at the end one PPO trains on all of them at once.  Exits with 1 when
something that could run went wrong; what is missing is a row of the table.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from sims import catalog, installations
from vla_rl.cli.main import main as vla_rl
from vla_rl.contract.check import check_env
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.expert import ExpertPolicy

SMALL: dict[str, dict[str, Any]] = {
    "metaworld": {"tasks": ["reach", "drawer-close"], "time_limit": 100, "image_size": 32},
    "robosuite": {"time_limit": 12, "cameras": ["agentview"], "image_size": 32},
    "libero": {"suite": "libero_object", "tasks": [0], "time_limit": 12, "cameras": ["agentview"], "image_size": 32},
}
ALSO = {"env": "lift", "options": {"image_size": 32}}  # what the joint run plays besides them
TRAINING = {
    "loop.iterations": 1,
    "loop.validate-every": 1,
    "experience.num_envs": 2,
    "experience.decisions": 8,
    "algorithm.minibatch": 16,
    "evaluation.validation": 2,
    "evaluation.test": 2,
    "evaluation.num_envs": 2,
}
# configs/metaworld.py in moments
IMITATION = {"imitation.demonstrations": 2, "imitation.fit.steps": 5, "evaluation.validation": 2}
RESIDUAL = {
    "rl.experience.num-envs": 2,
    "rl.algorithm.learning-starts": 16,
    "rl.algorithm.batch": 16,
    "rl.loop.env-steps": 64,
    "evaluation.validation": 2,
    "evaluation.test": 2,
    "evaluation.num_envs": 2,
}


@dataclass(frozen=True)
class Row:
    """One line of the table; ``missing`` is not a failure."""

    what: str
    result: str
    missing: bool = False
    failed: bool = False


def main(names: Sequence[str], show: Console) -> int:
    """Run everything for ``names``, all without; returns the exit code."""
    rows: list[Row] = []
    ready = [name for name in names or SMALL if _install(name, rows, show)]
    for name in ready:
        for what, part in (("check_env", _check), ("expert", _expert), ("training", _train_one)):
            _attempt(f"{name}: {what}", lambda part=part, name=name: part(name), rows, show)
    if "metaworld" in ready:
        _attempt("metaworld: from pixels", _from_pixels, rows, show)
    envs = [{"env": name, "options": SMALL[name]} for name in ready]
    if ready:
        joint = {"envs": [*envs, ALSO]}
        _attempt("all at once: check_env", lambda: _checked("multi_task", joint), rows, show)
        _attempt("all at once: training", lambda: _train("multi_task", joint), rows, show)
    table = Table("simulator", Column("result", overflow="fold"), title="simulators with installations of their own")
    for row in rows:
        style = "red" if row.failed else "yellow" if row.missing else ""
        table.add_row(row.what, row.result, style=style)
    show.print(table)
    return int(any(row.failed for row in rows))


def _install(name: str, rows: list[Row], show: Console) -> bool:
    """Whether ``name`` can be tested; otherwise a row says what is missing."""
    if name not in SMALL:
        raise SystemExit(f"{name!r} is not one of {', '.join(SMALL)}")
    started = time.perf_counter()
    try:
        made = installations.install(name)
    except UserError as error:
        rows.append(Row(name, f"not installed: {error}", missing=True))
        return False
    lacking = [f"{path} is missing: {source}" for path, source in made.missing_files().items()]
    rows.append(Row(f"{name}: install", f"{made.version()}, {time.perf_counter() - started:.0f} s"))
    if lacking:
        try:
            catalog.make(name, num_envs=1, **SMALL[name]).close()
            rows.append(Row(name, "it ran although files are missing", failed=True))
        except UserError as error:
            rows.append(Row(name, f"not run: {error}", missing=True))
    show.print(f"{name} is installed in {made.folder}")
    return not lacking


def _attempt(what: str, part: Callable[[], str], rows: list[Row], show: Console) -> None:
    started = time.perf_counter()
    try:
        row = Row(what, f"{part()}, {time.perf_counter() - started:.0f} s")
    except Exception as error:  # whatever goes wrong in somebody else's simulator is a row
        show.print_exception()
        row = Row(what, f"{type(error).__name__}: {error}", failed=True)
    show.print(f"{row.what}: {row.result}")
    rows.append(row)


def _check(name: str) -> str:
    return _checked(name, {**SMALL[name], "workers": 2})


def _checked(name: str, options: Mapping[str, Any]) -> str:
    with closing(catalog.make(name, num_envs=2, **options)) as env:
        return f"{len(check_env(env, seed=11))} checks, bit for bit"


def _expert(name: str) -> str:
    if catalog.extras(name).expert is None:
        return "it has none"
    env: VecEnv
    with closing(catalog.make(name, num_envs=2, **{**SMALL[name], "cameras": []})) as env:
        found = evaluate(env, ExpertPolicy(catalog.expert(name, 1).act), list(range(8)))
    assert found.rate.success > 0.5, found.cause
    return f"success {found.rate.success:.0%} of {found.rate.episodes}"


def _train_one(name: str) -> str:
    return _train(name, SMALL[name])


def _train(name: str, options: Mapping[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        env = ["--env", name, "--env.options", json.dumps(dict(options)), "--out", f"{folder}/run"]
        vla_rl(["train", "gym.py:inverted_pendulum", *env, *_arguments(TRAINING)])
        _require_losses(Path(folder) / "run")
    return "one iteration of PPO"


def _from_pixels() -> str:
    with tempfile.TemporaryDirectory() as folder:
        vla_rl(["train", "metaworld.py:imitate", "--out", f"{folder}/imitate", *_arguments(IMITATION)])
        start = ["--policy", f"{folder}/imitate/checkpoints/imitation"]
        start += ["--demonstrations", f"{folder}/imitate/demonstrations", "--out", f"{folder}/residual"]
        vla_rl(["train", "metaworld.py:residual_td3", *start, *_arguments(RESIDUAL)])
        _require_losses(Path(folder) / "residual")
    return "imitation, then residual TD3"


def _arguments(values: Mapping[str, object]) -> list[str]:
    return [text for key, value in values.items() for text in (f"--{key}", str(value))]


def _require_losses(run: Path) -> None:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [value for line in metrics for key, value in line.items() if key.startswith("critic/")]
    assert losses and np.isfinite(losses).all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Console()))
