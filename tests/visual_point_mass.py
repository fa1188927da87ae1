"""A point mass with a camera and a wide goal: quick episodes for small VLAs, some of which succeed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sims.toy.point_mass import PointMassEnv
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.policies.flow import FlowSampler
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary

SIDE, GOAL = 8, 0.6  # pixels; metres


class VisualPointMass(PointMassEnv):
    """The image is a white pixel at the position; success is a distance below ``GOAL`` at the time limit."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        camera = ArraySpec((SIDE, SIDE, 3), "uint8", 0, 255, frame="top")
        self.spec: EnvSpec = replace(self.spec, name="visual point mass", images={"top": camera})

    def _advance(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        reward, won, lost = super()._advance(env_ids, action)
        near = -reward < GOAL
        return reward, (won | lost) & near, (won | lost) & ~near

    def _images(self) -> dict[str, np.ndarray]:
        image = np.zeros((self.num_envs, SIDE, SIDE, 3), np.uint8)
        x, y = np.clip((self._state() + 1) / 2 * SIDE, 0, SIDE - 1).astype(int).T
        image[np.arange(self.num_envs), y, x] = 255
        return {"top": image}


def tiny_vla(spec: EnvSpec, horizon: int = 2, sampler: FlowSampler | None = None) -> TinyVLA:
    """A very small VLA with random weights for ``spec``."""
    torch.manual_seed(0)
    config = TinyConfig(horizon, queries=1, condition=8, width=16, blocks=1)
    policy = TinyVLA(
        spec,
        Vocabulary.from_texts(spec.tasks),
        Affine.from_bounds(spec.state),
        config if sampler is None else replace(config, sampler=sampler),
    )
    for parameter in policy.expert.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return policy.eval()
