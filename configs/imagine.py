"""Train a world model on few episodes and improve a policy in it; and the same with one more part at a time."""

import math
from dataclasses import replace

from vla_rl.algorithms.group_relative import GRPOConfig, Mean, PerTrajectory
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imagine.plan import CollectConfig, Plan
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import StartFrom
from vla_rl.recipes.trainers import OnPolicyRL, ReplayConfig, RLConfig
from vla_rl.training.fit import FitConfig
from vla_rl.training.loop import LoopConfig
from vla_rl.training.world_model import CoevolutionConfig, WorldModelFit
from world_models.backbones.dit import DiTConfig
from world_models.backbones.wan import WanConfig, WanFolder
from world_models.config import ImaginationConfig, PredictedReward, RewardHeadConfig, WorldModelConfig
from world_models.initial_states import KeyframeConfig

# The demo's environment and PPO, with the batch that it has in the simulator: half of it is too noisy to learn from.
ENV = EnvConfig("lift", training_options={"deadline": 25})
RL = RLConfig(
    FlowSampler(FlowSde(0.6), LastStep(), 4),
    WindowConfig(num_envs=128, decisions=5),
    loop=LoopConfig(iterations=60, validate_every=12),
)
PLAN = Plan(
    WorldModelConfig(precision="auto"),
    ImaginationConfig(horizon=25, deadline=25),
    KeyframeConfig(),
)


def lift() -> Imagine:
    """The demo's task and PPO, in imagined rollouts of up to 25 control steps."""
    return Imagine(RL, plan=PLAN, env=ENV)


def lift_to_rank() -> Imagine:
    """A world model of lift for ``vla-rl imagine rank``: of more episodes, learnt three to four times as long.

    ``--plan.collect.other-policies`` names checkpoints that it learns of besides ``--policy``; 800 episodes, to start
    from, are set aside.  Episodes are as long as those that are to be foretold, without training's deadline.
    """
    collect = CollectConfig(1000, 500, calibration=400, held_out=400, other_episodes=600)
    fit = WorldModelFit(
        state_dynamics=FitConfig(6000, 512, 2e-3),
        video=FitConfig(5000, 32, 1.5e-3),
        mode_classifier=FitConfig(5000, 64, 1e-3, weight_decay=1e-2),
    )
    imagination = ImaginationConfig(horizon=60, outcome_every=1)
    return replace(_with(replace(PLAN, imagination=imagination, collect=collect, fit=fit)), env=EnvConfig("lift"))


def with_keyframes() -> Imagine:
    """Half of the imagined rollouts begin at keyframes."""
    return _with(replace(PLAN, imagination=replace(PLAN.imagination, keyframe_share=0.5)))


def no_uncertainty() -> Imagine:
    """Uncertainty truncates no rollout."""
    return _with(replace(PLAN, trust=TrustConfig(quantiles=(1.0,))))


def with_resampling() -> Imagine:
    """A success counts if it happens again in a second imagined rollout."""
    return _with(replace(PLAN, imagination=replace(PLAN.imagination, resamples=1)))


def with_coevolution() -> Imagine:
    """A hundred of the real episodes are played when imagination drifts away, by the policy of that moment."""
    fewer = replace(PLAN.collect, policy_episodes=PLAN.collect.policy_episodes - 100)
    return _with(replace(PLAN, collect=fewer, coevolution=CoevolutionConfig(budget=100)))


def residual_td3() -> Improve:
    """No imagination: the comparison's best way in the simulator, with as many episodes, validation included."""
    made = load_config("compare.py:residual_step")
    # 1275 episodes: some 1210 of 21 or 22 control steps, and 32 to validate before and after, lest ruins are kept.
    loop = LoopConfig(100_000, 100_000, save_every=50, collapse=1.0, env_steps=26_050)
    trainer = replace(made.rl, replay=ReplayConfig(gamma=0.98, n_step=5), loop=loop)
    return Improve(trainer, env=ENV, evaluation=EvaluationConfig(validation=32))


