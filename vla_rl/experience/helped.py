"""An environment whose robots get graded human help: the scripted person gives no more of it than is due.

Graded human help: which degree of it is due in a situation that a robot has failed in.

After the graded human-in-the-loop protocol of VLAC (Zhai et al. 2025, arXiv 2509.15937), whose three kinds of help are
ordered here by what they ask of a person at the robot.  The paper leaves it to people which kind they give when; here
failures decide: from one state, help grows while the policy does not succeed, and ends once it succeeds by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from vla_rl.contract.config import check_limits
from vla_rl.contract.env import WORKER, Observation, Observe, Snapshot, Snapshots, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.experience.person import People, PersonConfig
from vla_rl.experience.supervised import SupervisedEnv


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


class HelpedEnv(SupervisedEnv):
    """``env`` with a person who helps by degrees (see :class:`Help`) instead of taking over at every visible failure.

    A new scene is the policy's alone.  The hard state of one that it fails in is the last moment before a decision at
    which the robot was still making progress, clock included; the person puts it back by the simulator's snapshots.
    While help is due, ``reset`` begins the next episode there, or in the same scene, whatever seed it is given, so the
    seeds of a rollout do not say which scenes were played.

    A demonstration is the scripted expert's, with the person's noise.  ``PersonConfig.max_share`` counts
    demonstrations and guidance together, the budget of ``help`` what is given.
    """

    env: Any  # with snapshots

    def __init__(
        self,
        env: VecEnv,
        expert: Callable[[Observation], np.ndarray],
        progress: Callable[[Observation], np.ndarray],
        config: PersonConfig,
        help: Escalation,
        protocol: HelpProtocol | None = None,
        people: People | None = None,
    ) -> None:
        """``protocol`` says which help is due, None: ``help`` itself.

        Raises UserError for an environment on a device or without snapshots."""
        super().__init__(env, expert, progress, config, people)
        if not isinstance(env, Snapshots):
            raise UserError(
                f"{env.spec.name!r} has no snapshots, so nobody can put its robots back into a hard state; choose an "
                "environment with snapshots, or a person who only takes over."
            )
        self.help, self.desk = help, HelpDesk(help, env.num_envs, protocol)
        self._scene = np.zeros(env.num_envs, np.int64)  # the seed of the scene that is played
        self._furthest = np.zeros(env.num_envs)  # progress in the present episode
        self._hard: Snapshot = {}  # [E,...]: where each robot was last making progress, in its scene's first attempt
        self._running = np.zeros(env.num_envs, bool)
        self._guided = np.zeros(env.num_envs, bool)
        self._allowed = self._guided

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Begin the episodes that are due; those with no help due have the given ``seeds``.  See ``VecEnv``."""
        rows, fresh = on_host(env_ids).astype(np.intp), on_host(seeds).astype(np.int64)
        for row in rows[self._running[rows]]:  # broken off from outside
            self.desk.forget(row)
        episodes = self.desk.next(rows.tolist(), self._affordable(rows))
        same, back, shown = (_flags(episodes, name) for name in ("same_scene", "from_hard_state", "shown"))
        self._scene[rows] = np.where(same, self._scene[rows], fresh)
        obs = super().reset(rows, self._scene[rows])
        if back.any():
            hard = {name: item[rows[back]] for name, item in self._hard.items()}
            self._obs = obs = self.env.restore(rows[back], hard)
            self._rule.begin(rows[back], self._seen(obs))
        self._rule.show(rows[shown], self.help.demonstration)
        self._guided[rows] = [episode.help == Help.HUMAN_GUIDED_EXPLORE for episode in episodes]
        self._furthest[rows], self._running[rows] = self._seen(obs)[rows], True
        return obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D], or what the person does instead; see ``VecEnv``."""
        self._remember()
        step = super().step(chunk, observe)
        self._furthest = np.where(self._running, np.maximum(self._furthest, self._seen(step.obs)), self._furthest)
        success = on_host(step.success)
        for row in np.flatnonzero(self._running & on_host(step.done)).tolist():
            if step.cause[row] == WORKER:  # nothing that the policy did
                self.desk.forget(row)
            else:
                self.desk.ended(row, bool(success[row]), float(self._furthest[row]))
            self._running[row] = False
        return step

    def _affordable(self, rows: np.ndarray) -> int:
        """How many demonstrations may begin now that the episodes of ``rows`` have ended."""
        assert self._obs is not None or not self._running.any()
        if self._obs is None:
            return 0
        self._rule.begin(rows, self._seen(self._obs))  # whoever had control there is free
        return self._rule.affordable(self.help.demonstration)

    def _remember(self) -> None:
        """Keep the state of robots that are still making progress in a scene's first attempt."""
        fresh = np.array([self.desk.episode(row) == Episode() for row in range(self.num_envs)])
        rows = np.flatnonzero(self._running & fresh & self._rule.advancing)
        if not self._hard:
            rows = np.arange(self.num_envs)
            self._hard = self.env.snapshot(rows)
        elif rows.size:
            _write(self._hard, rows, self.env.snapshot(rows))


