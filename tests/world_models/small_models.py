"""Small untrained world models, for tests of the code around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vla_rl.contract.env import ArraySpec, EnvSpec
from world_models.backbones.unet import UNetConfig
from world_models.config import ImaginationConfig, Limits, WorldModelConfig
from world_models.env import ImaginedEnv
from world_models.initial_states import InitialStatePool, InitialStates
from world_models.model import WorldModel

SMALL = UNetConfig(patch=4, width=16, deep=16, depth=1, heads=2, embedding=32)
SIDE = 16


def spec(cameras: tuple[str, ...] = ("front",), limit: int = 12) -> EnvSpec:
    """A robot with a state of three and two actions."""
    return EnvSpec(
        name="table",
        images={name: ArraySpec((SIDE, SIDE, 3), "uint8", 0, 255) for name in cameras},
        state=ArraySpec((3,), "float32", -1.0, 1.0),
        action=ArraySpec((2,), "float32", (-0.5, -2.0), (0.5, 1.0)),
        tasks=("push", "pull"),
        control_dt=0.1,
        time_limit=limit,
        max_chunk=limit,
    )


def model(cameras: tuple[str, ...] = ("front",), seed: int = 0, **numbers: Any) -> WorldModel:
    """Every weight is random, those that begin at zero as well."""
    torch.manual_seed(seed)
    made = WorldModel(spec(cameras), WorldModelConfig(**{"frames": 3, "backbone": SMALL, **numbers}))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval()


def initial_states(made: WorldModel, count: int = 5, keyframes: int = 4, seed: int = 0) -> InitialStatePool:
    chooser = np.random.default_rng(seed)

    def random_states(number: int) -> InitialStates:
        shape = (number, 1 + made.config.context_frames, *made.picture)
        state = chooser.uniform(-1, 1, (number, 3)).astype(np.float32)
        pictures, tasks = chooser.integers(0, 256, shape, np.uint8), chooser.integers(0, 2, number)
        return InitialStates(pictures, state, tasks, np.zeros(number, np.int64))

    return InitialStatePool(random_states(count), random_states(keyframes))


def imagined_env(
    num_envs: int = 3, limits: Limits | None = None, cameras: tuple[str, ...] = ("front",), **numbers: Any
) -> ImaginedEnv:
    made = model(cameras)
    config = ImaginationConfig(
        **{
            "horizon": 12,
            "batch_size": 4,
            "success_threshold": 2.0,
            "failure_threshold": 2.0,
            "resamples": 1,
            **numbers,
        }
    )
    return ImaginedEnv(made, initial_states(made), num_envs, limits, config)
