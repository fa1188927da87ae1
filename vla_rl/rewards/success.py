"""A success classifier: does this frame show that the instruction is fulfilled?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.env import Array
from vla_rl.contract.policy import State
from vla_rl.rewards.frames import LabelledFrames
from vla_rl.rewards.reward import RewardOutput
from vla_rl.rewards.reward_model import RewardModel, RewardModelConfig, to_bool


@dataclass(frozen=True)
class SuccessConfig(RewardModelConfig):
    """Sizes of the network, and how many frames a success must last."""


class SuccessClassifier(RewardModel):
    """Classifies single frames by features of an ``InstructedEncoder`` (a ``Reward``).

    ``progress`` is the probability that the frame shows success, for the share of successes in the training data;
    ``done`` needs ``config.hold`` consecutive frames whose score reaches ``threshold``.
    """

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: SuccessConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: the vocabulary of instructions."""
        super().__init__(cameras, words, config)
        self.head = nn.Sequential(
            nn.Linear(self.encoder.size, 2 * config.width), nn.SiLU(), nn.Linear(2 * config.width, 1)
        )

    def score(self, features: Tensor) -> Tensor:
        logit: Tensor = self.head(features)[..., 0]
        return logit

    def forward(self, images: Mapping[str, Array], text: Sequence[str]) -> Tensor:
        """Success logits [B] of ``images`` {camera: uint8 [B,h,w,3]} under ``text`` [B]."""
        return self.score(self.encoder(images, text))

    def loss(self, frames: LabelledFrames) -> tuple[Tensor, dict[str, float]]:
        """Binary cross-entropy of ``frames``, and the accuracy at a threshold of 0."""
        score, label = self(frames.images, frames.text), self.encoder.to_tensor(frames.label)
        loss = nn.functional.binary_cross_entropy_with_logits(score, label.to(score.dtype))
        return loss, {"accuracy": float(((score.detach() > 0) == label).float().mean())}

    def initial_state(self, num_envs: int) -> State:
        return {"streak": np.zeros(num_envs, np.int64)}

    @torch.no_grad()
    def evaluate(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[RewardOutput, State]:
        score = self.score(self.encode_clips(frames, text))
        done, streak = self.hold_done(score, to_bool(valid), state["streak"])
        return RewardOutput(score.sigmoid().float().cpu().numpy(), done), {"streak": streak}
