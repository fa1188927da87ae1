"""Which policy version which robot runs, as a pure function of what was done: staged, canary, active, retired."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from vla_rl.contract.errors import ContractError
from vla_rl.contract.intervals import poisson_rate, wilson

EVERY_ROBOT = "*"  # in a pin
STAGED, CANARY, ACTIVE, RETIRED, REMOVED = "staged", "canary", "active", "retired", "removed"


class MissingError(ContractError):
    """A version, or a part of one, that the registry does not have."""


@dataclass(frozen=True)
class Releases:
    """The state after ``head`` changes; a rollback is one more of them, so no number is ever used again.

    stages         of every version that was published
    canary_robots  that try the canary
    before         versions that were active before this one and were not rolled back, oldest first
    pins           version by robot, or by ``EVERY_ROBOT``
    """

    head: int = 0
    stages: Mapping[int, str] = field(default_factory=dict)
    active: int | None = None
    canary: int | None = None
    canary_robots: frozenset[str] = frozenset()
    before: tuple[int, ...] = ()
    pins: Mapping[str, int] = field(default_factory=dict)

    def version_for(self, robot: str) -> int | None:
        """What ``robot`` runs from its next episode on: its pin, else everybody's pin, else canary or active."""
        for pinned in (robot, EVERY_ROBOT):
            if pinned in self.pins:
                return self.pins[pinned]
        return self.canary if robot in self.canary_robots else self.active

    def in_use(self) -> frozenset[int]:
        """Versions that a robot runs, or that a rollback leads to."""
        used = {self.active, self.canary, *self.before[-1:], *self.pins.values()}
        return frozenset(version for version in used if version is not None)

    def check(self, version: int) -> None:
        """Raise MissingError unless robots can run ``version``."""
        if self.stages.get(version, REMOVED) == REMOVED:
            known = ", ".join(str(one) for one, stage in self.stages.items() if stage != REMOVED)
            raise MissingError(
                f"there is no policy version {version}, so robots keep what they run; choose of: {known or 'none'}."
            )

    def after(self, change: Mapping[str, Any]) -> Releases:
        """The state after ``change``, an entry of the registry's history, which was possible; raises ValueError."""
        return replace(self._changed(change), head=self.head + 1)

    def _changed(self, change: Mapping[str, Any]) -> Releases:
        match change:
            case {"do": "publish", "version": version}:
                return self._staged({version: STAGED})
            case {"do": "canary", "version": version, "robots": robots}:
                tried = self._without_canary()._staged({version: CANARY})
                return replace(tried, canary=version, canary_robots=frozenset(robots))
            case {"do": "promote", "version": version}:
                ended = self._without_canary()
                if self.active is not None:
                    ended = replace(ended._staged({self.active: RETIRED}), before=(*self.before, self.active))
                return replace(ended._staged({version: ACTIVE}), active=version)
            case {"do": "roll back"} if self.canary is not None:
                return self._without_canary()
            case {"do": "roll back"}:  # the active version gives way to the one before it
                *before, last = self.before
                retired = {} if self.active is None else {self.active: RETIRED}
                return replace(self._staged({**retired, last: ACTIVE}), active=last, before=tuple(before))
            case {"do": "pin", "robot": robot, "version": version}:
                return replace(self, pins={**self.pins, robot: version})
            case {"do": "unpin", "robot": unpinned}:
                return replace(self, pins={robot: at for robot, at in self.pins.items() if robot != unpinned})
            case {"do": "remove", "versions": versions}:
                left = tuple(version for version in self.before if version not in versions)
                return replace(self._staged(dict.fromkeys(versions, REMOVED)), before=left)
        raise ValueError(f"{str(change)[:200]} is no change")

    def _without_canary(self) -> Releases:
        stages = {self.canary: RETIRED} if self.canary is not None else {}
        return replace(self._staged(stages), canary=None, canary_robots=frozenset())

    def _staged(self, stages: Mapping[int, str]) -> Releases:
        return replace(self, stages={**self.stages, **stages})


@dataclass(frozen=True)
class Outcomes:
    """Finished episodes of one policy version; ``seconds`` is robot time.

    ``successes`` are those in which nobody intervened; ``interventions`` and ``clips`` are episodes with any.
    """

    episodes: int = 0
    successes: int = 0
    seconds: float = 0.0
    interventions: int = 0
    clips: int = 0

    def __add__(self, other: Outcomes) -> Outcomes:
        return Outcomes(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class CanaryRule:
    """When a canary is taken back.

    share         of the robots that try a new policy, at least one of them
    min_episodes  of the canary, and of the policy in use, before the two are compared

    They are compared after every episode, so the interval's 5 % do not hold for the whole trial.  Simulated with 200
    episodes of the canary: one that is as good is taken back in 5 % of trials against 200 episodes of the active policy
    and in 10 % against 2000; one that succeeds in 70 % instead of 90 % in over 99 %, half of them within 15 episodes.
    """

    share: float = 0.1
    min_episodes: int = 10


@dataclass(frozen=True)
class Verdict:
    """``rollback`` and why; ``alarms`` are what a person should look at, one sentence each.

    ``compared`` is False while there are too few episodes.
    """

    rollback: bool
    why: str
    alarms: tuple[str, ...] = ()
    compared: bool = True


def choose_canaries(robots: Iterable[str], version: int, share: float) -> tuple[str, ...]:
    """The robots that try ``version``: others for every version, the same for the same robots in any order."""
    known = sorted(set(robots), key=lambda robot: hashlib.sha256(f"{version} {robot}".encode()).digest())
    return tuple(sorted(known[: max(1, round(share * len(known)))]))


def judge(canary: Outcomes, active: Outcomes, rule: CanaryRule) -> Verdict:
    """Take the canary back when its whole 95 % Wilson interval of success lies below that of the active policy.

    Interventions and safety clips per minute whose interval lies above the active policy's are alarms.  Both count
    whatever their robots did: robots whose tasks differ in difficulty make the comparison unfair.
    """
    if min(canary.episodes, active.episodes) < rule.min_episodes:
        return Verdict(
            False, f"{canary.episodes} and {active.episodes} episodes are too few to compare", compared=False
        )
    low, high = wilson(active.successes, active.episodes)
    canary_low, canary_high = wilson(canary.successes, canary.episodes)
    worse = canary_high < low
    why = (
        f"its success {canary.successes}/{canary.episodes} [{canary_low:.0%}, {canary_high:.0%}] "
        f"{'lies below' if worse else 'does not lie below'} the active policy's {active.successes}/{active.episodes} "
        f"[{low:.0%}, {high:.0%}]"
    )
    return Verdict(worse, why, tuple(_alarms(canary, active)))


def _alarms(canary: Outcomes, active: Outcomes) -> Iterable[str]:
    for name in ("interventions", "clips"):
        new, old = (poisson_rate(getattr(one, name), one.seconds / 60.0) for one in (canary, active))
        if new[0] > old[1]:
            yield (
                f"the canary has at least {new[0]:.2g} {name} per minute and the active policy at most {old[1]:.2g}; "
                "watch it, or roll it back."
            )
