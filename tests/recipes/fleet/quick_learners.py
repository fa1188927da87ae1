"""Learners beside a server for the tests: a version after a few updates."""

from dataclasses import replace

from tests.recipes.fleet.quick_fleet import REPLAY
from vla_rl.algorithms.chunks import HGDaggerConfig
from vla_rl.fleet.releases import CanaryRule
from vla_rl.recipes.fleet.learners import Learn, LearnByCorrections


def corrections() -> Learn:
    """HG-DAgger."""
    method = LearnByCorrections(HGDaggerConfig(batch=8, draws=1))
    return Learn(method, "", "", updates_per_second=1e6, turn=2, publish_every=4, canary=CanaryRule(min_episodes=1))


def simulation() -> object:
    """No learner."""
    from vla_rl.recipes.env_config import EnvConfig

    return EnvConfig("lift")


def residual() -> Learn:
    """Residual TD3."""
    return replace(corrections(), method=REPLAY)
