"""When an off-policy actor may move, and when it goes back: two remedies against the dip after its first steps.

- :class:`ReleaseConfig`: the actor moves only while the critics rank the outcomes of episodes that they have not
  learnt from (see below), and is held again when they stop.
- :class:`FallbackConfig`: when the success of the latest exploring episodes lies below the base's, the actor's last
  good weights act again, for collecting too; the actor waits before it moves again.

"Base" is the policy that collects before the actor's first step: a residual's base, WSRL's offline policy.

Do the critics foresee outcomes?  Prequential AUROC: of episodes that they have not learnt from.

Every decision is scored when it arrives, before it enters the replay buffer: by critics that know neither it nor how
its episode ends (Dawid 1984, prequential).  Two things would make any critic look good, and neither counts here:

- time: what still runs after most successes have ended mostly fails.  Only decisions at the same control step of their
  episodes are compared;
- what can be seen: a cube that is held will be up in a moment.  The last ``decided`` control steps of an episode are
  left out, of successes and failures alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from vla_rl.contract.batch import Rollout
from vla_rl.contract.config import check_limits
from vla_rl.contract.env import on_host


@dataclass(frozen=True)
class ReleaseConfig:
    """The actor moves while the critics foresee outcomes.  Raises UserError for limits without a meaning."""

    auroc: float = 0.7  # of the latest episodes; at this the actor is released
    hold: float = 0.6  # below this it is held again
    episodes: int = 128  # finished ones that are ranked
    least: int = 16  # successes and failures among them; with fewer nothing is decided
    decided: int = 10  # last control steps of an episode that are left out: its outcome can be seen

    def __post_init__(self) -> None:
        check_limits(self, auroc=(0, 1), hold=(0, self.auroc), episodes=(2, math.inf), least=(1, self.episodes / 2))
        check_limits(self, decided=(0, math.inf))


class Release:
    """Whether the actor may move: opens at ``auroc``, closes below ``hold``, and stays as it is in between."""

    def __init__(self, config: ReleaseConfig) -> None:
        self.config, self.open, self.share = config, False, 0.5
        self.recent: deque[Attempt] = deque(maxlen=config.episodes)

    def add(self, attempts: Sequence[Attempt]) -> None:
        """Rank the latest episodes, ``attempts`` among them."""
        if not attempts:
            return
        self.recent.extend(attempts)
        self.share, pairs = auroc(self.recent, self.config.decided)
        successes = sum(attempt.success for attempt in self.recent)
        if pairs and min(successes, len(self.recent) - successes) >= self.config.least:
            self.open = self.share >= (self.config.hold if self.open else self.config.auroc)

    def state_dict(self) -> dict[str, Any]:
        recent = [{**vars(one), "time": one.time.tolist(), "score": one.score.tolist()} for one in self.recent]
        return {"recent": recent, "open": self.open, "share": self.share}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent.clear()
        for one in state["recent"]:
            arrays = {"time": np.array(one["time"], int), "score": np.array(one["score"], np.float32)}
            self.recent.append(Attempt(**{**one, **arrays}))
        self.open, self.share = state["open"], state["share"]


@dataclass(frozen=True)
class FallbackConfig:
    """The actor goes back when exploring succeeds less often than the base.  Raises UserError for senseless counts.

    Episodes in which the base acted, before the actor's first step and beside it, say what the base is worth.
    """

    base_episodes: int = 64  # of the base, without which the actor does not move
    episodes: int = 64  # latest ones with the actor, whose success is compared
    least: int = 16  # of them; with fewer nothing is decided: two failures in a row are no news
    wait: int = 64  # episodes after a return before the actor moves again
    restore: bool = True  # return to good weights; False: to the blend's first share only, while the actor learns on
    margin: float = 0.0  # by which exploration noise may cost the actor success without its being worse than the base
    z: float = 1.64  # half-width of Wilson's interval of the latest success, in standard errors

    def __post_init__(self) -> None:
        check_limits(self, base_episodes=(1, math.inf), episodes=(1, math.inf), wait=(0, math.inf), z=(0, math.inf))
        check_limits(self, margin=(0, 1), least=(1, self.episodes))


class Fallback:
    """Compares the latest episodes of the actor with those of the base.

    The actor is ``level`` with the base while its latest success, give or take ``margin``, is not lower.  ``below``
    after :meth:`add` asks to return.  Weights are good when the ``episodes`` episodes that followed them were as
    successful (``passed``): those before them may have been of better ones.
    After a return nothing is compared for ``wait`` episodes, so that the actor does not swing to and fro.
    """

    def __init__(self, config: FallbackConfig) -> None:
        self.config = config
        self.base: list[int] = [0, 0]  # successes, episodes
        self.trial: list[int] = [0, 0]  # the same since the weights on trial
        self.latest: deque[bool] = deque(maxlen=config.episodes)
        self.moved = False  # whether the actor differs from the base
        self.waiting = 0
        self.below = self.just_returned = False

    @property
    def ready(self) -> bool:
        """Whether the base is known and a return long enough ago."""
        return self.base[1] >= self.config.base_episodes and not self.waiting

    @property
    def base_success(self) -> float:
        return self.base[0] / max(1, self.base[1])

    @property
    def level(self) -> bool:
        """Whether the actor's latest episodes, if they are enough to say so, succeed as often as the base's."""
        enough = len(self.latest) >= self.config.least
        return enough and sum(self.latest) / len(self.latest) >= self.base_success - self.config.margin

    @property
    def tried(self) -> bool:
        """Whether enough episodes followed the weights on trial."""
        return self.trial[1] >= self.config.episodes

    @property
    def passed(self) -> bool:
        """Whether they succeeded as often as the base."""
        return self.tried and self.trial[0] / self.trial[1] >= self.base_success - self.config.margin

    def add(self, attempts: Sequence[Attempt]) -> None:
        """Count ``attempts`` and decide."""
        self.just_returned = False
        for attempt in attempts:
            self.waiting = max(0, self.waiting - 1)
            counts = self.trial if self.moved and attempt.corrected else self.base
            counts[0] += attempt.success
            counts[1] += 1
            if counts is self.trial:
                self.latest.append(attempt.success)
        self.below = bool(attempts) and not self.waiting and self._lower()

    def _lower(self) -> bool:
        """Whether Wilson's interval of the latest success, uncorrected, lies below the base's less ``margin``."""
        n, level = len(self.latest), max(0.0, self.base_success - self.config.margin)
        if n < self.config.least:
            return False
        return level - sum(self.latest) / n > self.config.z * math.sqrt(level * (1.0 - level) / n)

    def returned(self, moved: bool, wait: int) -> None:
        """Good weights act again, or the base (not ``moved``), or the actor in few episodes."""
        self.moved, self.below, self.just_returned = moved, False, True
        self.waiting = wait
        self.latest.clear()
        self.trial = [0, 0]

    def state_dict(self) -> dict[str, Any]:
        counters = [self.moved, self.waiting]
        return {"base": self.base, "trial": self.trial, "latest": list(self.latest), "counters": counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base, self.trial = list(state["base"]), list(state["trial"])
        self.latest = deque((bool(success) for success in state["latest"]), maxlen=self.config.episodes)
        self.moved, self.waiting = state["counters"]


@dataclass(frozen=True)
class Kept:
    """Copies of an actor's weights, and for how many decisions it had been released."""

    weights: Mapping[str, Tensor]
    released: int

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], released: int) -> Kept:
        return cls({name: item.detach().clone() for name, item in weights.items()}, released)

    def to_state(self) -> dict[str, Any]:
        return {"weights": dict(self.weights), "released": self.released}


