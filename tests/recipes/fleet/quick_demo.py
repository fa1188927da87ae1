"""A fleet on one machine for the tests: one arm, an imitation of next to nothing, a version after a few updates."""

from dataclasses import replace

from vla_rl.algorithms.chunks import HGDaggerConfig
from vla_rl.fleet.releases import CanaryRule
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.fleet.demo import FleetDemo
from vla_rl.recipes.fleet.learners import Learn, LearnByCorrections
from vla_rl.recipes.imitate import Imitate, NewTinyOfJoints
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig


def demo() -> FleetDemo:
    """Two episodes."""
    few = FitConfig(steps=1, batch=8, lr=1e-3)
    new = NewTinyOfJoints(horizon=16, width=16, condition=16, sampler=FlowSampler(Ode(), AllSteps(), 2))
    base = Imitate(
        env=EnvConfig("so101"),
        new=new,
        grounding=GroundingConfig(scenes=8, fit=few),
        imitation=ImitationConfig(2, stride=1, fit=few),
    )
    method = LearnByCorrections(HGDaggerConfig(batch=8, draws=1))
    learn = Learn(method, "", "", updates_per_second=1e6, turn=2, publish_every=4, canary=CanaryRule(min_episodes=1))
    return FleetDemo(base, learn, robots=1, episodes=2, test=1)


def crowd() -> FleetDemo:
    """More robots than a machine has room for."""
    return replace(demo(), robots=65)
