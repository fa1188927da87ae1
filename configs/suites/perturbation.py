"""How robust a policy is: success over every parameter of an environment, and the worst case over a grid."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.perturbation import PerturbationSuite, perturbation_grid, perturbation_sweep


def lift() -> PerturbationSuite:
    """Lift, one parameter at a time: poses, colours, cameras, lights, texture, masses, friction, noise, latency."""
    return perturbation_sweep("perturbation-lift", 1, EnvConfig("lift"), 60)


def lift_grid() -> PerturbationSuite:
    """Lift at all combinations of mass, friction, action noise and latency."""
    values = {
        "object_mass": (0.2, 1.0, 10.0),
        "friction": (0.1, 1.0, 2.0),
        "action_noise": (0.0, 0.2),
        "latency": (0.0, 1.0, 2.0),
    }
    return perturbation_grid("perturbation-lift-grid", 1, EnvConfig("lift"), 60, values)
