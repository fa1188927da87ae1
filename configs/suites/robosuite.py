"""robosuite's manipulation tasks with a Panda arm (``vla-rl sims install robosuite``)."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask

HORIZON = 400  # robomimic's, for the tasks that it has too
TASKS = ("Lift", "Stack", "PickPlaceCan", "NutAssemblySquare", "Door")


def robosuite() -> Suite:
    """Five tasks."""
    return Suite("robosuite", 1, tuple(_task(name) for name in TASKS))


def _task(name: str) -> SuiteTask:
    return SuiteTask(name, EnvConfig("robosuite", {"task": name, "time_limit": HORIZON}), HORIZON)
