"""Reward models."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.train_rewards import TrainProgress, TrainSuccess

LIFT = EnvConfig("lift")


def success() -> TrainSuccess:
    """Sees whether the cube that the instruction names is up, among others."""
    return TrainSuccess(env=LIFT)


def progress() -> TrainProgress:
    """Follows how far the cube that the instruction names is on its way up, and sees when it is there."""
    return TrainProgress(env=LIFT)
