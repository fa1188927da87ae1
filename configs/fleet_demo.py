"""A fleet on one machine, of four simulated SO-101 arms with scripted people: vla-rl fleet demo"""

from vla_rl.algorithms.hg_dagger import HGDaggerConfig
from vla_rl.fleet.releases import CanaryRule
from vla_rl.policies.flow import AllSteps, FlowSampler
from vla_rl.policies.flow_schedules import Ode
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.fleet.demo import FleetDemo
from vla_rl.recipes.fleet.learners import Learn, LearnByCorrections
from vla_rl.recipes.imitate import Imitate, NewTinyOfJoints
from vla_rl.training.fit import FitConfig
from vla_rl.training.imitation import GroundingConfig, ImitationConfig


def demo() -> FleetDemo:
    """Twenty demonstrations and a short imitation, so that there is something to learn."""
    base = Imitate(
        env=EnvConfig("so101"),
        new=NewTinyOfJoints(horizon=16, sampler=FlowSampler(Ode(), AllSteps(), 10)),
        grounding=GroundingConfig(scenes=3000, fit=FitConfig(steps=600, batch=64, lr=2e-3)),
        imitation=ImitationConfig(20, stride=1, fit=FitConfig(steps=1200, batch=64, lr=1e-3)),
    )
    learn = Learn(
        LearnByCorrections(HGDaggerConfig(lr=2e-4)),
        policy="",
        demonstrations="",
        updates_per_second=1000.0,  # as many as the machine can: simulated robots are faster than real ones, too
        publish_every=400,
        rest_after=600.0,  # the robots wait for it
        canary=CanaryRule(share=0.25, min_episodes=8),
    )
    return FleetDemo(base, learn)
