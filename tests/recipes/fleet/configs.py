"""Configs of fleets for the tests: a few seconds of virtual time, a version after a few updates, two episodes."""

from dataclasses import replace

from vla_rl.algorithms.chunks import HGDaggerConfig
from vla_rl.algorithms.recap import RecapConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.algorithms.sac import RLPDConfig
from vla_rl.experience.intervention import DemonstratorConfig, PersonConfig
from vla_rl.fleet.releases import CanaryRule
from vla_rl.policies.feed_forward import SquashedConfig
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.fleet.demo import FleetDemo
from vla_rl.recipes.fleet.learners import Learn, LearnByAdvantage, LearnByCorrections, LearnByReplay
from vla_rl.recipes.fleet.simulate import Corrects, Demonstrates, FleetTimes, Simulate
from vla_rl.recipes.imitate import Imitate, NewTinyOfJoints
from vla_rl.recipes.policies import SquashedActor, TD3Residual
from vla_rl.recipes.trainers import AdaptiveReplay, ReplayConfig
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig

_PERSON = PersonConfig(patience=2, delay=1, hold=3, max_share=0.5)
_HEAD = HeadConfig(width=16, depth=1)
REPLAY = LearnByReplay(
    TD3Residual(ResidualConfig(head=_HEAD)),
    ResidualTD3Config(batch=8, learning_starts=10, critic_warmup=2, num_critics=2, critic=_HEAD),
    AdaptiveReplay(capacity=500, gamma=0.98, max_age=2),
)


def hg_dagger() -> Simulate:
    """A fleet of one and one of two."""
    return Simulate(
        LearnByCorrections(HGDaggerConfig(batch=8, draws=1)),
        Corrects("sims.mujoco.tasks.lift:potential", _PERSON),
        policy="",
        demonstrations="",
        robots=(1, 2),
        seconds=4.0,
        times=FleetTimes(reset=0.3, upload=0.3, download=0.5, sync=2.0, updates_per_second=2.0),
        validate_every=2.0,
        target=0.0,
        env=EnvConfig("lift", options={"deadline": 6}),
        evaluation=EvaluationConfig(validation=2, test=2, num_envs=2),
    )


def recap() -> Simulate:
    """By RECAP."""
    return replace(
        hg_dagger(), method=LearnByAdvantage(RecapConfig(batch=8, draws=1)), robots=(2,), target=1.0, seconds=3.0
    )


def demonstrations() -> Simulate:
    """The person demonstrates."""
    return replace(hg_dagger(), person=Demonstrates(DemonstratorConfig(0.3, 20)), robots=(1,), seconds=2.0)


def residual() -> Simulate:
    """By residual TD3."""
    return replace(hg_dagger(), method=REPLAY, robots=(2,), target=1.0, seconds=4.0)


def rlpd() -> Simulate:
    """By RLPD, whose chunks have two actions."""
    algorithm = RLPDConfig(batch=8, learning_starts=10, policy_delay=2, num_critics=2, critic=_HEAD)
    shares = ReplayConfig(capacity=500, gamma=0.98, share=0.25, corrections=0.25)
    method = LearnByReplay(SquashedActor(SquashedConfig(horizon=2, head=_HEAD)), algorithm, shares)
    return replace(residual(), method=method)


def corrections() -> Learn:
    """HG-DAgger beside a server."""
    method = LearnByCorrections(HGDaggerConfig(batch=8, draws=1))
    return Learn(method, "", "", updates_per_second=1e6, turn=2, publish_every=4, canary=CanaryRule(min_episodes=1))


def no_learner() -> EnvConfig:
    """Something else."""
    return EnvConfig("lift")


def demo() -> FleetDemo:
    """A fleet on one machine: one arm, an imitation of next to nothing, two episodes."""
    few = FitConfig(steps=1, batch=8, lr=1e-3)
    new = NewTinyOfJoints(horizon=16, width=16, condition=16, sampler=FlowSampler(Ode(), AllSteps(), 2))
    base = Imitate(
        env=EnvConfig("so101"),
        new=new,
        grounding=GroundingConfig(scenes=8, fit=few),
        imitation=ImitationConfig(2, stride=1, fit=few),
    )
    return FleetDemo(base, corrections(), robots=1, episodes=2, test=1)
