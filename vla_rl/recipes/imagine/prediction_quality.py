"""Quality of predictions: PSNR and position of the named object, beside a copy of the first picture; and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from vla_rl.contract.env import VecEnv
from vla_rl.evaluation.frame_metrics import frame_agreement, object_error
from vla_rl.evaluation.object_positions import TARGET, replayed_positions
from vla_rl.evaluation.probe import ObjectProbe
from vla_rl.evaluation.reward_metrics import RewardAgreement, reward_agreement
from vla_rl.experience.trajectories import Trajectories
from vla_rl.recipes import world_models
from vla_rl.recipes.context import generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel
from vla_rl.recipes.imagine.replays import replay_trajectories
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import bar
from vla_rl.training.probe import FIT, fit_probe
from vla_rl.training.world_model import as_predicted

_PROBE_EPISODES = 400  # that the probe is trained on


def measure_prediction_quality(
    calibrated: CalibratedModel, env_config: EnvConfig, learnt: Trajectories, held_out: Trajectories, seed: int
) -> list[JsonObject]:
    """One row per horizon: PSNR in dB and, where the simulator tells object positions, errors in millimetres.

    Of a world model with a head for rewards, also how those of the call that ends there follow the recorded ones.

    The probe that finds the object is trained on ``learnt`` episodes, the predictions are of ``held_out`` ones.
    """
    frames = calibrated.model.config.frames
    found = replay_trajectories(calibrated.model, held_out, _paid(calibrated))
    spans = held_out.spans()
    calls = np.array([(end - begin - 1) // frames for begin, end in spans])
    kept = np.flatnonzero(calls)
    imagined = np.moveaxis(found.pictures, 2, -1)[kept]
    pictures = _side_by_side(as_predicted(calibrated.model, held_out))
    true = np.zeros_like(imagined)
    for row, i in enumerate(kept):
        true[row, : calls[i]] = pictures[spans[i][0] + frames * np.arange(1, calls[i] + 1)]
    first = pictures[[spans[i][0] for i in kept]]
    depths = range(1, int(calls.max()) + 1)
    rows = [asdict(one) for one in frame_agreement(imagined, true, first, calls[kept], depths)]
    if calibrated.model.reward is not None:
        agreed = {one.horizon: asdict(one) for one in rewards_of_calls(found, held_out, frames, depths)}
        rows = [row | {"reward": agreed.get(row["horizon"])} for row in rows]
    if TARGET in env_config.spec().extras:
        env = env_config.make(32, **{**env_config.training_options, "render": False})
        probe = _probe(env, as_predicted(calibrated.model, learnt), seed)
        positions = np.zeros((*true.shape[:2], 3), np.float32)
        for row, (i, where) in enumerate(zip(kept, _positions(env, held_out.select(kept)), strict=True)):
            positions[row, : calls[i]] = where[frames : frames * calls[i] + 1 : frames]
        tasks = held_out.task[[spans[i][0] for i in kept]]
        errors = object_error(probe, imagined, true, first, tasks, calls[kept], depths, positions)
        rows = [row | {"object": asdict(error)} for row, error in zip(rows, errors, strict=True)]
        env.close()
    return [row | {"horizon": frames * row["horizon"]} for row in rows]


def _paid(calibrated: CalibratedModel) -> world_models.ImaginationConfig:
    """The calibrated imagination, in which a head for rewards says what calls earn."""
    paid = calibrated.imagination
    return paid if calibrated.model.reward is None else replace(paid, reward=world_models.predicted_reward())


def rewards_of_calls(
    found: world_models.ReplayResult, recorded: Trajectories, frames: int, depths: Sequence[int]
) -> tuple[RewardAgreement, ...]:
    """Agreement of the rewards of whole calls of ``frames`` control steps, at each of ``depths``."""
    sums, spans = np.full(found.earned.shape, np.nan, np.float32), recorded.spans()
    for row, (begin, end) in enumerate(spans):
        paid = recorded.reward[begin : end - 1]
        for k in range(len(paid) // frames):
            sums[row, k] = paid[k * frames : (k + 1) * frames].sum()
    calls = np.array([(end - begin - 1) // frames for begin, end in spans])
    return reward_agreement(found.earned, sums, calls, depths)


def _probe(env: VecEnv, learnt: Trajectories, seed: int) -> ObjectProbe:
    chosen = np.random.default_rng([seed, 36]).permutation(learnt.count)[:_PROBE_EPISODES]
    known = learnt.select([i for i in chosen if learnt.seed[learnt.spans()[i][0]] >= 0])
    positions = np.concatenate(_positions(env, known))
    torch.manual_seed(seed)  # module initialisation has no generator argument
    with bar("train the probe", FIT.steps) as update:
        return fit_probe(
            _side_by_side(known),
            known.task,
            positions,
            generator(seed, 37),
            report=lambda step, info: update(step + 1, "objects"),
        )


def _positions(env: VecEnv, trajectories: Trajectories) -> list[np.ndarray]:
    spans = trajectories.spans()
    seeds = [int(trajectories.seed[begin]) for begin, _ in spans]
    return replayed_positions(env, seeds, [trajectories.action[begin : end - 1] for begin, end in spans])


def _side_by_side(trajectories: Trajectories) -> np.ndarray:
    """uint8 [M,h,w,c], cameras in the order of their names."""
    return np.concatenate([trajectories.images[name] for name in sorted(trajectories.images)], -1)
