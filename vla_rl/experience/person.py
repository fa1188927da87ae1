"""A person who watches robots: when a failure is visible, when they take over, and when they hand back; scripted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.config import check_limits


@dataclass(frozen=True)
class PersonConfig:
    """What a person sees and how they act; steps are control steps.

    A robot visibly fails when its progress has reached no new best for ``patience`` steps, or has fallen ``slip`` below
    its best.  Progress is a number from 0 to 1 that a person could estimate by eye, such as how near the gripper is and
    how high the cube.
    """

    patience: int = 10
    slip: float = 0.15
    gain: float = 0.02  # of progress that counts as a new best
    delay: int = 4  # steps from what is seen to the hand
    hold: int = 10  # steps of an intervention, at least; it ends at a new best, between two decisions of the policy
    noise: float = 0.1  # std of the person's actions, in half-ranges of the action
    max_share: float = 0.2  # of all steps so far; an intervention of ``hold`` steps that would exceed it is not begun

    def __post_init__(self) -> None:
        count = (1, math.inf)
        check_limits(self, patience=count, delay=(0, math.inf), hold=count, noise=(0, math.inf))
        check_limits(self, slip=(0, 1), gain=(0, 1), max_share=(0, 1))


class People:
    """``count`` people who watch the robots of several rules together, each with one robot at a time."""

    def __init__(self, count: int) -> None:
        self.free = count


class InterventionRule:
    """When a person acts who watches ``num_envs`` robots: told their progress [E] after every control step.

    Whether they may begin depends on ``max_share`` of these robots' steps together and, with ``people``, on somebody
    being free.  Whoever has control at the end of an episode stays with the robot until the next one begins.
    """

    def __init__(self, config: PersonConfig, num_envs: int, people: People | None = None) -> None:
        self.config, self.num_envs, self._people = config, num_envs, people or People(num_envs)
        self._best = np.zeros(num_envs)
        self._stalled = np.zeros(num_envs, int)  # steps since the last new best
        self._seen = np.zeros(num_envs, int)  # steps for which failure has been visible
        self._held = np.zeros(num_envs, int)  # steps of the intervention, 0 without one
        self._recovered = np.zeros(num_envs, bool)  # a new best since the person took over
        self._least = np.full(num_envs, config.hold)  # steps of the intervention, at least
        self._shows = np.zeros(num_envs, bool)  # the person demonstrates
        self._steps, self._intervened = 0, 0

    @property
    def acting(self) -> np.ndarray:
        """bool [E]: whether the person has control."""
        found: np.ndarray = self._held > 0
        return found

    @property
    def share(self) -> float:
        """The share of control steps in which the person acted, of all so far."""
        return self._intervened / max(1, self._steps)

    @property
    def advancing(self) -> np.ndarray:
        """bool [E]: whether the last control step, or the reset, led to a new best."""
        found: np.ndarray = self._stalled == 0
        return found

    def begin(self, rows: np.ndarray, progress: np.ndarray) -> None:
        """New episodes of the robots ``rows``, which begin at ``progress`` [E]."""
        self._people.free += int((self._held[rows] > 0).sum())
        self._best[rows] = progress[rows]
        for counter in (self._stalled, self._seen, self._held, self._recovered, self._shows):
            counter[rows] = 0

    def show(self, rows: np.ndarray, steps: int) -> None:
        """The person demonstrates ``rows`` [R] from now on, for ``steps`` control steps or to the episode's end.

        No more rows than :meth:`affordable` says.
        """
        self._people.free -= len(rows)
        self._held[rows], self._least[rows], self._shows[rows] = 1, steps, True

    def watch(self, progress: np.ndarray, running: np.ndarray, allowed: np.ndarray | None = None) -> None:
        """Look at what a control step of the ``running`` robots [E] has led to; take over after a visible failure.

        With ``allowed`` bool [E] only of these robots.
        """
        config = self.config
        self._steps += int(running.sum())
        self._intervened += int((running & (self._held > 0)).sum())
        better = progress > self._best + config.gain
        self._best = np.where(better, progress, self._best)
        self._stalled = np.where(better, 0, self._stalled + 1)
        failing = (self._stalled >= config.patience) | (progress < self._best - config.slip)
        self._seen = np.where(failing & running, self._seen + 1, 0)
        self._recovered |= better
        begins = (self._held == 0) & running & (self._seen > config.delay) & (allowed is None or allowed)
        begins[np.flatnonzero(begins)[self.affordable(config.hold) :]] = False
        self._people.free -= int(begins.sum())
        self._least[begins] = config.hold
        self._held = np.where(begins, 1, np.where(self._held > 0, self._held + 1, 0))
        self._recovered &= ~begins
        # What was best before a fall is not asked for again.
        self._best = np.where(begins, progress, self._best)

    def hand_back(self) -> None:
        """Leave the robots that are well again to their policy."""
        done = (self._held > self._least) & (self._recovered | self._shows)
        self._people.free += int(done.sum())
        for counter in (self._held, self._seen, self._stalled, self._shows):
            counter[done] = 0

    def affordable(self, steps: int) -> int:
        """How many interventions of ``steps`` may begin now, so that the share is kept when all end."""
        share, acting = self.config.max_share, self._held > 0
        pending = np.maximum(self._least - self._held, 0)[acting].sum()
        cost = (1.0 - share) * steps
        left = share * (self._steps + pending) - self._intervened - pending
        return min(max(0, int(left / cost)) if cost else self.num_envs, self._people.free)
