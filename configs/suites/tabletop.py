"""The tabletop tasks: lift, place and push, each in its own scene."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask


def tabletop() -> Suite:
    """A policy of one task is evaluated with --tasks; one of the mixture on all three."""
    horizons = {"lift": 60, "place": 80, "push": 80}
    tasks = tuple(SuiteTask(name, EnvConfig(name), horizon) for name, horizon in horizons.items())
    return Suite("tabletop", 1, tasks, episodes=256)
