"""The other tabletop tasks: place, push, and one policy for all three; the same PPO as the demo's."""

import math
from dataclasses import replace

from vla_rl.algorithms.guard import FallbackConfig, ReleaseConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.algorithms.self_imitation import FutureStatesConfig
from vla_rl.experience.intervention import Escalation
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import BlendConfig, ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import Corrected, Imitate, SelfImitated
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.trainers import OffPolicyRL, ReplayConfig, RLConfig
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig
from vla_rl.training.loop import LoopConfig

# Less noise than in the demo, since these tasks need more precision; and four times its rollout, since their episodes
# are longer and a rollout of the demo's size would hold too few.
RL = RLConfig(
    FlowSampler(FlowSde(0.5), LastStep(), 4),
    WindowConfig(num_envs=256, decisions=10),
    loop=LoopConfig(iterations=110, validate_every=10),
    algorithm=PPOConfig(minibatch=1280),
)
EVALUATION = EvaluationConfig(validation=384, test=1536)  # a third of the seeds for each task
GROUNDING = GroundingConfig(scenes=8000, fit=FitConfig(steps=1500, batch=64, lr=2e-3))

# As in the demo, an episode that takes much longer than the expert has failed while learning.
PLACE = EnvConfig("place", training_options={"deadline": 50})


def imitate_place() -> Imitate:
    """Place by imitation."""
    return Imitate(env=PLACE, grounding=GROUNDING, imitation=_study(200, 2000))


def place() -> Improve:
    """Place by PPO, from the checkpoint ``--policy``."""
    return Improve(RL, policy="runs/imitate_place/checkpoints/imitation", env=PLACE)


def place_residual() -> Improve:
    """Place by a residual that is kept near its base: what to begin with where a fall would be dear.

    A decision corrects a whole chunk of the base.  The actor plays half of the episodes at first, and more while it is
    level with the base.  Its noise covers the corrections that it can choose: beyond those that were tried, critics
    guess.
    """
    small = HeadConfig(width=128)
    blend = BlendConfig(decisions=6000, start=0.5, per="episode")
    algorithm = ResidualTD3Config(
        utd_ratio=1.0,
        learning_starts=1000,
        burst=500,
        critic_warmup=1000,
        num_critics=4,
        critic=small,
        lr=5e-5,
        tau=0.01,
        value_bounds=(0.0, 1.0),
        penalty=0.05,
        release=ReleaseConfig(auroc=0.65, hold=0.55),
        fallback=FallbackConfig(margin=0.05),
    )
    residual = ResidualConfig(scale=0.1, horizon=5, plan=0, noise=0.04, correlation=0.0, head=small, blend=blend)
    return Improve(
        OffPolicyRL(
            TD3Residual(residual),
            WindowConfig(num_envs=32, decisions=2),
            replay=ReplayConfig(gamma=0.99, n_step=4, share=0.0),
            loop=LoopConfig(100_000, 100_000, save_every=200, collapse=1.0, env_steps=150_000, validate_steps=50_000),
            algorithm=algorithm,
        ),
        policy="runs/imitate_place/checkpoints/imitation",
        env=PLACE,
    )


def place_self_imitation() -> Improve:
    """Place by imitating its own successes, which also teach it to see where the gripper has to go.

    Exploring is what the policy does anyway, so it costs nothing.
    """
    loop = LoopConfig(24, 8, save_every=8, collapse=math.inf)  # 150,000 control steps
    return Improve(
        SelfImitated(loop=loop, future=FutureStatesConfig()),
        policy="runs/imitate_place/checkpoints/imitation",
        env=PLACE,
    )


PUSH = EnvConfig("push", training_options={"deadline": 50})
MIXED = EnvConfig("mixed", training_options={"deadlines": {"lift": 25, "place": 50, "push": 50}})


def imitate_push() -> Imitate:
    """Push by imitation."""
    return Imitate(env=PUSH, grounding=GROUNDING, imitation=_study(100, 2000))


def push() -> Improve:
    """Push by PPO, from the checkpoint ``--policy``."""
    return Improve(RL, policy="runs/imitate_push/checkpoints/imitation", env=PUSH)


def imitate_mixed() -> Imitate:
    """One policy for lift, place and push, by imitation; an episode's seed decides which it is."""
    grounding = GroundingConfig(scenes=12000, fit=FitConfig(steps=2500, batch=64, lr=2e-3))
    return Imitate(env=MIXED, grounding=grounding, imitation=_study(900, 6000), evaluation=EVALUATION)


def mixed() -> Improve:
    """The same by PPO, from the checkpoint ``--policy``."""
    rl = replace(RL, loop=LoopConfig(iterations=150, validate_every=15))
    return Improve(rl, policy="runs/imitate_mixed/checkpoints/imitation", env=MIXED, evaluation=EVALUATION)


def _study(demonstrations: int, steps: int) -> ImitationConfig:
    return ImitationConfig(demonstrations, fit=FitConfig(steps=steps, batch=64, lr=1e-3))


def corrected() -> Improve:
    """Lift by HG-DAgger: a scripted person takes over where the policy, ``--policy``, visibly fails."""
    trainer = Corrected("sims.mujoco.tasks.lift:potential")
    return Improve(trainer, policy="runs/imitate/checkpoints/imitation", env=EnvConfig("lift"))


def helped() -> Improve:
    """As :func:`corrected`, but the person helps by degrees, and no more than is due (VLAC's graded help)."""
    trainer = Corrected("sims.mujoco.tasks.lift:potential", help=Escalation())
    return Improve(trainer, policy="runs/imitate/checkpoints/imitation", env=EnvConfig("lift"))
