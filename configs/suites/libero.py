"""LIBERO's suites of ten tasks each, every task from its fifty initial states (``vla-rl sims install libero``).

The horizons are those that the adapter gives each suite by default, as OpenVLA's evaluation has them.
"""

from sims.libero import TIME_LIMITS
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask

STATES = 50  # initial states of a task; the test seeds begin at a multiple of it


def libero() -> Suite:
    """The four suites that are reported together."""
    names = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    return Suite("libero", 1, tuple(task for name in names for task in _tasks(name)), episodes=STATES)


def spatial() -> Suite:
    """The same objects in other places."""
    return _suite("libero-spatial", "libero_spatial")


def object() -> Suite:
    """Other objects in the same places."""
    return _suite("libero-object", "libero_object")


def goal() -> Suite:
    """The same scene with other goals."""
    return _suite("libero-goal", "libero_goal")


def long() -> Suite:
    """Ten tasks of several parts."""
    return _suite("libero-long", "libero_10")


def _suite(name: str, of: str) -> Suite:
    return Suite(name, 1, _tasks(of), episodes=STATES)


def _tasks(of: str) -> tuple[SuiteTask, ...]:
    names = [(f"{of}-{number}", {"suite": of, "tasks": [number]}) for number in range(10)]
    return tuple(SuiteTask(name, EnvConfig("libero", options), TIME_LIMITS[of]) for name, options in names)
