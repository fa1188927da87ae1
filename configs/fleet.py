"""Fleets: simulated in virtual time, on one machine, and the learners beside a server.

vla-rl fleet simulate fleet.py:hg_dagger      simulated robots in virtual time, on lift, place and push
vla-rl fleet demo                             four simulated SO-101 arms with scripted people, on this machine
vla-rl serve FOLDER --learn fleet.py:learn_corrections --policy CHECKPOINT
"""

from dataclasses import replace

from vla_rl.algorithms.chunks import HGDaggerConfig
from vla_rl.algorithms.guard import FallbackConfig, ReleaseConfig
from vla_rl.algorithms.recap import RecapConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.algorithms.sac import RLPDConfig
from vla_rl.experience.intervention import DemonstratorConfig
from vla_rl.fleet.releases import CanaryRule
from vla_rl.fleet.sampler import SamplerConfig
from vla_rl.policies.feed_forward import SquashedConfig
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import BlendConfig, ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.fleet.demo import FleetDemo
from vla_rl.recipes.fleet.learners import FleetMethod, Learn, LearnByAdvantage, LearnByCorrections, LearnByReplay
from vla_rl.recipes.fleet.simulate import Corrects, Demonstrates, FleetTimes, PersonFactory, Simulate
from vla_rl.recipes.imitate import Imitate, NewTinyOfJoints
from vla_rl.recipes.policies import SquashedActor, TD3Residual
from vla_rl.recipes.trainers import AdaptiveReplay
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig

MIXED = EnvConfig("mixed", training_options={"deadlines": {"lift": 25, "place": 50, "push": 50}})
_CORRECTIONS = LearnByCorrections(HGDaggerConfig(lr=2e-4))
_ADVANTAGE = LearnByAdvantage(RecapConfig(lr=2e-4), SamplerConfig(min_corrections=0.4), guidance=1.5)
_SMALL = HeadConfig(width=128)
BASE = "runs/fleet/base"  # of what fleets begin with
# As tabletop.py:place_residual: a correction that moves at once takes the fleet far below its base.
_RESIDUAL = LearnByReplay(
    TD3Residual(
        ResidualConfig(scale=0.1, noise=0.04, head=_SMALL, blend=BlendConfig(start=0.5, per="episode", size=0.2))
    ),
    ResidualTD3Config(
        learning_starts=1000, burst=500, critic_warmup=1000, num_critics=4, critic=_SMALL, lr=1e-4, tau=0.01,
        value_bounds=(0.0, 1.0), penalty=0.01, release=ReleaseConfig(auroc=0.65, hold=0.55),
        fallback=FallbackConfig(margin=0.08),
    ),
    AdaptiveReplay(gamma=0.98, n_step=5, max_age=20),
)  # fmt: skip
_RLPD = LearnByReplay(
    SquashedActor(SquashedConfig(horizon=5, head=_SMALL)),
    RLPDConfig(learning_starts=600, policy_delay=2, num_critics=4, critic=_SMALL, temperature=0.003),
    AdaptiveReplay(gamma=0.98, n_step=1, max_age=20),
)
CORRECTS = Corrects("sims.mujoco.tasks.mixed:progress")


def base() -> Imitate:
    """The policy that the fleets begin with: one for all three tasks, from few demonstrations."""
    grounding = GroundingConfig(scenes=12000, fit=FitConfig(steps=2500, batch=64, lr=2e-3))
    study = ImitationConfig(240, fit=FitConfig(steps=2500, batch=64, lr=1e-3))
    return Imitate(env=MIXED, grounding=grounding, imitation=study)


def hg_dagger() -> Simulate:
    """A person takes over where a robot visibly fails, and that is imitated."""
    return _fleet(_CORRECTIONS, CORRECTS)


def recap() -> Simulate:
    """The same person; what the robots did alone is learnt from as well."""
    return _fleet(_ADVANTAGE, CORRECTS)


def residual() -> Simulate:
    """The same person; the base stays, and residual TD3 learns a correction of it from everything.

    It decides at every control step and not once in five, so a decision takes 20 ms here instead of 100.
    """
    fleet = _fleet(_RESIDUAL, CORRECTS)
    return replace(fleet, times=replace(fleet.times, decision=0.02, updates_per_second=24.0))


def rlpd() -> Simulate:
    """The same person; a new policy, which decides in chunks as the base does, learns everything by RLPD."""
    return _fleet(_RLPD, CORRECTS)


def demonstrations() -> Simulate:
    """For comparison: the person demonstrates whole episodes instead, of ``--person.demonstrator.steps`` in all."""
    return _fleet(_CORRECTIONS, Demonstrates(DemonstratorConfig()))


def _fleet(method: FleetMethod, person: PersonFactory) -> Simulate:
    return Simulate(
        method,
        person,
        policy=f"{BASE}/checkpoints/imitation",
        demonstrations=f"{BASE}/demonstrations",
        seconds=720.0,
        validate_every=40.0,
        times=FleetTimes(updates_per_second=8.0),
        env=MIXED,
        evaluation=EvaluationConfig(validation=192, test=512),
    )


def learn_corrections() -> Learn:
    """HG-DAgger beside a server: what people correct is imitated, beside the demonstrations."""
    return _learn(_CORRECTIONS)


def learn_recap() -> Learn:
    """RECAP beside a server: what robots do alone is learnt from as well."""
    return _learn(_ADVANTAGE)


def learn_residual() -> Learn:
    """Residual TD3 beside a server: the policy stays, and a correction of it is learnt from everything."""
    return _learn(_RESIDUAL)


def _learn(method: FleetMethod) -> Learn:
    return Learn(method, f"{BASE}/checkpoints/imitation", f"{BASE}/demonstrations")


def demo() -> FleetDemo:
    """Four simulated SO-101 arms: twenty demonstrations and a short imitation, so that there is something to learn."""
    base = Imitate(
        env=EnvConfig("so101"),
        new=NewTinyOfJoints(horizon=16, sampler=FlowSampler(Ode(), AllSteps(), 10)),
        grounding=GroundingConfig(scenes=3000, fit=FitConfig(steps=600, batch=64, lr=2e-3)),
        imitation=ImitationConfig(20, stride=1, fit=FitConfig(steps=1200, batch=64, lr=1e-3)),
    )
    learn = Learn(
        _CORRECTIONS,
        policy="",
        demonstrations="",
        updates_per_second=1000.0,  # as many as the machine can: simulated robots are faster than real ones, too
        publish_every=400,
        rest_after=600.0,  # the robots wait for it
        canary=CanaryRule(share=0.25, min_episodes=8),
    )
    return FleetDemo(base, learn)
