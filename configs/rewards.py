"""Reward models, and policies that are paid by what a progress critic sees.

Train the critic first (``progress``, ``place_progress``); ``--reward.folder FOLDER`` is for another reward model, such
as a vision-language model (``judge``).  Neither simulator nor world model says anything about the reward then.
"""

from dataclasses import replace

from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.train_rewards import MakeJudge, TrainProgress, TrainSuccess
from vla_rl.recipes.trainers import LearnedReward
from vla_rl.rewards.env import RewardWeights
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


WEIGHTS = RewardWeights(progress=1.0, done=1.0)  # the way there, and as much again for having arrived
CRITIC = "runs/progress/checkpoints/progress"
PLACE_CRITIC = "runs/place_progress/checkpoints/progress"


def lift() -> Improve:
    """The demo's PPO in the simulator, from the checkpoint ``--policy``."""
    made: Improve = load_config("demo.py:last_step")
    return replace(made, reward=LearnedReward(CRITIC, WEIGHTS))


def imagined() -> Imagine:
    """The same in imagination, otherwise as ``imagine.py:lift``."""
    made: Imagine = load_config("imagine.py:lift")
    return replace(made, reward=LearnedReward(CRITIC, WEIGHTS))


def place() -> Improve:
    """Place by PPO in the simulator, from the checkpoint ``--policy``, otherwise as ``tabletop.py:place``."""
    made: Improve = load_config("tabletop.py:place")
    return replace(made, reward=LearnedReward(PLACE_CRITIC, WEIGHTS))


def place_imagined() -> Imagine:
    """The same in imagination, otherwise as ``imagine.py:place``."""
    made: Imagine = load_config("imagine.py:place")
    return replace(made, reward=LearnedReward(PLACE_CRITIC, WEIGHTS))
