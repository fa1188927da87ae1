"""Suites of our own tasks: the tabletop, and how robust a policy is to changes of an environment."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.perturbation import PerturbationSuite, perturbation_grid, perturbation_sweep
from vla_rl.recipes.suite import Suite, SuiteTask


def tabletop() -> Suite:
    """A policy of one task is evaluated with --tasks; one of the mixture on all three."""
    horizons = {"lift": 60, "place": 80, "push": 80}
    tasks = tuple(SuiteTask(name, EnvConfig(name), horizon) for name, horizon in horizons.items())
    return Suite("tabletop", 1, tasks, episodes=256)


def perturbation_lift() -> PerturbationSuite:
    """Lift, one parameter at a time: poses, colours, cameras, lights, texture, masses, friction, noise, latency."""
    return perturbation_sweep("perturbation-lift", 1, EnvConfig("lift"), 60)


def perturbation_half_cheetah_grid() -> PerturbationSuite:
    """HalfCheetah's return at all combinations of mass and friction."""
    values = {"mass": (0.5, 0.75, 1.0, 1.5, 2.0), "friction": (0.25, 0.5, 1.0, 1.5, 2.0)}
    env = EnvConfig("gym", {"id": "HalfCheetah-v5"})
    return perturbation_grid("perturbation-half-cheetah-grid", 1, env, 1000, values, success=None, episodes=10)


def perturbation_lift_grid() -> PerturbationSuite:
    """Lift at all combinations of mass, friction, action noise and latency."""
    values = {
        "object_mass": (0.2, 1.0, 10.0),
        "friction": (0.1, 1.0, 2.0),
        "action_noise": (0.0, 0.2),
        "latency": (0.0, 1.0, 2.0),
    }
    return perturbation_grid("perturbation-lift-grid", 1, EnvConfig("lift"), 60, values)
