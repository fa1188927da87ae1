"""The demo: lift, thirty demonstrations, then PPO; and the same PPO with every flow sampler, for the study.

Exploration noise is in units of the action's half-range (30 mm, or the grip's 1).
"""

from dataclasses import replace

from vla_rl.algorithms.group_relative import GRPOConfig, RLOOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.curriculum import OutcomeVariance
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import AllSteps, FlowDdim, FlowNoise, FlowOu, FlowSampler, FlowSde, LastStep, OneRandomStep
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import Imitate, NewTiny
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.trainers import RLConfig
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig
from vla_rl.training.loop import LoopConfig

# While learning, an episode that takes longer than 25 control steps (the expert needs about 17) has failed.
ENV = EnvConfig("lift", training_options={"deadline": 25})
RL = RLConfig(FlowSampler(FlowSde(0.6), LastStep(), 4), loop=LoopConfig(iterations=200, validate_every=20))
GROUPS = GroupConfig(groups=16, size=8)


def demo() -> Demo:
    """What ``make demo`` runs: two processes collect and evaluate; a third learns."""
    return Demo(
        replace(RL, loop=replace(RL.loop, collectors=2, save_every=10)),
        env=replace(ENV, training_options={**ENV.training_options, "threads": 1}),  # of each collector's simulator
        evaluation=EvaluationConfig(processes=2),
    )


def small() -> Demo:
    """Everything the demo does, in about a minute, for trying out changes and for the tests.

    With a smaller policy and more demonstrations instead of more learning.
    """
    return Demo(
        RLConfig(
            FlowSampler(FlowSde(0.5), LastStep(), 4),
            WindowConfig(num_envs=64),
            loop=LoopConfig(6, validate_every=3, collectors=2),
        ),
        env=ENV,
        new=NewTiny(width=128, blocks=2),
        grounding=GroundingConfig(1500, FitConfig(300, batch=32, lr=2e-3)),
        imitation=ImitationConfig(120, stride=3, draws=4, fit=FitConfig(500, lr=2e-3)),
        evaluation=EvaluationConfig(validation=64, test=64, ablation=128, processes=2),
    )


def imitate() -> Imitate:
    """Its first half: a policy by imitation."""
    return Imitate(env=ENV)


def last_step() -> Improve:
    """Its second half, from the checkpoint ``--policy``: Flow-SDE noise in the last denoising step."""
    return Improve(RL, env=ENV)


def one_step() -> Improve:
    """Flow-SDE noise in one random step per sample (pi_RL's default)."""
    return _with(FlowSampler(FlowSde(0.5), OneRandomStep(), 4))


def all_steps() -> Improve:
    """Flow-SDE noise in all steps, joint likelihood."""
    return _with(FlowSampler(FlowSde(0.3), AllSteps(), 4))


def flow_ou() -> Improve:
    """Exact Ornstein-Uhlenbeck steps: noise early, little at the end."""
    return _with(FlowSampler(FlowOu(0.5, 0.1), AllSteps(), 4))


def flow_ddim() -> Improve:
    """DDIM-like steps with the same last step."""
    return _with(FlowSampler(FlowDdim(0.5, 0.1), AllSteps(), 4))


def flow_noise() -> Improve:
    """Learned noise with its exact joint likelihood and a small entropy bonus."""
    sampler = FlowSampler(FlowNoise(0.04, 0.16), AllSteps(), 4)
    return Improve(replace(RL, sampler=sampler, algorithm=PPOConfig(entropy=1e-4)), env=ENV)


def grpo() -> Improve:
    """The same sampler with advantages relative to groups of eight episodes from one seed; no critic."""
    return _grouped(GRPOConfig())


def rloo() -> Improve:
    """As :func:`grpo`, without clipping."""
    return _grouped(RLOOConfig())


def grpo_curriculum() -> Improve:
    """As :func:`grpo`, on 512 scenes, of which those are played most whose outcome is open."""
    return _grouped(GRPOConfig(), replace(GROUPS, curriculum=OutcomeVariance()))


def _grouped(algorithm: GRPOConfig | RLOOConfig, groups: GroupConfig = GROUPS) -> Improve:
    """As many control steps as PPO has in the demo, however many groups are refilled."""
    loop = replace(RL.loop, iterations=1000, env_steps=600_000)
    return Improve(replace(RL, experience=groups, algorithm=algorithm, loop=loop), env=ENV)


def _with(sampler: FlowSampler) -> Improve:
    return Improve(replace(RL, sampler=sampler), env=ENV)
