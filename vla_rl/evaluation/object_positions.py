"""How well pictures are predicted: PSNR, and how far the named object is from where it truly is.

True positions come from a simulator that replays recorded episodes.  :class:`ObjectProbe` estimates them from pictures
without one: it is trained on frames with known positions and applied to imagined ones.  Report its error beside its own
on true frames that it was not trained on.  The baseline beside each number is a model that repeats the initial frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.agreement import check_horizons
from vla_rl.experience.collect import ExpertPolicy
from vla_rl.experience.driver import Driver

TARGET = "privileged/target"  # extra: centre of the object that the instruction names


def replayed_positions(env: VecEnv, seeds: Sequence[int], actions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Positions of the named object in recorded episodes: for each float32 [T+1,3] metres, the initial one first.

    The simulator replays each episode from its seed ``seeds[i]`` and executed actions ``actions[i]`` [T,D], so
    recordings need not contain privileged extras.  ``env`` needs no cameras.

    Raises UserError for an environment without ``privileged/target`` and for episodes without a seed, ContractError for
    an episode that ends before its last action, which was therefore recorded in another environment.
    """
    require_target(env)
    if len(seeds) and min(seeds) < 0:
        raise UserError(
            f"episode {int(np.argmin(seeds))} has no seed, so it cannot be replayed to obtain its object positions; "
            "leave it out, or record it in a simulator."
        )
    found: list[np.ndarray] = []
    for start in range(0, len(seeds), env.num_envs):
        part = slice(start, start + env.num_envs)
        found += _replayed(env, list(seeds[part]), actions[part])
    return found


def _replayed(env: VecEnv, seeds: list[int], actions: Sequence[np.ndarray]) -> list[np.ndarray]:
    num_envs, lengths = env.num_envs, np.array([len(item) for item in actions])
    padded = np.zeros((num_envs, int(lengths.max()), env.spec.action_dim), np.float32)
    for i, item in enumerate(actions):
        padded[i, : len(item)] = item
    starts = range(0, padded.shape[1], env.spec.max_chunk)
    chunks = iter([padded[:, first : first + env.spec.max_chunk] for first in starts])
    driver = Driver(env, ExpertPolicy(lambda obs: next(chunks)), None, observe="all")
    positions, valid = [driver.start(seeds).extras[TARGET]], []
    for step in (driver.step().step for _ in starts):
        positions += [frame.extras[TARGET] for frame in step.frames]
        valid.append(step.valid[: len(seeds)])
    executed = np.concatenate(valid, 1).sum(1)
    for seed, length, steps in zip(seeds, lengths, executed, strict=True):
        if steps < length:
            raise ContractError(
                f"the episode of seed {seed} ends after {steps} of its {length} actions when it is replayed, so its "
                f"object positions are unknown; replay it in the environment and with the options of its recording."
            )
    path = np.stack(positions, 1)
    return [path[i, : length + 1].copy() for i, length in enumerate(lengths)]


def require_target(env: VecEnv) -> None:
    """Raise UserError for an environment that does not report the position of the named object."""
    if TARGET not in env.spec.extras:
        raise UserError(
            f"environment {env.spec.name!r} has no {TARGET!r}, so object positions are unknown; use a simulator with "
            "that extra."
        )


_BATCH = 256  # pictures per forward pass
_SMOOTH_L1_BETA = 0.05  # in standard deviations: errors above it count linearly instead of squared


@dataclass(frozen=True)
class ProbeConfig:
    """Sizes of the network, for pictures of about 64 x 64."""

    width: int = 32
    stem: int = 16  # channels of the first layer, which the task modulates
    keypoints: int = 4  # attended positions in the picture
    hidden: int = 128


