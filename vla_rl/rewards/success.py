"""A success classifier: does this picture show that what the instruction asks for is done?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.contract.env import Array
from vla_rl.contract.policy import State
from vla_rl.rewards.frames import LabelledFrames
from vla_rl.rewards.reward import Judgement
from vla_rl.rewards.trained import TrainedConfig, TrainedReward, as_bool


@dataclass(frozen=True)
class SuccessConfig(TrainedConfig):
    """Sizes of the network, and for how long a success must last to be one."""


class SuccessClassifier(TrainedReward):
    """Decides frame by frame from what an ``InstructedEncoder`` sees (a ``Reward``).

    ``progress`` is the probability that the frame shows success, under the share of successes it was trained with;
    ``done`` needs ``config.hold`` frames in a row whose score reaches ``threshold``.
    """

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], words: Sequence[str], config: SuccessConfig) -> None:
        """``cameras`` {name: (h, w, 3)}; ``words``: what instructions may consist of."""
        super().__init__(cameras, words, config)
        self.head = nn.Sequential(
            nn.Linear(self.encoder.size, 2 * config.width), nn.SiLU(), nn.Linear(2 * config.width, 1)
        )

    def score(self, seen: Tensor) -> Tensor:
        logit: Tensor = self.head(seen)[..., 0]
        return logit

    def forward(self, images: Mapping[str, Array], text: Sequence[str]) -> Tensor:
        """Scores [B], the logit of success, of ``images`` {camera: uint8 [B,h,w,3]} under ``text`` [B]."""
        return self.score(self.encoder(images, text))

    def loss(self, frames: LabelledFrames) -> tuple[Tensor, dict[str, float]]:
        """Binary cross-entropy of ``frames``, and the share that a threshold of 0 decides rightly."""
        score, label = self(frames.images, frames.text), self.encoder.tensor(frames.label)
        loss = nn.functional.binary_cross_entropy_with_logits(score, label.to(score.dtype))
        return loss, {"right": float(((score.detach() > 0) == label).float().mean())}

    def initial_state(self, rows: int) -> State:
        return {"streak": np.zeros(rows, np.int64)}

    @torch.no_grad()
    def judge(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[Judgement, State]:
        score = self.score(self.see_clips(frames, text))
        done, streak = self.held(score, as_bool(valid), state["streak"])
        return Judgement(score.sigmoid().float().cpu().numpy(), done), {"streak": streak}