class Guard:
    """Both remedies of one learner, and since when its actor has been free."""

    def __init__(self, release: ReleaseConfig | None, fallback: FallbackConfig | None) -> None:
        self.release = Release(release) if release else None
        self.fallback = Fallback(fallback) if fallback else None
        self.attempts = Attempts()
        self.kept: dict[str, Kept] = {}  # "base", "trial" and, unless they acted since the last return, "good"
        # Decisions with a moving actor; beside a fallback, those with one that succeeds as often as the base.
        self.released, self.moved = 0, False

    @property
    def watching(self) -> bool:
        return self.release is not None or self.fallback is not None

    @property
    def free(self) -> bool:
        """Whether the actor may move."""
        return (self.release is None or self.release.open) and (self.fallback is None or self.fallback.ready)

    def moves(self) -> None:
        self.moved = True
        if self.fallback:
            self.fallback.moved = True

    def add(self, rollout: Rollout, score: Tensor, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Look at ``rollout``, whose decisions the critics give ``score`` [T,E], played with the actor's ``weights``.

        Returns the weights that the actor must return to, if it must: the good ones, or the base's when the good ones
        were returned to last time, and nothing better has come of them.
        """
        attempts = self.attempts.add(rollout, score) if self.watching else []
        if self.release:
            self.release.add(attempts)
        if self.fallback:
            self.fallback.add(attempts)
        if self.moved and self.free and (self.fallback is None or self.fallback.level):
            self.released += int(rollout.valid.any(-1).sum())
        return self._settle(self.fallback, weights) if self.fallback else None

    def _settle(self, fallback: Fallback, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Keep what is good, or the weights to return to; see :meth:`add`."""
        self.kept.setdefault("base", Kept.of(weights, 0))
        if fallback.below and fallback.config.restore:
            return self._return(fallback)
        if fallback.below and self.released:
            fallback.returned(True, 0)
            self.released = 0
        if fallback.passed:
            self.kept["good"] = self.kept["trial"]
        if fallback.tried or "trial" not in self.kept:
            self.kept["trial"], fallback.trial = Kept.of(weights, self.released), [0, 0]
        return None

    def _return(self, fallback: Fallback) -> Mapping[str, Tensor]:
        to_base = "good" not in self.kept
        kept = self.kept["base"] if to_base else self.kept.pop("good")
        fallback.returned(not to_base, fallback.config.wait)
        self.released, self.moved, self.kept["trial"] = kept.released, not to_base, kept
        return kept.weights

    def metrics(self) -> dict[str, float]:
        """What the remedies know and do; nothing without them."""
        found = {}
        if self.release:
            found["critic/auroc"] = self.release.share
        if self.fallback:
            found["rollout/base_success"] = self.fallback.base_success
            latest = self.fallback.latest
            if latest:
                found["rollout/actor_success"] = sum(latest) / len(latest)
            found["policy/returned"] = float(self.fallback.just_returned)
        return {**found, "policy/free": float(self.free), "policy/released": float(self.released)} if found else {}

    def state_dict(self) -> dict[str, Any]:
        state = {name: part.state_dict() for name, part in self._parts().items()}
        kept = {name: item.to_state() for name, item in self.kept.items()}
        return {**state, "kept": kept, "counters": [self.released, self.moved]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.kept = {name: Kept.of(item["weights"], item["released"]) for name, item in state["kept"].items()}
        self.released, self.moved = state["counters"]

    def _parts(self) -> dict[str, Any]:
        parts = {"release": self.release, "fallback": self.fallback, "attempts": self.attempts}
        return {name: part for name, part in parts.items() if part is not None}


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
            stream: [{"env": env, **asdict(one)} for env, one in running.items()]
            for stream, running in self._running.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running = {
            stream: {one["env"]: _Running(**{k: v for k, v in one.items() if k != "env"}) for one in running}
            for stream, running in state.items()
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
