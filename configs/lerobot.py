"""A policy that LeRobot runs, corrected: ``vla-rl train lerobot.py:residual_td3 --policy lerobot:FOLDER --env NAME``.

The policy is frozen, whatever its family; the correction reads its actions, the state and what else it is shown but
pictures.  docs/bring/vla.md
"""

from dataclasses import replace

from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import ResidualConfig
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import vla
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.trainers import ReplayConfig, TrainerConfig
from vla_rl.training.loop import LoopConfig

SMALL = HeadConfig(width=128)
BUDGET = LoopConfig(100_000, 100_000, save_every=50, collapse=1.0, env_steps=50_000, validate_steps=10_000)


def residual_td3() -> Improve:
    """A small correction of whole chunks that is kept near what was tried (``compare.py:residual_td3``)."""
    careful = load_config("compare.py:residual_td3").rl
    return _improve(replace(careful, policy=replace(careful.policy, temperature=None)))


def residual_step() -> Improve:
    """A larger correction at every control step: sooner good at what a policy does badly in a systematic way."""
    trainer = load_config("compare.py:residual_step").rl
    policy = TD3Residual(ResidualConfig(head=SMALL))
    return _improve(replace(trainer, policy=policy, replay=ReplayConfig(gamma=0.98, n_step=5, share=0.0), loop=BUDGET))


def residual_ppo() -> Improve:
    """The correction at every control step, learnt by PPO."""
    return _improve(load_config("compare.py:residual_ppo").rl)


def _improve(trainer: TrainerConfig) -> Improve:
    return vla.improve(trainer, VLAOptions())
