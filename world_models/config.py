"""A world model's sizes and losses; length, ends and pay of imagined rollouts, and limits of their uncertainty."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from vla_rl.contract.errors import UserError
from world_models.backbones import VideoModel
from world_models.backbones.unet import UNetConfig
from world_models.types import Future


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

    ``uncertainty`` is, without an additional forward pass, one of two:

        state     the spread of the modes of the robot's next state, weighted by their probabilities: large for a grasp
                  that may hold or slip
        pictures  how much the last denoising step changes the first one's estimate of the picture: for tasks without
                  proprioception that would tell

    On lift the first finds hallucinated successes (AUROC .88 among imagined ones) and the second does not (.46); the
    second follows the error of pictures (rank correlation .37 to .67 by depth) and the first hardly does (.23 to .30).
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
    uncertainty: Literal["state", "pictures"] = "state"  # whose spread ends rollouts
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


# -- imagined rollouts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SuccessReward:
    """1 for a call that succeeds: the sparse reward of a task that has one."""

    def require(self, head: RewardHeadConfig | None) -> None:
        """Every world model predicts success."""

    def earned(self, future: Future) -> Tensor:
        """[B]: nothing but its end is paid."""
        return future.uncertainty.new_zeros(len(future.uncertainty))

    def paid(self, earned: np.ndarray, success: np.ndarray) -> np.ndarray:
        """float32 [B] for calls that have ``earned`` [B] and of which ``success`` bool [B] succeeded."""
        return success.astype(np.float32)


@dataclass(frozen=True)
class PredictedReward:
    """The sum of the rewards that the world model's head predicts for the actions of the call.

    They are paid together, like success, since a call is predicted once, when its actions are known: paid one by one
    they would depend on how an episode is cut into chunks, and a call that turns out to be uncertain would be paid for.
    """

    def require(self, head: RewardHeadConfig | None) -> None:
        """Raise UserError for a world model whose ``head`` for rewards is None."""
        if head is None:
            raise UserError(
                "the world model has no head for rewards, so imagined rollouts cannot be paid what it predicts; train "
                "one with plan.model.reward=RewardHeadConfig(), or pay for success (plan.imagination.reward)."
            )

    def earned(self, future: Future) -> Tensor:
        """[B]: the predicted rewards of the known actions."""
        assert future.reward is not None  # :meth:`require`
        return future.reward.sum(1)

    def paid(self, earned: np.ndarray, success: np.ndarray) -> np.ndarray:
        """float32 [B]; success ends a rollout and earns what the head says."""
        return earned


Payment: TypeAlias = SuccessReward | PredictedReward
"""What an imagined rollout is paid with the last action of a call that is complete."""


@dataclass(frozen=True)
class ImaginationConfig:
    """Length, ends and noise of imagined rollouts.

    A success that lasts, like that of a cube in the air, may be read at the end of each call.  One that ends episodes
    as soon as it is there was never recorded a few control steps later, and is missed so: look at every control step
    (``outcome_every=1``), which takes three times as long.
    """

    horizon: int = 25  # control steps at most from where it begins; a rollout that gets there is truncated
    longest: int = 0  # a renewed environment's horizon may become so long; snapshots fit every horizon up to it
    deadline: int | None = None  # control steps of the episode after which it has failed unless it is finished
    keyframe_share: float = 0.0  # of the rollouts begin at a keyframe, whose episode's clock goes on
    success_threshold: float = 0.5  # predicted probability from which on the task counts as done
    failure_threshold: float = 0.5  # and as failed
    batch_size: int = 16  # environments predicted together
    noise_seed: int = 0  # chooses other noise for the same seeds
    outcome_every: int = 0  # control steps between looks at the outcome inside a call; 0: it is read at its end alone
    mid_call_steps: int = 1  # of denoising, for pictures that no call goes on from; 0: as for the others
    resamples: int = 0  # how often a success is predicted again with other noise before it counts
    reward: Payment = field(default_factory=SuccessReward)  # or PredictedReward, of a model with a head for rewards

    @property
    def reach(self) -> int:
        """The longest horizon of an environment with these numbers, whatever it is renewed with."""
        return max(self.horizon, self.longest)


@dataclass(frozen=True)
class Limits:
    """The highest accepted uncertainty by depth: ``values[d]`` after ``d + 1`` calls, the last one beyond them.

    They are calibrated on recorded episodes: the model replays recorded actions from recorded initial states, and at
    every depth (number of calls) the limit is a quantile of the uncertainties it had.  So a known share of rollouts
    like the recorded ones is truncated at each depth, and more of those that differ from them.
    """

    values: tuple[float, ...]

    @classmethod
    def calibrate(cls, uncertainties: Sequence[np.ndarray], quantile: float = 0.95) -> Limits:
        """From the uncertainties [N_d] of held-out replays at every depth.

        The limit is the smallest uncertainty that at least ``quantile`` of them do not exceed, corrected for their
        number (split conformal: rank ceil((n + 1) q)); with too few of them, or a quantile of 1, it is infinite.

        Raises UserError for a depth without replays and for a quantile outside (0, 1].
        """
        if not len(uncertainties) or not all(len(part) for part in uncertainties):
            raise UserError(
                "a depth has no uncertainties to calibrate on, so no limit could be set; hold more episodes out."
            )
        if not 0.0 < quantile <= 1.0:
            raise UserError(f"a quantile of {quantile} leaves no limit; choose one above 0, up to 1.")
        return cls(tuple(_conformal(np.sort(np.asarray(part, float)), quantile) for part in uncertainties))

    def warn_beyond(self, horizon: int, frames: int) -> None:
        """A UserWarning when rollouts of ``horizon`` control steps, ``frames`` in a call, go deeper than calibrated."""
        calibrated = len(self.values) * frames
        if calibrated < horizon:
            warnings.warn(
                f"a horizon of {horizon} control steps is beyond the {calibrated} that the limits of uncertainty were "
                "calibrated for, so beyond that the error of imagined rollouts is unknown and the last limit stands "
                f"for all deeper calls; take a horizon of at most {calibrated}, or calibrate on longer held-out "
                "episodes.",
                UserWarning,
                stacklevel=3,
            )

    def at(self, depth: np.ndarray) -> np.ndarray:
        """The limit [R] of calls at ``depth`` int [R], counted from 0."""
        return np.asarray(self.values)[np.minimum(depth, len(self.values) - 1)]


def _conformal(uncertainties: np.ndarray, quantile: float) -> float:
    rank = int(np.ceil((len(uncertainties) + 1) * quantile))
    return float(uncertainties[rank - 1]) if rank <= len(uncertainties) else float("inf")
