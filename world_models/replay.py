"""Recorded actions dreamt from where they were recorded: what a dream is compared with the truth by, and calibrated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_rl.contract.env import on_host
from world_models.env import DreamConfig, ImaginedEnv
from world_models.initial_states import InOrder, Start
from world_models.model import WorldModel
from world_models.uncertainty import Limits


@dataclass(frozen=True)
class Replayed:
    """``N`` replays, seen after each of up to ``K`` calls and after the last action; NaN or 0 beyond it.

    step      int64 [N,K]        control steps by then; 0 beyond the last action
    sure      float32 [N,K]      probability that the task is done
    doubt     float32 [N,K]
    pictures  uint8 [N,K,C,h,w]
    state     float32 [N,K,S]
    """

    step: np.ndarray
    sure: np.ndarray
    doubt: np.ndarray
    pictures: np.ndarray
    state: np.ndarray

    def done_by(self, threshold: float) -> np.ndarray:
        """float [N]: the control step, from 1, with which a dream is first so sure of success; inf for never."""
        won = (self.step > 0) & (self.sure >= threshold)
        first = self.step[np.arange(len(won)), won.argmax(1)].astype(float)
        done: np.ndarray = np.where(won.any(1), first, np.inf)
        return done

    def within(self, limits: Limits) -> Replayed:
        """As dreams with ``limits`` are: none is sure of anything once it has doubted more than that."""
        beyond = self.doubt > limits.at(np.arange(self.doubt.shape[1]))
        return replace(self, sure=np.where(np.logical_or.accumulate(beyond, 1), np.nan, self.sure))

    def by_depth(self) -> list[np.ndarray]:
        """The doubts at every depth that at least one replay reaches."""
        columns = [self.doubt[self.step[:, k] > 0, k] for k in range(self.step.shape[1])]
        return [column for column in columns if len(column)]


def replay(
    model: WorldModel,
    starts: Start,
    actions: Sequence[np.ndarray],
    config: DreamConfig,
    report: Callable[[int], None] = lambda done: None,
) -> Replayed:
    """Dream ``actions`` [T_i,D] from ``starts`` [N] to their end: neither success, failure nor doubt stops a dream.

    ``report(replays)`` is called after each part.
    """
    frames, length = model.config.frames, np.array([len(item) for item in actions])
    count, calls = len(actions), -(-int(length.max()) // frames)
    found = Replayed(
        np.zeros((count, calls), np.int64),
        np.full((count, calls), np.nan, np.float32),
        np.full((count, calls), np.nan, np.float32),
        np.zeros((count, calls, *model.picture), np.uint8),
        np.zeros((count, calls, model.spec.state.shape[0]), np.float32),
    )
    endless = replace(config, horizon=int(length.max()), deadline=None, done=2.0, failed=2.0, again=0)
    for told, part in enumerate(_parts(length, frames, config.part), 1):
        env = ImaginedEnv(model, InOrder(starts), len(part), None, endless)
        _dream(env, [actions[i] for i in part], part, found)
        report(min(told * config.part, count))
    return found


def _parts(length: np.ndarray, frames: int, size: int) -> Iterator[np.ndarray]:
    """Replays that end at the same offset in a call belong together: all others need not be looked at there."""
    for offset in range(frames):
        same = np.flatnonzero(length % frames == offset)
        yield from (same[i : i + size] for i in range(0, len(same), size))


def _dream(env: ImaginedEnv, actions: Sequence[np.ndarray], part: np.ndarray, found: Replayed) -> None:
    """One part, row ``i`` being replay ``part[i]``."""
    frames, rows = env.model.config.frames, np.arange(len(part))
    length = np.array([len(item) for item in actions])
    padded = np.zeros((len(part), int(length.max()), env.spec.action_dim), np.float32)
    for row, item in enumerate(actions):
        padded[row, : len(item)] = item
    env.reset(rows, part)
    offset = int(length[0]) % frames
    stops = [stop for stop in range(1, int(length.max()) + 1) if stop % frames in (0, offset)]
    for first, stop in zip([0, *stops[:-1]], stops, strict=True):
        obs = env.step(padded[:, first:stop]).obs
        seen = rows[(length >= stop) & ((stop % frames == 0) | (length == stop))]
        at = part[seen], (stop - 1) // frames
        found.step[at], found.doubt[at], found.state[at] = stop, env.doubt[seen], on_host(obs.state)[seen]
        pictures = np.concatenate([on_host(obs.images[name])[seen] for name in env.model.cameras], -1)
        found.pictures[at] = np.moveaxis(pictures, -1, 1)
        found.sure[at] = env.outcome[seen, 0]