def _flags(episodes: Sequence[Episode], name: str) -> np.ndarray:
    return np.array([getattr(episode, name) for episode in episodes], bool)


def _write(arrays: Mapping[str, np.ndarray], rows: np.ndarray, snapshot: Snapshot) -> None:
    for name, array in arrays.items():
        array[rows] = snapshot[name]


@dataclass(frozen=True)
class Episode:
    """What a robot's next episode is.

    help   the degree of help
    shown  a person demonstrates it; with another ``help`` than ``NONE``, the scene of the situation is played
    """

    help: Help = Help.NONE
    shown: bool = False

    @property
    def same_scene(self) -> bool:
        """Whether it is played in the scene that the robot failed in."""
        return self.help > Help.NONE

    @property
    def from_hard_state(self) -> bool:
        """Whether it begins in the state in which the robot got stuck, and not where the scene begins."""
        return self.shown or self.help > Help.DEMONSTRATION_REPLAY


class HelpDesk:
    """Keeps to the budget of ``config`` over ``num_envs`` robots, whose situations do not touch each other.

    ``protocol`` says which help is due, None: ``config`` itself.  A demonstration that cannot be afforded is left out:
    the policy tries the scene again without.  When robots were put back as often as allowed, the situation is left for
    another scene instead.
    """

    def __init__(self, config: Escalation, num_envs: int, protocol: HelpProtocol | None = None) -> None:
        self.config, self._protocol = config, protocol or config
        self._situations = [Situation()] * num_envs
        self._episodes = [Episode()] * num_envs
        self._shown = [False] * num_envs  # a demonstration was given since the last failure
        self.demonstrations, self.returns = 0, 0  # so far
        self.given = dict.fromkeys(Help, 0)  # attempts with each degree of help, so far

    def episode(self, robot: int) -> Episode:
        """What the present episode of ``robot`` is."""
        return self._episodes[robot]

    def situation(self, robot: int) -> Situation:
        """Where ``robot`` is stuck; empty where it is not."""
        return self._situations[robot]

    def next(self, robots: Sequence[int], affordable: int) -> list[Episode]:
        """What the next episodes of ``robots`` are, of which at most ``affordable`` are demonstrated."""
        left, found = affordable, []
        for robot in robots:
            self._episodes[robot] = chosen = self._chosen(robot, left)
            left -= chosen.shown
            self.demonstrations += chosen.shown
            self.returns += chosen.from_hard_state
            self.given[chosen.help] += not chosen.shown
            if not chosen.same_scene:
                self.forget(robot)
            found.append(chosen)
        return found

    def ended(self, robot: int, success: bool, furthest: float) -> None:
        """The episode of ``robot`` has ended; its ``furthest`` progress was that.

        A success without a person's hand ends the situation, as does one under guidance.
        """
        if self._episodes[robot].shown:
            self._shown[robot] = True
            return
        if success:
            self.forget(robot)
            return
        self._shown[robot] = False
        self._situations[robot] = Situation((*self._situations[robot].reached, furthest))

    def forget(self, robot: int) -> None:
        """Leave the situation of ``robot``: it needs no help, or gets another scene."""
        self._situations[robot], self._shown[robot] = Situation(), False

    def _chosen(self, robot: int, demonstrations: int) -> Episode:
        due, returns = self._protocol.due(self._situations[robot]), self.config.returns - self.returns
        if due == Help.DEMONSTRATION_REPLAY:
            left = min(demonstrations, self.config.demonstrations - self.demonstrations, returns)
            return Episode(due, shown=left > 0 and not self._shown[robot])
        return Episode(due) if returns > 0 else Episode()
