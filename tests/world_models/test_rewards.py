"""A head for rewards: what it learns of a toy with a dense reward, and what imagined rollouts are paid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.world_models.pushing import played, world
from tests.world_models.small_models import imagined_env, initial_states, model
from tests.world_models.test_env import random_actions
from tests.world_models.test_model import FIT, FRAMES, present
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import ArraySpec
from vla_rl.experience.trajectories import Trajectories
from vla_rl.experience.windows import make_windows, window_batch
from vla_rl.training.fit import FitConfig
from vla_rl.training.world_model import (
    WorldModelFit,
    as_predicted,
    fit_world_model,
    load_world_model,
    save_world_model,
    statistics,
)
from world_models.backbones.unet import UNetConfig
from world_models.config import RewardHeadConfig, WorldModelConfig
from world_models.env import ImaginationConfig, ImaginedEnv
from world_models.model import WorldModel
from world_models.payment import PredictedReward, SuccessReward
from world_models.uncertainty import Limits

HEAD = RewardHeadConfig()
BRIEF = WorldModelFit(*[FitConfig(steps=2, batch=4)] * 4)


def seen_alone(trajectories: Trajectories) -> Trajectories:
    """The same episodes without proprioception: where the square is can be seen and is not told."""
    return replace(trajectories, state=trajectories.state[:, :0])


def windows(made: WorldModel, trajectories: Trajectories) -> dict[str, torch.Tensor]:
    """Those whose first call is whole."""
    trajectories = as_predicted(made, trajectories)
    table = make_windows(trajectories, made.config.frames, made.config.context_frames)
    whole = np.flatnonzero(table["count"] >= made.config.frames)
    return {name: torch.from_numpy(item) for name, item in window_batch(trajectories, table, whole).items()}


def predicted(made: WorldModel, batch: dict[str, torch.Tensor], known: int = FRAMES) -> torch.Tensor:
    count, actions = len(batch["task"]), batch["actions"][:, : made.config.frames]
    shape = (count, made.config.pictures, *made.video.latent)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    reward = made.predict(present(made, batch), actions, torch.full((count,), known), noise).reward
    assert reward is not None
    return reward


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


@pytest.fixture(scope="module")
def learnt() -> WorldModel:
    torch.manual_seed(0)
    spec, trajectories = replace(world(), state=ArraySpec((0,), "float32", (), ())), seen_alone(played(300, seed=1))
    backbone = UNetConfig(2, width=16, deep=16, depth=1, heads=2, embedding=64)
    config = WorldModelConfig(FRAMES, FRAMES, robot_crop=0, backbone=backbone, reward=HEAD)
    made = WorldModel(spec, config, *statistics(trajectories))
    brief = [FitConfig(2, 8)] * 2
    fit = WorldModelFit(brief[0], brief[1], FIT.video, FitConfig(2, 8))
    fit_world_model(made, trajectories, fit, torch.Generator().manual_seed(1))
    return made.eval()


def test_rewards_of_episodes_that_it_never_saw_are_predicted_from_what_it_sees(learnt):
    """Of every control step, and of whole calls; a constant has no correlation, and an error of the spread itself."""
    batch = windows(learnt, seen_alone(played(150, seed=2)))
    reward, guess = batch["reward"][:, :FRAMES], predicted(learnt, batch)
    print(
        correlation(guess, reward),
        correlation(guess.sum(1), reward.sum(1)),
        (guess - reward).square().mean() / reward.var(),
    )
    assert 0