class ObjectProbe(nn.Module):
    """Estimates the position of the object that a task names, from one picture of all cameras.

    A small convolutional network.  The task scales and shifts its first layer, where colours are still separate (FiLM,
    Perez et al. 2017, arXiv 1709.07871).  The position follows from the features at a few keypoints and from the
    keypoints' coordinates (spatial softmax, Levine et al. 2016, arXiv 1504.00702).  ``training/probe.py`` trains it.
    """

    position_mean: Tensor
    position_std: Tensor

    def __init__(self, picture: tuple[int, int, int], tasks: int, positions: np.ndarray, config: ProbeConfig) -> None:
        """``picture`` (h, w, c); ``tasks``: their number; ``positions`` [N,3] metres: the training targets."""
        super().__init__()
        self.picture, self.tasks = tuple(picture), tasks
        width, stem, keypoints = config.width, config.stem, config.keypoints
        self.gate = nn.Embedding(tasks, 2 * stem)
        self.first = nn.Conv2d(picture[2], stem, 5, 2, 2)
        self.second = nn.Conv2d(stem, width, 3, 2, 1)
        self.third, self.fourth = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.attention = nn.Conv2d(width, keypoints, 1)
        size, hidden = keypoints * (width + 2), config.hidden
        self.head = nn.Sequential(nn.Linear(size, hidden), nn.SiLU(), nn.Linear(hidden, 3))
        self.register_buffer("position_mean", torch.as_tensor(positions.mean(0), dtype=torch.float32))
        # One value for all axes, so that a millimetre has the same weight in each.
        self.register_buffer("position_std", torch.tensor(max(float(positions.std(0).max()), 1e-3)))

    def forward(self, pictures: Tensor, tasks: Tensor) -> Tensor:
        """Positions [B,3] in metres, from ``pictures`` uint8 [B,h,w,c] and ``tasks`` int64 [B]."""
        scale, shift = self.gate(tasks)[..., None, None].chunk(2, 1)
        pixels = pictures.permute(0, 3, 1, 2).to(scale.dtype) / 127.5 - 1.0
        features = functional.silu(self.first(pixels) * (1 + scale) + shift)
        features = functional.silu(self.second(features))
        features = functional.silu(self.fourth(features + functional.silu(self.third(features))))
        weight = self.attention(features).flatten(2).softmax(-1)
        sides = features.shape[2:]
        y, x = (torch.linspace(-1, 1, side, device=features.device, dtype=features.dtype) for side in sides)
        keypoints = weight @ torch.cartesian_prod(y, x).flip(-1)
        pooled = torch.cat([weight @ features.flatten(2).transpose(1, 2), 3.0 * keypoints], -1).flatten(1)
        return self.position_mean + self.position_std * self.head(pooled)

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Smooth L1 (Girshick 2015, arXiv 1504.08083) of the positions, in units of ``position_std``.

        A squared error would be dominated by the few pictures in which the gripper occludes the object.  ``batch``:
        ``pictures``, ``tasks`` and ``positions`` [B,3]; ``info["error_mm"]`` is the mean distance.
        """
        error = self(batch["pictures"], batch["tasks"]) - batch["positions"]
        loss = functional.smooth_l1_loss(error / self.position_std, torch.zeros_like(error), beta=_SMOOTH_L1_BETA)
        return loss, {"error_mm": 1e3 * float(error.detach().norm(dim=-1).mean())}

    @torch.no_grad()
    def locate(self, pictures: np.ndarray, tasks: np.ndarray) -> np.ndarray:
        """Positions float32 [N,3] in metres, of any number of ``pictures`` uint8 [N,h,w,c] with ``tasks`` [N].

        It also gives an estimate when the object is not visible.  Raises ContractError for pictures or tasks that do
        not fit the probe.
        """
        check(pictures, tasks, self.picture, self.tasks)
        images, named = torch.from_numpy(np.ascontiguousarray(pictures)), torch.as_tensor(np.asarray(tasks, np.int64))
        device = self.position_mean.device
        parts = zip(images.split(_BATCH), named.split(_BATCH), strict=True)
        found = [self(*(item.to(device) for item in part)).float().cpu() for part in parts]
        return torch.cat([*found, torch.empty(0, 3)]).numpy()


def check(pictures: np.ndarray, tasks: np.ndarray, picture: tuple[int, ...], count: int) -> None:
    """Raise ContractError unless ``pictures`` are uint8 [N,h,w,c] as ``picture`` and ``tasks`` [N] below ``count``."""
    fits = pictures.dtype == np.uint8 and pictures.shape[1:] == tuple(picture) and pictures.ndim == 4
    if not fits or np.shape(tasks) != pictures.shape[:1]:
        raise ContractError(
            f"pictures {pictures.dtype} {list(pictures.shape)} with tasks {list(np.shape(tasks))} do not fit the "
            f"probe, so it cannot locate anything; give uint8 [N, {', '.join(map(str, picture))}] and [N]."
        )
    if len(tasks) and not 0 <= np.min(tasks) <= np.max(tasks) < count:
        raise ContractError(
            f"tasks {np.min(tasks)} to {np.max(tasks)} are not among the probe's {count}, so it cannot "
            "locate their objects; train one on these tasks."
        )


@dataclass(frozen=True)
class FrameAgreement:
    """PSNR in dB of the frames after ``horizon`` control steps, over the ``replays`` of at least that length.

    ``copied`` is the PSNR of a model that repeats the initial frame: a static background alone makes it high.
    """

    horizon: int
    replays: int
    psnr: float
    copied: float


def frame_agreement(
    imagined: NDArray[np.uint8],
    true: NDArray[np.uint8],
    first: NDArray[np.uint8],
    length: ArrayLike,
    horizons: Sequence[int],
) -> tuple[FrameAgreement, ...]:
    """PSNR of imagined frames, and of the copied initial frame, at each of ``horizons``.

    ``imagined`` and ``true`` uint8 [n,T,h,w,c] are the frames after each control step, ``first`` uint8 [n,h,w,c] the
    initial frame of both, ``length`` [n] the numbers of control steps that have a frame in both.

    Raises ContractError for other shapes or dtypes and for a horizon that no replay reaches.
    """
    checked, steps = _check_frames((imagined, true, first), length, horizons)
    results = []
    for horizon in checked:
        index = np.flatnonzero(steps >= horizon)
        frames = true[index, horizon - 1]
        both = psnr(imagined[index, horizon - 1], frames), psnr(first[index], frames)
        results.append(FrameAgreement(horizon, index.size, *both))
    return tuple(results)


def psnr(frames: NDArray[np.uint8], true: NDArray[np.uint8]) -> float:
    """``10 log10(255^2 / MSE)`` in dB of uint8 frames of one shape, with the MSE averaged over all frames.

    (A mean of dB over frames would be infinite with one identical frame, which copies of the first often are.)
    Identical arrays count as if one value differed by one level, the smallest possible error, so that dB stay finite.
    """
    squares = int(np.square(frames.astype(np.int32) - true.astype(np.int32)).sum(dtype=np.int64))
    return 10.0 * math.log10(255.0**2 * true.size / max(squares, 1))


@dataclass(frozen=True)
class Millimetres:
    """Median and 90th percentile (with linear interpolation) of distances in millimetres."""

    median: float
    p90: float


@dataclass(frozen=True)
class ObjectAgreement:
    """Position error of the named object after ``horizon`` control steps, over ``replays``.

    ``imagined``: located in imagined frames.  ``copied``: located in the initial frame (a model that repeats it).
    ``probe``: located in true frames, the probe's own error and so the smallest error that can be measured; None when
    true positions are unknown and the probe's estimate in the true frames replaces them.
    """

    horizon: int
    replays: int
    imagined: Millimetres
    copied: Millimetres
    probe: Millimetres | None


def object_error(
    probe: ObjectProbe,
    imagined: NDArray[np.uint8],
    true: NDArray[np.uint8],
    first: NDArray[np.uint8],
    tasks: ArrayLike,
    length: ArrayLike,
    horizons: Sequence[int],
    positions: NDArray[np.floating] | None = None,
) -> tuple[ObjectAgreement, ...]:
    """Position error of the named object at each of ``horizons``; frames as in :func:`frame_agreement`.

    ``tasks`` int [n] of the replays; ``positions`` [n,T,3] in metres, the object's true positions after each control
    step (``object_positions.replayed_positions``; ignored beyond ``length``).  The probe must not have been trained on
    these replays, or its error is underestimated.

    Raises ContractError as :func:`frame_agreement` does, and for tasks or positions of other shapes or not finite.
    """
    checked, steps = _check_frames((imagined, true, first), length, horizons)
    named = np.asarray(tasks, np.int64)
    played = np.arange(true.shape[1]) < steps[:, None]
    known = positions is None or (positions.shape == (*true.shape[:2], 3) and np.isfinite(positions[played]).all())
    if named.shape != steps.shape or not known:
        given = None if positions is None else list(positions.shape)
        raise ContractError(
            f"tasks {list(named.shape)} and positions {given} do not give the objects' positions in {steps.size} "
            "replays, so no error can be computed; give [n], and finite metres [n,T,3] or None."
        )
    located_first = probe.locate(first, named)
    results = []
    for horizon in checked:
        long_enough = np.flatnonzero(steps >= horizon)
        shown = (frames[long_enough, horizon - 1] for frames in (imagined, true))
        located_imagined, located_true = (probe.locate(frames, named[long_enough]) for frames in shown)
        place = located_true if positions is None else positions[long_enough, horizon - 1]
        own = None if positions is None else _distances(located_true, place)
        errors = _distances(located_imagined, place), _distances(located_first[long_enough], place)
        results.append(ObjectAgreement(horizon, long_enough.size, *errors, own))
    return tuple(results)


def _distances(located: NDArray[np.floating], place: NDArray[np.floating]) -> Millimetres:
    distances = 1e3 * np.linalg.norm(located.astype(np.float64) - place, axis=-1)
    return Millimetres(float(np.median(distances)), float(np.percentile(distances, 90)))


def _check_frames(
    frames: tuple[NDArray[np.uint8], ...], length: ArrayLike, horizons: Sequence[int]
) -> tuple[list[int], NDArray[np.int64]]:
    """``horizons`` and ``length``, checked against imagined, true and first frames; ContractError for a mismatch."""
    checked, steps = check_horizons(horizons, length)
    imagined, true, first = frames
    same_shape = imagined.shape == true.shape and first.shape == true.shape[:1] + true.shape[2:]
    fits = true.ndim == 5 and steps.shape == true.shape[:1] and steps.max() <= true.shape[1]
    if not same_shape or not fits or any(item.dtype != np.uint8 for item in frames):
        given = ", ".join(f"{item.dtype} {list(item.shape)}" for item in frames)
        raise ContractError(
            f"imagined, true and first frames ({given}) of {steps.size} replays of up to {steps.max()} steps do "
            "not match in shape or dtype, so they cannot be compared; give uint8 [n,T,h,w,c] twice and [n,h,w,c]."
        )
    return checked, steps
