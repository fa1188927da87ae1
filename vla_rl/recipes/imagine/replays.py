"""Recorded episodes in the world model: replays of their actions, and where imagined rollouts begin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vla_rl.experience.demonstrations import Trajectories, context_at
from vla_rl.recipes import world_models
from vla_rl.recipes.context import generator
from vla_rl.recipes.progress import bar
from vla_rl.training.world_model import as_predicted

_BATCH = 64  # moments whose value is predicted together


def replay_trajectories(
    model: world_models.WorldModel, trajectories: Trajectories, config: world_models.ImaginationConfig
) -> world_models.ReplayResult:
    """Replay every one of ``trajectories`` from its first moment to its last action.

    Once for each noise that an imagined success must hold under (``config.resamples``); the success probability is the
    smallest of them, everything else that of the first noise.
    """
    spans = trajectories.spans()
    moments = recorded_moments(model, trajectories, np.array([begin for begin, _ in spans]))
    actions = [trajectories.action[begin : end - 1] for begin, end in spans]
    times, found = 1 + config.resamples, []
    with bar("replay", times * len(spans)) as update:
        for resample in range(times):
            noisy, before = replace(config, noise_seed=config.noise_seed + resample), resample * len(spans)

            def progress(done: int, before: int = before) -> None:
                update(before + done, "episodes")

            found.append(world_models.replay(model, moments, actions, noisy, progress))
    return replace(found[0], success=np.min([one.success for one in found], 0))


def success_probability(model: world_models.WorldModel, trajectories: Trajectories) -> np.ndarray:
    """float [M]: the model's probability of success in the end, at every moment of ``trajectories``.

    Predicted at the ends of calls along the recorded actions, and interpolated between.
    """
    trajectories = as_predicted(model, trajectories)
    config, frames, spans = model.config, model.config.frames, trajectories.spans()
    starts = [(m, end) for begin, end in spans for m in range(begin, end - 1, frames)]
    moments = np.array([m for m, _ in starts])
    known = np.array([min(frames, end - 1 - m) for m, end in starts])
    context = context_at(trajectories, moments, frames, config.context_frames)
    ahead = np.minimum(moments[:, None] + np.arange(frames), (moments + known - 1)[:, None])
    noise_source, predicted = generator(0, 32), []
    with bar("value", len(moments)) as update:
        for first in range(0, len(moments), _BATCH):
            part = slice(first, first + _BATCH)
            given = {name: context[name][part] for name in ("pictures", "state", "task")}
            batch = {name: torch.from_numpy(item).to(model.device) for name, item in given.items()}
            noise = torch.randn(len(moments[part]), config.pictures, *model.video.latent, generator=noise_source)
            inputs = (torch.from_numpy(trajectories.action[ahead[part]]), torch.from_numpy(known[part]), noise)
            actions, counts, noise = (item.to(model.device) for item in inputs)
            future = model.predict(world_models.context_class()(**batch), actions, counts, noise)
            predicted.append(future.outcome[:, 2].cpu().numpy())
            update(min(first + _BATCH, len(moments)), "moments")
    value, at_ends, ends = np.zeros(len(trajectories.state)), np.concatenate(predicted), moments + known
    for begin, end in spans:
        inside = (ends > begin) & (ends < end)
        value[begin:end] = np.interp(np.arange(begin, end), ends[inside], at_ends[inside])
    return value


def mine_initial_states(
    model: world_models.WorldModel,
    trajectories: Trajectories,
    value: np.ndarray,
    keyframes: world_models.KeyframeConfig,
) -> world_models.InitialStatePool:
    """First moments of ``trajectories``, and keyframes mined with ``value`` [M]."""
    spans, spec = trajectories.spans(), model.spec
    action_range = np.subtract(spec.action.high, spec.action.low) * np.ones(spec.action_dim)
    found = world_models.mine_keyframes(
        trajectories.action, action_range, value, trajectories.success, spans, keyframes
    )
    first = np.array([begin for begin, _ in spans])
    return world_models.initial_state_pool(
        recorded_moments(model, trajectories, first), recorded_moments(model, trajectories, found.all)
    )


def first_initial_states(model: world_models.WorldModel, trajectories: Trajectories) -> world_models.InitialStatePool:
    """First moments of ``trajectories``, and no keyframe."""
    first = np.array([begin for begin, _ in trajectories.spans()])
    return world_models.initial_state_pool(
        recorded_moments(model, trajectories, first), recorded_moments(model, trajectories, first[:0])
    )


def recorded_initial_states(model: world_models.WorldModel, trajectories: Trajectories) -> world_models.OrderedPool:
    """The first moments of ``trajectories`` in their order: seed ``i`` begins in episode ``i``."""
    first = np.array([begin for begin, _ in trajectories.spans()])
    return world_models.ordered_pool(recorded_moments(model, trajectories, first))


def recorded_moments(
    model: world_models.WorldModel, trajectories: Trajectories, moments: np.ndarray
) -> world_models.InitialStates:
    """Context frames, states and tasks at ``moments`` int [N]."""
    config, seen = model.config, as_predicted(model, trajectories)
    return world_models.initial_states(**context_at(seen, moments, config.frames, config.context_frames))
