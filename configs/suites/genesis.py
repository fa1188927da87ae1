"""The tabletop's lift with a Franka arm in Genesis (``vla-rl sims install genesis``), for policies of the tabletop."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask


def genesis() -> Suite:
    """The scenes, actions, states and cameras of MuJoCo's lift: a policy of that plays here as it is."""
    return Suite("genesis", 1, (SuiteTask("lift", EnvConfig("genesis", {"workers": 1}), 60),))
