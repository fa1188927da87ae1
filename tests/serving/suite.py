"""A suite without pictures, for policies behind a server."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask


def origin() -> Suite:
    """Eight episodes of the point mass."""
    return Suite("origin", 1, (SuiteTask("origin", EnvConfig("point_mass"), 16, "at_end"),), episodes=8)
