"""Reward models."""

from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.train_rewards import MakeJudge, TrainProgress, TrainSuccess
from vla_rl.training.fit import FitConfig

LIFT, PLACE = EnvConfig("lift"), EnvConfig("place")
LONGER = FitConfig(steps=6000, batch=64, lr=6e-3)  # place needs more: three times that of lift


def success() -> TrainSuccess:
    """Sees whether the cube that the instruction names is up, among others."""
    return TrainSuccess(env=LIFT)


def progress() -> TrainProgress:
    """Follows how far the cube that the instruction names is on its way up, and sees when it is there."""
    return TrainProgress(env=LIFT)


def place_success() -> TrainSuccess:
    """Sees whether the cube that the instruction names rests on the plate that it names."""
    return TrainSuccess(env=PLACE, training=800, fit=LONGER)


def place_progress() -> TrainProgress:
    """Follows how far the named cube is on its way to the named plate, and sees when it is there."""
    return TrainProgress(env=PLACE, training=800, fit=LONGER)


def judge() -> MakeJudge:
    """A vision-language model (``--judge.vlm.model``) that is asked whether place is done; nothing is trained."""
    return MakeJudge(env=PLACE)
