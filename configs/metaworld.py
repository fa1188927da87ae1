"""A task of Meta-World from pixels: imitation of its own expert, then residual TD3 (docs/bring/simulator.md).

Policy and critics see pictures of one camera and the hand's position; nothing is labelled.
"""

from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import ResidualConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate_dataset import ImitateExpert
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.trainers import OffPolicyRL, ReplayConfig
from vla_rl.training.fit import FitConfig, ImitationConfig
from vla_rl.training.loop import LoopConfig

# Four of Meta-World's steps are one control step (50 ms): each costs a picture, ten times as much as a step.
TASK = EnvConfig("metaworld", {"tasks": ["drawer-open"], "shaped": False, "time_limit": 40, "action_repeat": 4})
EVALUATION = EvaluationConfig(validation=64, test=256, num_envs=16)
SMALL = HeadConfig(width=128)


def imitate() -> ImitateExpert:
    """Ten demonstrations of the expert, from which perception is learnt as well."""
    study = ImitationConfig(10, stride=1, fit=FitConfig(steps=600, batch=64, lr=1e-3))
    return ImitateExpert(env=TASK, imitation=study, evaluation=EVALUATION)


def residual_td3() -> Improve:
    """A small correction at every control step, over the checkpoint ``--policy``; success is worth 1."""
    algorithm = ResidualTD3Config(
        utd_ratio=0.5,
        learning_starts=2000,
        critic_warmup=1000,
        num_critics=4,
        critic=SMALL,
        lr=1e-4,
        tau=0.01,
        value_bounds=(0.0, 1.0),
    )
    trainer = OffPolicyRL(
        TD3Residual(ResidualConfig(head=SMALL)),
        WindowConfig(num_envs=16, decisions=16),
        ReplayConfig(gamma=0.99, n_step=5, share=0.25),
        LoopConfig(100_000, 0, save_every=50, collapse=1.0, env_steps=18_000, validate_steps=6000),
        algorithm,
    )
    run = "runs/imitate"
    return Improve(trainer, f"{run}/checkpoints/imitation", f"{run}/demonstrations", env=TASK, evaluation=EVALUATION)
