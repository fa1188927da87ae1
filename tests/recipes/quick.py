"""A config for the tests of the commands: reinforcement learning from any checkpoint, an iteration in a moment."""

from dataclasses import replace

from vla_rl.algorithms.chunks import HGDaggerConfig
from vla_rl.algorithms.offline import IQLConfig, WSRLConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.algorithms.self_imitation import FutureStatesConfig, SelfImitationConfig
from vla_rl.experience.curriculum import LearningProgress
from vla_rl.experience.intervention import Escalation, PersonConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import SquashedConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import Corrected, Imitate, NewTiny, SelfImitated
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import SquashedActor, TD3Residual
from vla_rl.recipes.trainers import OffPolicyRL, ReplayConfig, RLConfig
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig
from vla_rl.training.loop import LoopConfig

VARIED = EnvConfig(
    "randomize",
    options={
        "env": "lift",
        "options": {"deadline": 5},
        "parameters": {
            "friction": {"low": 0.3, "high": 2.0},
            "object_mass": {"values": [1, 3]},
            "camera_x": {"low": -0.05, "high": 0.05},
            "latency": {"low": 0, "high": 2},
            "action_noise": {"low": 0, "high": 0.3},
        },
    },
)


def improve() -> Improve:
    """Four iterations, validated after each."""
    return Improve(
        RLConfig(FlowSampler(FlowSde(0.5), LastStep(), 4), WindowConfig(4, 2), loop=LoopConfig(4, validate_every=1)),
        env=EnvConfig("lift", options={"deadline": 5}),
        evaluation=EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4),
    )


def paid() -> Improve:
    """As :func:`improve`, where every control step pays, so that each iteration changes the weights."""
    return replace(improve(), env=EnvConfig("tests.recipes.paying_env:make", options={"deadline": 7}))


def processes() -> Improve:
    """As :func:`improve`, collected and evaluated by two processes."""
    recipe = improve()
    rl = replace(recipe.rl, loop=replace(recipe.rl.loop, collectors=2))
    return replace(recipe, rl=rl, evaluation=replace(recipe.evaluation, processes=2))


def curriculum() -> Improve:
    """As :func:`improve`, of five scenes, those whose success changes."""
    recipe = improve()
    windows = WindowConfig(4, 2, curriculum=LearningProgress(scenes=5))
    return replace(recipe, rl=replace(recipe.rl, experience=windows))


def corrected() -> Improve:
    """HG-DAgger of the same policy, by a person who takes over at once."""
    recipe = improve()
    trainer = Corrected(
        "sims.mujoco.tasks.lift:potential",
        PersonConfig(patience=1, delay=0, hold=2, max_share=0.5),
        WindowConfig(4, 2),
        loop=LoopConfig(4, validate_every=1),
        algorithm=HGDaggerConfig(steps=2, batch=8),
    )
    return replace(recipe, rl=trainer)


def helped() -> Improve:
    """The same with a person who helps by degrees."""
    recipe = corrected()
    return replace(recipe, rl=replace(recipe.rl, help=Escalation(demonstration=3)))


def self_imitated() -> Improve:
    """Self-imitation of the same policy, where every second episode succeeds."""
    trainer = SelfImitated(
        WindowConfig(4, 4),
        loop=LoopConfig(4, validate_every=2),
        algorithm=SelfImitationConfig(batch=8, draws=1, grow=2, epochs=1),
    )
    recipe = improve()
    env = EnvConfig("tests.recipes.generous_env:make", options={"deadline": 7})
    return replace(recipe, rl=trainer, env=env)


def self_imitated_foreseeing() -> Improve:
    """The same with a backbone that learns."""
    recipe = self_imitated()
    assert isinstance(recipe.rl, SelfImitated)
    return replace(recipe, rl=replace(recipe.rl, future=FutureStatesConfig(decisions=2, width=8)))


def residual() -> Improve:
    """The same off-policy: TD3 of a residual."""
    small = HeadConfig(16, 1)
    learning = {"batch": 16, "utd_ratio": 0.5, "learning_starts": 16, "num_critics": 2, "critic": small}
    return Improve(
        OffPolicyRL(
            TD3Residual(ResidualConfig(head=small)),
            WindowConfig(4, 8),
            ReplayConfig(capacity=60, share=0.0),
            LoopConfig(4, validate_every=1),
            ResidualTD3Config(**learning),
        ),
        env=EnvConfig("lift", options={"deadline": 5}),
        evaluation=EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4),
    )


def randomized() -> Improve:
    """As :func:`improve`, in episodes that differ in looks, physics, latency and action noise."""
    return replace(improve(), env=VARIED)


def mixed() -> Improve:
    """As :func:`residual`, half of every batch from demonstrations."""
    recipe = residual()
    return replace(recipe, rl=replace(recipe.rl, replay=ReplayConfig(capacity=60, share=0.5)))


def warm_start() -> Improve:
    """As :func:`mixed`, WSRL: 20 steps from demonstrations alone, then SAC without them."""
    recipe, small = mixed(), HeadConfig(16, 1)
    learning = {
        "batch": 16,
        "utd_ratio": 0.5,
        "policy_delay": 1,
        "learning_starts": 16,
        "num_critics": 2,
        "critic": small,
    }
    algorithm = WSRLConfig(**learning, offline_steps=20, offline=IQLConfig(num_min_q=2, critic=small))
    policy = SquashedActor(SquashedConfig(head=small))
    return replace(recipe, rl=replace(recipe.rl, policy=policy, algorithm=algorithm))


def imitate_lift() -> Imitate:
    """A barely trained policy, from two demonstrations."""
    return Imitate(
        env=EnvConfig("lift"),
        new=NewTiny(width=32, blocks=1),
        grounding=GroundingConfig(scenes=64, fit=FitConfig(steps=2, batch=16)),
        imitation=ImitationConfig(2, fit=FitConfig(steps=2, batch=8)),
        evaluation=EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4),
    )
