"""Whether a new policy does worse than the one in use, by the episodes of the few robots that try it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from vla_rl.contract.intervals import poisson_rate, wilson


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
        return Outcomes(
            self.episodes + other.episodes,
            self.successes + other.successes,
            self.seconds + other.seconds,
            self.interventions + other.interventions,
            self.clips + other.clips,
        )


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
