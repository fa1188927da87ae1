"""People who help simulated robots, scripted: they take over, help by degrees, or demonstrate whole episodes.

``InterventionRule`` says when a person takes over and hands back; it watches robots on arms as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from vla_rl.contract.config import Checked, at_least, within
from vla_rl.contract.env import WORKER, Observation, Observe, Snapshot, Snapshots, Step, VecEnv, on_host
from vla_rl.contract.errors import ContractError, UserError, cause_of


@dataclass(frozen=True)
class PersonConfig(Checked):
    """What a person sees and how they act; steps are control steps.

    A robot visibly fails when its progress has reached no new best for ``patience`` steps, or has fallen ``slip`` below
    its best.  Progress is a number from 0 to 1 that a person could estimate by eye, such as how near the gripper is and
    how high the cube.
    """

    patience: int = at_least(10, 1)
    slip: float = within(0.15, 0, 1)
    gain: float = within(0.02, 0, 1)  # of progress that counts as a new best
    delay: int = at_least(4, 0)  # steps from what is seen to the hand
    hold: int = at_least(10, 1)  # least steps of an intervention, which ends at a new best, between two decisions
    noise: float = at_least(0.1, 0)  # std of the person's actions, in half-ranges of the action
    max_share: float = within(0.2, 0, 1)  # of all steps; what would exceed it by its ``hold`` steps is not begun


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
        return self._held > 0

    @property
    def share(self) -> float:
        """The share of control steps in which the person acted, of all so far."""
        return self._intervened / max(1, self._steps)

    @property
    def advancing(self) -> np.ndarray:
        """bool [E]: whether the last control step, or the reset, led to a new best."""
        return self._stalled == 0

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


class SupervisedEnv:
    """``env`` whose robots a person watches (``VecEnv``): ``Step.intervened`` says where the person acted.

    ``expert(obs) -> [E,>=1,D]`` is what the person wants to do, ``progress(obs) -> [E]`` what the person sees; both may
    read ``privileged/*``.  The policy's actions are executed one after the other; after a take-over the rest of its
    chunk is not executed, and control is handed back at the next decision, as on a robot.  The noise of an episode
    follows from its seed.  One person watches all robots: whether they may begin depends on ``max_share`` of them all.
    """

    def __init__(
        self,
        env: VecEnv,
        expert: Callable[[Observation], np.ndarray],
        progress: Callable[[Observation], np.ndarray],
        config: PersonConfig,
        people: People | None = None,
    ) -> None:
        """``people`` watch other environments as well, None: one for every robot of this one.

        Raises UserError for an environment on a device: experts are on the host."""
        if env.spec.device != "cpu":
            raise UserError(
                f"{env.spec.name!r} is on {env.spec.device}, where a scripted person cannot act; choose one on the CPU."
            )
        self.env, self.config, self._expert, self._progress = env, config, expert, progress
        self.spec, self.num_envs = env.spec, env.num_envs
        action = env.spec.action
        self._low, self._high = (
            np.broadcast_to(np.asarray(end, np.float32), action.shape) for end in (action.low, action.high)
        )
        self._generators = [np.random.default_rng(0) for _ in range(env.num_envs)]
        self._rule = InterventionRule(config, env.num_envs, people)
        self._allowed: np.ndarray | None = None  # bool [E]: where the person may take over, None: everywhere
        self._obs: Observation | None = None

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        self._obs = obs = self.env.reset(env_ids, seeds)
        rows = on_host(env_ids).astype(np.intp)
        for row, seed in zip(rows, on_host(seeds), strict=True):
            self._generators[row] = np.random.default_rng([int(seed), 1])
        self._rule.begin(rows, self._seen(obs))
        return obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D], or what the person does instead; see ``VecEnv``."""
        self._rule.hand_back()
        wanted, steps, persons = on_host(chunk), [], []
        for h in range(wanted.shape[1]):
            persons.append(self._rule.acting)
            steps.append(self.env.step(self._action(wanted[:, h], persons[-1])[:, None], observe))
            self._obs = steps[-1].obs
            self._rule.watch(self._seen(steps[-1].obs), on_host(steps[-1].valid)[:, 0], self._allowed)
        return _joined(steps, np.stack(persons, 1))

    def close(self) -> None:
        self.env.close()

    def _action(self, wanted: np.ndarray, person: np.ndarray) -> np.ndarray:
        """What is executed [E,D]."""
        if not person.any():
            return wanted
        assert self._obs is not None
        noise = np.zeros_like(wanted)
        for row in np.flatnonzero(person):
            noise[row] = self._generators[row].normal(0.0, self.config.noise, wanted.shape[1])
        shown = self._expert(self._obs)[:, 0] + noise * (self._high - self._low) / 2
        return np.where(person[:, None], np.clip(shown, self._low, self._high), wanted).astype(np.float32)

    def _seen(self, obs: Observation) -> np.ndarray:
        """How far the tasks have come, as the person sees it [E]."""
        try:
            return np.asarray(self._progress(obs), float)
        except Exception as error:  # of whoever wrote the function
            raise ContractError(
                f"how far the task of {self.env.spec.name!r} has come cannot be said ({cause_of(error)}), so nobody "
                "would know when to take over; name a function of its own observations as the config's progress."
            ) from error


def _joined(steps: list[Step], person: np.ndarray) -> Step:
    """Steps of one action each as one of ``H``, in which a person acted where ``person`` [E,H] (or [E,1])."""
    valid, reward, executed = (
        np.concatenate([on_host(getattr(step, name)) for step in steps], 1) for name in ("valid", "reward", "executed")
    )
    frames = tuple(frame for step in steps for frame in step.frames)
    last = steps[-1]
    return replace(last, valid=valid, reward=reward, executed=executed, intervened=person & valid, frames=frames)


@dataclass(frozen=True)
class DemonstratorConfig(Checked):
    """How much a person demonstrates."""

    max_share: float = within(0.2, 0, 1)  # of all steps so far; an episode is demonstrated while less was
    steps: int = at_least(10_000, 0)  # after so many no further episode is


class DemonstratedEnv:
    """``env`` in which a person does some episodes from beginning to end (``VecEnv``), as ``Step.intervened`` says.

    ``expert(obs) -> [E,>=1,D]`` is what the person does, without noise, as in recorded demonstrations.
    """

    def __init__(self, env: VecEnv, expert: Callable[[Observation], np.ndarray], config: DemonstratorConfig) -> None:
        self.env, self.config, self._expert = env, config, expert
        self.spec, self.num_envs = env.spec, env.num_envs
        self._person = np.zeros(env.num_envs, bool)
        self._steps, self._shown = 0, 0
        self._obs: Observation | None = None

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        self._obs = self.env.reset(env_ids, seeds)
        wanted = self._shown < self.config.steps and self._shown <= self.config.max_share * self._steps
        self._person[on_host(env_ids).astype(np.intp)] = wanted
        return self._obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D], or what the person does instead; see ``VecEnv``."""
        wanted, steps = on_host(chunk), []
        for h in range(wanted.shape[1]) if self._person.any() else ():
            assert self._obs is not None
            shown = self._expert(self._obs)[:, 0]
            action = np.where(self._person[:, None], shown, wanted[:, h]).astype(np.float32)
            steps.append(self.env.step(action[:, None], observe))
            self._obs = steps[-1].obs
        step = _joined(steps, self._person[:, None]) if steps else self.env.step(chunk, observe)
        self._obs = step.obs
        valid = on_host(step.valid)
        self._steps += int(valid.sum())
        self._shown += int(valid[self._person].sum())
        return step

    def close(self) -> None:
        self.env.close()


class Help(IntEnum):
    """Degrees of help, from least to most."""

    NONE = 0
    DEMONSTRATION_REPLAY = 1  # a demonstration from the hard state enters the buffer; the policy tries the scene again
    RETURN_AND_EXPLORE = 2  # robot and scene are put back into the hard state; the policy tries from there
    HUMAN_GUIDED_EXPLORE = 3  # the same, and a person takes over where it visibly fails


@dataclass(frozen=True)
class Escalation(Checked):
    """Help that grows by a degree after every ``attempts`` failures, and is given up after the last degree's.

    An attempt that comes ``gain`` further than all before it does not count: who is getting better is not helped more.
    After the graded human-in-the-loop protocol of VLAC (Zhai et al. 2025, arXiv 2509.15937), whose three kinds of help
    are ordered here by what they ask of a person at the robot.  The paper leaves it to people which kind they give
    when; another rule is a subclass with its own :meth:`due`.
    """

    attempts: int = at_least(1, 1)  # failed attempts after which the next degree of help is due
    gain: float = within(0.1, 0, 1)  # of progress, by which an attempt that did not fail came further
    demonstration: int = at_least(30, 1)  # most steps of a demonstration; it ends between two decisions of the policy
    demonstrations: int = at_least(10_000, 0)  # of the whole run
    returns: int = at_least(10_000, 0)  # times that a person puts robot and scene back, of the whole run

    def due(self, reached: Sequence[float]) -> Help:
        """The help for the next attempt; ``NONE`` is another scene.

        ``reached``: the furthest progress, 0 to 1, of each attempt in this scene that failed, in order.
        """
        best, failures = -math.inf, 0
        for furthest in reached:
            failures += furthest <= best + self.gain or not failures
            best = max(best, furthest)
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
        people: People | None = None,
    ) -> None:
        """Raises UserError for an environment on a device or without snapshots."""
        super().__init__(env, expert, progress, config, people)
        if not isinstance(env, Snapshots):
            raise UserError(
                f"{env.spec.name!r} has no snapshots, so nobody can put its robots back into a hard state; choose an "
                "environment with snapshots, or a person who only takes over."
            )
        self.help, self.desk = help, HelpDesk(help, env.num_envs)
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
        same, back, shown = (
            np.array([getattr(one, name) for one in episodes], bool)
            for name in ("same_scene", "from_hard_state", "shown")
        )
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
        fresh = np.array([self.desk.episodes[row] == HelpedEpisode() for row in range(self.num_envs)])
        rows = np.flatnonzero(self._running & fresh & self._rule.advancing)
        if not self._hard:
            rows = np.arange(self.num_envs)
            self._hard = self.env.snapshot(rows)
        elif rows.size:
            for name, item in self.env.snapshot(rows).items():
                self._hard[name][rows] = item


@dataclass(frozen=True)
class HelpedEpisode:
    """What a robot's next episode is: the degree of help, and whether a person demonstrates it."""

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
    """Keeps to the budget of ``config`` over ``num_envs`` robots, whose failures do not touch each other.

    A demonstration that cannot be afforded is left out: the policy tries the scene again without.  When robots were put
    back as often as allowed, the scene is left for another one instead.
    """

    def __init__(self, config: Escalation, num_envs: int) -> None:
        self.config = config
        # The furthest progress of each failed attempt of a robot in its scene; () where it is not stuck.
        self.reached: list[tuple[float, ...]] = [()] * num_envs
        self.episodes = [HelpedEpisode()] * num_envs  # the present ones
        self._shown = [False] * num_envs  # a demonstration was given since the last failure
        self.demonstrations, self.returns = 0, 0  # so far
        self.given = dict.fromkeys(Help, 0)  # attempts with each degree of help, so far

    def next(self, robots: Sequence[int], affordable: int) -> list[HelpedEpisode]:
        """What the next episodes of ``robots`` are, of which at most ``affordable`` are demonstrated."""
        left, found = affordable, []
        for robot in robots:
            self.episodes[robot] = chosen = self._chosen(robot, left)
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

        A success without a person's hand ends all help, as does one under guidance.
        """
        if self.episodes[robot].shown:
            self._shown[robot] = True
            return
        if success:
            self.forget(robot)
            return
        self._shown[robot] = False
        self.reached[robot] = (*self.reached[robot], furthest)

    def forget(self, robot: int) -> None:
        """``robot`` needs no help, or gets another scene."""
        self.reached[robot], self._shown[robot] = (), False

    def _chosen(self, robot: int, demonstrations: int) -> HelpedEpisode:
        due, returns = self.config.due(self.reached[robot]), self.config.returns - self.returns
        if due == Help.DEMONSTRATION_REPLAY:
            left = min(demonstrations, self.config.demonstrations - self.demonstrations, returns)
            return HelpedEpisode(due, shown=left > 0 and not self._shown[robot])
        return HelpedEpisode(due) if returns > 0 else HelpedEpisode()
