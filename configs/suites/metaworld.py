"""Meta-World's MT10 and MT50, by their own horizon and rule of success (``vla-rl sims install metaworld``)."""

from collections.abc import Sequence

from sims.metaworld import MT10, TASKS
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask

HORIZON = 500  # Meta-World's own


def mt10() -> Suite:
    """Ten tasks."""
    return _suite("metaworld-mt10", MT10)


def mt50() -> Suite:
    """All fifty."""
    return _suite("metaworld-mt50", TASKS)


def _suite(name: str, tasks: Sequence[str]) -> Suite:
    return Suite(name, 1, tuple(SuiteTask(task, EnvConfig("metaworld", {"tasks": task}), HORIZON) for task in tasks))
