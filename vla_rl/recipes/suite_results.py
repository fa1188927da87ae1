"""What an evaluation of a suite found, as JSON: ``results.json``."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata

import numpy as np

from vla_rl import __version__
from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.config import to_json
from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.run import Outcomes
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.recipes import sims
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.suite import Suite, SuiteTask

_SAID = ("success", "length", "returns")
_PACKAGES = ("numpy", "torch", "mujoco", "gymnasium")


def results_of(suite: Suite, policy: JsonObject, episodes: Sequence[EpisodeResult]) -> JsonObject:
    """Protocol, policy, score and tasks with their intervals, latency and versions.

    Every task has equally many episodes, so the score over all episodes is the mean over tasks.  Its Wilson interval is
    that of one pooled rate, which is wider than necessary when tasks differ: strata only reduce the variance.
    """
    of_task = {task.name: [one for one in episodes if one.task == task.name] for task in suite.tasks}
    rated = [task for task in suite.tasks if task.success is not None]
    decisions = np.array([episode.decisions for episode in episodes])
    mean_ms = np.array([episode.mean_ms for episode in episodes])
    results: JsonObject = {
        "protocol": suite.protocol,
        "policy": policy,
        "tasks": {task.name: _task(task, of_task[task.name]) for task in suite.tasks},
        "latency_ms": {
            "mean": round(float((mean_ms * decisions).sum() / decisions.sum()), 3),
            "max": round(max(episode.max_ms for episode in episodes), 3),
        },
        "suite": to_json(suite),
        "versions": _versions(suite),
    }
    if said := {task.name: found for task in suite.tasks if (found := remarks(of_task[task.name]))}:
        results["remarks"] = said
    if rated:
        wins = [one.success for task in rated for one in of_task[task.name]]
        results["score"] = asdict(Rate.of(wins))
    return results


def remarks(episodes: Sequence[EpisodeResult]) -> list[str]:
    """What can hardly be meant about the ``episodes`` of one task, as ``vla-rl eval`` says it of a checkpoint's."""
    success, length, returns = (np.array([getattr(one, name) for one in episodes]) for name in _SAID)
    causes, family = tuple(one.cause for one in episodes), ("",) * len(episodes)
    return Outcomes(np.arange(len(episodes)), success, causes, length, family, returns).remarks(math.inf)


def _task(task: SuiteTask, episodes: Sequence[EpisodeResult]) -> JsonObject:
    found: JsonObject = asdict(Rate.of([one.success for one in episodes])) if task.success is not None else {}
    found["returns"] = asdict(MeanReturn.of([one.returns for one in episodes]))
    found["mean_length"] = float(np.mean([one.length for one in episodes]))
    found["causes"] = dict(Counter(one.cause for one in episodes).most_common())
    return found


def _versions(suite: Suite) -> JsonObject:
    """Of what is installed here, and of the simulators of the suite that have installations of their own."""
    found = {"vla-rl": __version__, "contract": str(CONTRACT_VERSION), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # not installed here, so nothing was measured with it
    played = {task.env.name for task in suite.tasks}
    own = [made for made in sims.installations().known() if made.name in played]
    found |= {f"{made.name}'s installation": made.version() for made in own if made.version()}
    return found