# Longer episodes, and as much noise as PPO has for them in the simulator.
PLACE_RL = RLConfig(
    FlowSampler(FlowSde(0.5), LastStep(), 4),
    WindowConfig(num_envs=128, decisions=10),
    loop=LoopConfig(iterations=60, validate_every=12),
)
# Their successes are moments: episodes end with them, so what comes a few control steps later was never recorded.
LONGER = replace(PLAN, imagination=ImaginationConfig(horizon=50, deadline=50, outcome_every=1))
PLACE_COLLECT = CollectConfig(1400, 600, calibration=200, held_out=200)
PLACE_FIT = WorldModelFit(
    video=FitConfig(5000, 32, 1.5e-3), mode_classifier=FitConfig(4000, 64, 1e-3, weight_decay=1e-2)
)
PLACE = EnvConfig("place", training_options={"deadline": 50})


def place() -> Imagine:
    """Place, from the checkpoint ``--policy``; the world model takes some forty minutes of one core."""
    plan = replace(LONGER, collect=PLACE_COLLECT, fit=PLACE_FIT)
    return Imagine(PLACE_RL, plan=plan, policy="runs/imitate_place/checkpoints/imitation", env=PLACE)


def place_to_rank() -> Imagine:
    """As :func:`lift_to_rank`, on place."""
    collect = replace(PLACE_COLLECT, calibration=400, held_out=400, other_episodes=500)
    plan = replace(place().plan, collect=collect, fit=replace(PLACE_FIT, state_dynamics=FitConfig(6000, 512, 2e-3)))
    return replace(place(), plan=plan)


def push() -> Imagine:
    """Push, from the checkpoint ``--policy``."""
    env = EnvConfig("push", training_options={"deadline": 50})
    return Imagine(PLACE_RL, plan=LONGER, policy="runs/imitate_push/checkpoints/imitation", env=env)


def catch() -> Imagine:
    """A Gymnasium task that is only seen, from a policy of gym.py:pixels (``--policy``); nothing is assumed of a robot.

    Success is a return of 1: the ball is caught.
    """
    env = EnvConfig("gym", {"id": "sims.catch:vla_rl/Catch-v0", "success_return": 1.0})
    model = replace(PLAN.model, robot_crop=0, uncertainty="pictures")
    plan = replace(PLAN, model=model, imagination=ImaginationConfig(horizon=10))
    rl = OnPolicyRL(
        StartFrom(),
        WindowConfig(num_envs=32, decisions=36),
        loop=LoopConfig(iterations=30, validate_every=10, collapse=math.inf),
        algorithm=PPOConfig(epochs=5, minibatch=256, lr=1e-3, clip_low=0.2, clip_high=0.2),
    )
    return Imagine(rl, plan=plan, policy="runs/pixels/checkpoints/best", env=env)


def catch_rewards() -> Imagine:
    """As :func:`catch`, paid what the world model predicts of the task's own reward: a missed ball costs 1."""
    made = catch()
    model = replace(made.plan.model, reward=RewardHeadConfig())
    imagination = replace(made.plan.imagination, reward=PredictedReward())
    return replace(made, plan=replace(made.plan, model=model, imagination=imagination))


def lift_dit() -> Imagine:
    """As :func:`lift` with a diffusion transformer, which is made for larger pictures."""
    return _with(replace(PLAN, model=replace(PLAN.model, backbone=DiTConfig())))


def lift_wan() -> Imagine:
    """As :func:`lift` with Wan; ``--plan.model.backbone.weights.path`` is a folder that diffusers wrote."""
    return _with(replace(PLAN, model=replace(PLAN.model, backbone=WanConfig(WanFolder("wan")))))


def _with(plan: Plan) -> Imagine:
    return replace(lift(), plan=plan)


def lift_grpo() -> Imagine:
    """As :func:`lift`, by GRPO: groups of eight rollouts of one initial state and noise, no critic, as many steps.

    A truncated rollout stays in its group with what it has earned: no calibrated value of it exists.
    """
    return _grouped(GRPOConfig())


def lift_wovr() -> Imagine:
    """As :func:`lift_grpo` with the objective of WoVR (arXiv 2602.13977): every rollout weighs the same, however long.

    That is no policy gradient of success (see ``PerTrajectory``); it is here for comparisons.
    """
    return _grouped(GRPOConfig(baseline=Mean(), averaging=PerTrajectory(), clip_high=0.2))


def _grouped(algorithm: GRPOConfig) -> Imagine:
    # PPO's control steps: 60 x 128 rows x 5 decisions x 5 actions.
    loop = replace(RL.loop, validate_every=5, env_steps=192_000)
    return replace(lift(), rl=replace(RL, experience=GroupConfig(), algorithm=algorithm, loop=loop))
