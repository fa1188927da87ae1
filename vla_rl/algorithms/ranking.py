"""Do the critics foresee outcomes?  Prequential AUROC: of episodes that they have not learnt from.

Every decision is scored when it arrives, before it enters the replay buffer: by critics that know neither it nor how
its episode ends (Dawid 1984, prequential).  Two things would make any critic look good, and neither counts here:

- time: what still runs after most successes have ended mostly fails.  Only decisions at the same control step of their
  episodes are compared;
- what can be seen: a cube that is held will be up in a moment.  The last ``decided`` control steps of an episode are
  left out, of successes and failures alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import on_host


@dataclass(frozen=True)
class Attempt:
    """An episode: the control step before each of its decisions (int [N]), their scores (float32 [N]), its outcome.

    ``steps`` counts its control steps; ``corrected`` is False where the policy let its base act alone throughout.
    """

    time: np.ndarray
    score: np.ndarray
    steps: int
    success: bool
    corrected: bool


@dataclass
class _Running:
    seed: int
    time: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    steps: int = 0
    corrected: bool = False

    def to_state(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "time": torch.tensor(self.time, dtype=torch.long),
            "score": torch.tensor(self.score, dtype=torch.float32),
            "steps": self.steps,
            "corrected": self.corrected,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Running:
        time, score = on_host(state["time"]).tolist(), on_host(state["score"]).tolist()
        return cls(state["seed"], time, score, state["steps"], state["corrected"])


class Attempts:
    """Assembles rollouts, whose windows may cut episodes anywhere, into whole attempts."""

    def __init__(self) -> None:
        self._running: dict[str, dict[int, _Running]] = {}  # by stream and environment

    def add(self, rollout: Rollout, score: Tensor) -> list[Attempt]:
        """The episodes that end in ``rollout``, whose decisions have the scores [T,E], in the order of time.

        An episode that was broken off, or that ended with a decision without valid actions (a simulator's breakdown),
        has no outcome and is left out.
        """
        running, found = self._running.setdefault(rollout.stream, {}), []
        count, seeds, scores = (on_host(item) for item in (rollout.valid.sum(-1), rollout.seeds, score))
        ended, success = on_host(rollout.terminated | rollout.truncated), on_host(rollout.success)
        corrected = on_host(rollout.aux["corrected"]) if "corrected" in rollout.aux else np.ones(ended.shape, bool)
        for t, e in np.ndindex(ended.shape):
            if not count[t, e]:
                if ended[t, e]:
                    running.pop(e, None)
                continue
            if e not in running or running[e].seed != seeds[t, e]:
                running[e] = _Running(int(seeds[t, e]))
            one = running[e]
            one.time.append(one.steps)
            one.score.append(float(scores[t, e]))
            one.steps += int(count[t, e])
            one.corrected |= bool(corrected[t, e])
            if ended[t, e]:
                time, values = np.array(one.time), np.array(one.score, np.float32)
                found.append(Attempt(time, values, one.steps, bool(success[t, e]), one.corrected))
                del running[e]
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            stream: [{"env": env, **one.to_state()} for env, one in running.items()]
            for stream, running in self._running.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running = {
            stream: {one["env"]: _Running.from_state(one) for one in running} for stream, running in state.items()
        }


def auroc(attempts: Iterable[Attempt], decided: int) -> tuple[float, int]:
    """The share of pairs (a success, a failure) at the same control step in which the success has the higher score.

    Ties count one half.  Returns the share and the number of pairs; without pairs the share is 1/2: nothing is known.
    """
    scores: dict[int, tuple[list[float], list[float]]] = {}
    for attempt in attempts:
        for time, score in zip(attempt.time.tolist(), attempt.score.tolist(), strict=True):
            if attempt.steps - time > decided:
                scores.setdefault(time, ([], []))[attempt.success].append(score)
    above, pairs = 0.0, 0
    for failures, successes in scores.values():
        difference = np.array(successes)[:, None] - np.array(failures)[None]
        above += float((difference > 0).sum() + 0.5 * (difference == 0).sum())
        pairs += difference.size
    return (above / pairs if pairs else 0.5), pairs


class RecentAttempts:
    """The last ``size`` attempts, and how well their scores rank them."""

    def __init__(self, size: int) -> None:
        self.attempts: deque[Attempt] = deque(maxlen=size)

    def auroc(self, decided: int) -> tuple[float, int]:
        """See :func:`auroc`."""
        return auroc(self.attempts, decided)

    def outcomes(self) -> tuple[int, int]:
        """Successes and failures."""
        good = sum(attempt.success for attempt in self.attempts)
        return good, len(self.attempts) - good

    def state_dict(self) -> dict[str, Any]:
        def joined(name: str, dtype: torch.dtype) -> Tensor:
            parts = [torch.as_tensor(getattr(attempt, name), dtype=dtype) for attempt in self.attempts]
            return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)

        return {
            "time": joined("time", torch.long),
            "score": joined("score", torch.float32),
            "attempts": [[len(a.time), a.steps, a.success, a.corrected] for a in self.attempts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        time, score, begin = on_host(state["time"]), on_host(state["score"]), 0
        self.attempts.clear()
        for length, steps, success, corrected in state["attempts"]:
            part = slice(begin, begin + length)
            self.attempts.append(Attempt(time[part].copy(), score[part].copy(), steps, bool(success), bool(corrected)))
            begin += length
