"""Graded human help: which degree of it is due in a situation that a robot has failed in.

After the graded human-in-the-loop protocol of VLAC (Zhai et al. 2025, arXiv 2509.15937), whose three kinds of help are
ordered here by what they ask of a person at the robot.  The paper leaves it to people which kind they give when; here
failures decide: from one state, help grows while the policy does not succeed, and ends once it succeeds by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from vla_rl.contract.limits import check_limits


class Help(IntEnum):
    """Degrees of help, from least to most."""

    NONE = 0
    DEMONSTRATION_REPLAY = 1  # a demonstration from the hard state enters the buffer; the policy tries the scene again
    RETURN_AND_EXPLORE = 2  # robot and scene are put back into the hard state; the policy tries from there
    HUMAN_GUIDED_EXPLORE = 3  # the same, and a person takes over where it visibly fails


@dataclass(frozen=True)
class Situation:
    """What is known of one robot's attempts in one scene since it last succeeded or was given another scene.

    reached  the furthest progress, 0 to 1, of each attempt that failed, in order
    """

    reached: tuple[float, ...] = ()

    def failures(self, gain: float) -> int:
        """How many attempts failed without coming ``gain`` further than all before them."""
        best, count = -math.inf, 0
        for furthest in self.reached:
            count += furthest <= best + gain or not count
            best = max(best, furthest)
        return count


class HelpProtocol(Protocol):
    """Says which help is due."""

    def due(self, situation: Situation) -> Help:
        """The help for the next attempt; ``NONE`` is another scene."""


@dataclass(frozen=True)
class Escalation:
    """Help that grows by a degree after every ``attempts`` failures, and is given up after the last degree's.

    An attempt that comes ``gain`` further than all before it does not count: who is getting better is not helped more.
    """

    attempts: int = 1  # failed attempts after which the next degree of help is due
    gain: float = 0.1  # of progress, by which an attempt must come further in order not to count as a failure
    demonstration: int = 30  # control steps of a demonstration, at most; it ends between two decisions of the policy
    demonstrations: int = 10_000  # of the whole run
    returns: int = 10_000  # times that a person puts robot and scene back, of the whole run

    def __post_init__(self) -> None:
        count = (1, math.inf)
        check_limits(self, attempts=count, demonstration=count, gain=(0, 1))
        check_limits(self, demonstrations=(0, math.inf), returns=(0, math.inf))

    def due(self, situation: Situation) -> Help:
        """The help for the next attempt; ``NONE`` is another scene."""
        failures = situation.failures(self.gain)
        degree = -(-failures // self.attempts)
        return Help(degree) if degree <= max(Help) else Help.NONE
