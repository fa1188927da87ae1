"""Recorded actions replayed in a world model: predictions for calibration and for comparison with the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_rl.contract.env import on_host
from world_models.config import ImaginationConfig, Limits
from world_models.env import ImaginedEnv
from world_models.initial_states import InitialStates, OrderedPool
from world_models.model import WorldModel


@dataclass(frozen=True)
class ReplayResult:
    """Predictions of ``N`` replays after each of up to ``K`` calls and after the last action; NaN or 0 beyond it.

    step         int64 [N,K]        control steps by then; 0 beyond the last action
    success      float32 [N,K]      probability that the task is done, the highest at which a rollout looks in the call
    uncertainty  float32 [N,K]
    pictures     uint8 [N,K,C,h,w]  of the model's size
    state        float32 [N,K,S]
    earned       float32 [N,K]      what each call earns, as ``config.reward`` has it; NaN beyond the last action
    """

    step: np.ndarray
    success: np.ndarray
    uncertainty: np.ndarray
    pictures: np.ndarray
    state: np.ndarray
    earned: np.ndarray

    def success_step(self, threshold: float) -> np.ndarray:
        """float [N]: the first control step, from 1, whose success probability reaches ``threshold``; inf for never."""
        won = (self.step > 0) & (self.success >= threshold)
        first = self.step[np.arange(len(won)), won.argmax(1)].astype(float)
        return np.where(won.any(1), first, np.inf)

    def within(self, limits: Limits) -> ReplayResult:
        """As rollouts under ``limits`` are: after the first call that exceeds its limit there is no success."""
        exceeded = self.uncertainty > limits.at(np.arange(self.uncertainty.shape[1]))
        return replace(self, success=np.where(np.logical_or.accumulate(exceeded, 1), np.nan, self.success))

    def by_depth(self) -> list[np.ndarray]:
        """The uncertainties at every depth that at least one replay reaches."""
        columns = [self.uncertainty[self.step[:, k] > 0, k] for k in range(self.step.shape[1])]
        return [column for column in columns if len(column)]


def replay(
    model: WorldModel,
    initial_states: InitialStates,
    actions: Sequence[np.ndarray],
    config: ImaginationConfig,
    progress: Callable[[int], None] = lambda done: None,
) -> ReplayResult:
    """Predict ``actions`` [T_i,D] from ``initial_states`` [N] to their end, whatever is predicted on the way.

    ``progress(replays)`` is called after each batch.
    """
    frames, length = model.config.frames, np.array([len(item) for item in actions])
    count, calls = len(actions), -(-int(length.max()) // frames)
    success, uncertainty, earned = np.full((3, count, calls), np.nan, np.float32)
    pictures = np.zeros((count, calls, *model.picture), np.uint8)
    state = np.zeros((count, calls, model.spec.state.shape[0]), np.float32)
    step = np.zeros((count, calls), np.int64)
    result = ReplayResult(step, success, uncertainty, pictures, state, earned)
    endless = endless_rollouts(config, int(length.max()))
    for number, batch in enumerate(_batches(length, frames, config.batch_size), 1):
        env = ImaginedEnv(model, OrderedPool(initial_states), len(batch), None, endless)
        _replay_batch(env, [actions[i] for i in batch], batch, result)
        progress(min(number * config.batch_size, count))
    return result


def endless_rollouts(config: ImaginationConfig, horizon: int) -> ImaginationConfig:
    """``config`` for rollouts of ``horizon`` control steps that neither success nor failure ends."""
    never = 2.0  # above all probabilities
    without = replace(config, deadline=None, success_threshold=never, failure_threshold=never, resamples=0)
    return replace(without, horizon=horizon, mid_call_steps=0)  # outcomes are read wherever a replay ends


def _batches(length: np.ndarray, frames: int, size: int) -> Iterator[np.ndarray]:
    """Batches of replays that end at the same offset in a call, where the others need not be predicted."""
    for offset in range(frames):
        same = np.flatnonzero(length % frames == offset)
        yield from (same[i : i + size] for i in range(0, len(same), size))


def _replay_batch(env: ImaginedEnv, actions: Sequence[np.ndarray], batch: np.ndarray, result: ReplayResult) -> None:
    """Environment ``i`` plays replay ``batch[i]``."""
    frames, env_ids = env.model.config.frames, np.arange(len(batch))
    length = np.array([len(item) for item in actions])
    padded = np.zeros((len(batch), int(length.max()), env.spec.action_dim), np.float32)
    for i, item in enumerate(actions):
        padded[i, : len(item)] = item
    env.reset(env_ids, batch)
    offset = int(length[0]) % frames
    every, success = env.config.outcome_every or frames, np.zeros(len(batch), np.float32)
    looks = [stop % frames % every == 0 for stop in range(int(length.max()) + 1)]
    stops = [stop for stop in range(1, len(looks)) if looks[stop] or stop % frames == offset]
    for first, stop in zip([0, *stops[:-1]], stops, strict=True):
        obs = env.step(padded[:, first:stop]).obs
        inside = success if first % frames else np.zeros_like(success)
        success = np.maximum(inside, env.outcome[:, 0]) if looks[stop] else inside
        kept = env_ids[(length >= stop) & ((stop % frames == 0) | (length == stop))]
        cell = batch[kept], (stop - 1) // frames
        result.step[cell], result.uncertainty[cell] = stop, env.uncertainty[kept]
        result.state[cell] = on_host(obs.state)[kept]
        result.success[cell] = np.maximum(success, env.outcome[:, 0])[kept]
        result.pictures[cell], result.earned[cell] = on_host(env.pictures)[kept], env.earned[kept]
