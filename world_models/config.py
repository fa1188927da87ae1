"""Sizes of a world model's call and weights of its losses; the backbone has a config of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from vla_rl.contract.errors import UserError
from world_models.backbones.unet import UNetConfig
from world_models.backbones.video_model import VideoModel


class BackboneConfig(Protocol):
    """The frozen dataclass of one backbone's sizes, which builds it."""

    @property
    def multiple(self) -> int:
        """Sides of pictures are multiples of it."""

    def build(self, picture: tuple[int, int, int], context: int, frames: int, actions: int, maps: int) -> VideoModel:
        """A backbone for pictures (C, h, w), ``context`` and predicted ``frames``; sizes of ``ActionInput``."""


@dataclass(frozen=True)
class RewardHeadConfig:
    """A head that predicts what the recorded episodes were rewarded with (``heads.RewardHead``)."""

    weight: float = 1.0  # of its squared error, in units of the variance of recorded rewards
    width: int = 128  # of its hidden layer


@dataclass(frozen=True)
class WorldModelConfig:
    """Sizes of a call, and weights of the losses.

    ``robot_crop`` is a prior: cameras stand still, and the robot's position in their pictures is linear in the state.
    Then whether a grasp will hold is read from a crop that moves with the robot, and what was learnt about it at one
    position holds at all of them; and the latest picture, moved as the robot moves, is also given to the video model,
    so that what a gripper carries keeps its look.  Where that is not so, as with a camera on the wrist, set it to 0.
    """

    frames: int = 5  # F: control steps per call
    pictures: int = 1  # P: predicted per call, at equal distances, the last one at the last known action
    context_frames: int = 2  # latest frames, F control steps apart; the episode's first frame is always added
    modes: int = 3  # K: of each entry of the robot's state: moves freely, is stopped, and one more
    denoising_steps: int = 2  # of the video model
    pose_maps: int = 16  # learned maps of the robot's position in the picture, at present and predicted
    resolution: tuple[int, int] | None = None  # (h, w) that all cameras are predicted at; None: the largest camera's
    robot_crop: int = 24  # pixels a side, around the robot; 0: the whole picture is read, and nothing is assumed
    backbone: BackboneConfig = field(default_factory=UNetConfig)
    uncertainty: Literal["state", "pictures"] = "state"  # whose spread ends rollouts; see ``uncertainty.py``
    context_noise: float = 0.1  # highest noise level of context frames in training: imagined frames are not clean
    change_weight: float = 9.0  # additional weight of pixels that change
    outcome_weight: float = 1.0
    inverse_weight: float = 0.1
    precision: Literal["auto", "float32", "bfloat16"] = "float32"  # of matrix products; weights and sums stay float32
    reward: RewardHeadConfig | None = None  # predicts rewards as well; None: nothing but outcomes is predicted

    @property
    def conditioning_frames(self) -> int:
        """Frames that the backbone sees: the first, with the prior the latest one moved to each picture, the latest."""
        return 1 + self.context_frames + (self.pictures if self.robot_crop else 0)

    def check(self) -> None:
        """Raise UserError for pictures that cannot lie at equal distances, and for an uncertainty that is always 0."""
        if self.frames % self.pictures:
            raise UserError(
                f"{self.pictures} pictures cannot lie at equal distances in {self.frames} control steps, so a call "
                "would not end with one; choose a divisor."
            )
        if self.uncertainty == "pictures" and self.denoising_steps < 2:
            raise UserError(
                f"{self.denoising_steps} denoising step revises no picture, so nothing would be uncertain; give "
                "denoising_steps of at least 2, or uncertainty='state'."
            )
