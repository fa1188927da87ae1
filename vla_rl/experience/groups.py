"""Groups for GRPO and RLOO: ``n`` episodes from one seed, and new groups until enough of them hold a signal.

A group is **mixed** when its returns are not all equal; only mixed ones tell an algorithm anything.  Dynamic sampling
(DAPO, arXiv 2503.14476) replaces the others by groups with new seeds.  Given that a group is kept, the gradient is
``grad J / P(mixed)`` and a task's share of the kept groups is proportional to its ``P(mixed)``: every task has its
due up to one constant, provided that **which** groups are kept depends on nothing else.  So here

- a seed is played once, never again until it is mixed (that would multiply hard tasks by ``1 / P``);
- groups are delivered in the order in which they were launched, not in that in which they ended (which would favour
  short episodes), and what one rollout does not need opens the next one instead of being dropped;
- a member that was cut off is a member, with what it has earned and ``GroupConfig.unfinished`` (see there).

All members have one seed, hence one task, scene and start.  In a dream a seed chooses the start, the pictures that the
model is shown before it, and the model's noise: members differ by what the policy does and by nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import Observation, Step, VecEnv
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import Features, Policy, State, encode_observation
from vla_rl.experience.columns import Moment, beside, to_state
from vla_rl.experience.members import Group, Member
from vla_rl.experience.rollout import SeedStream, check_finite, play, to_tensor
from vla_rl.experience.truncation_value import TruncationValue, ZeroValue


@dataclass(frozen=True)
class GroupConfig:
    """How many groups a rollout holds and how many may be played for it.

    ``ahead`` trades idle rows against age.  While a rollout is being collected, so many groups more than are still
    missing may be in play; those that turn out not to be needed, at most ``ahead``, open the next rollout.  So no
    decision is older than one rollout, and in each at least ``groups - ahead`` groups are new.  With 0 nothing is ever
    carried over, and rows idle while the last groups end.
    """

    groups: int = 16  # G
    size: int = 8  # n: episodes in each
    ahead: int = 4  # less than ``groups``
    limit: int = 64  # groups played for one rollout at most; with ``limit = groups`` these are it, mixed or not
    num_envs: int = 64  # environments; the more, the more of them idle while the last groups end
    unfinished: TruncationValue = ZeroValue()  # what members that were cut off would still have earned

    def build(self, env: VecEnv, policy: Policy, seeds: SeedStream, generator: torch.Generator) -> GroupSource:
        """The source with these numbers."""
        return GroupSource(env, policy, self, seeds, generator)

    def split(self, parts: int) -> GroupConfig:
        """What each of ``parts`` processes collects, so that together they have these groups."""
        if any(number % parts for number in (self.groups, self.ahead, self.limit, self.num_envs)):
            raise UserError(
                f"{self} cannot be shared equally by {parts} processes, so nothing was started; choose groups, ahead, "
                "limit and rows as multiples of the processes."
            )
        shares = {name: getattr(self, name) // parts for name in ("groups", "ahead", "limit", "num_envs")}
        return replace(self, **shares)

    def __str__(self) -> str:
        return f"{self.groups} groups of {self.size} episodes (at most {self.limit} played)"

    @property
    def most_rows(self) -> int:
        """More than these can never be of use."""
        return min(self.groups + self.ahead, self.limit) * self.size


class GroupSource:
    """An ``ExperienceSource`` whose columns are whole episodes: ``size`` columns a group, ``groups`` groups a rollout.

    Columns with one seed are one group; they differ in length and idle (``valid`` False) after their end.  Any free row
    takes the next member of the newest group, so neither a group nor its neighbours wait for each other.  An episode is
    over when it ends, or at its first success where the environment's success counts once.

    A rollout is complete when ``groups`` groups are mixed, those carried over included.  If ``limit`` groups were not
    enough, uniform ones fill it up: their advantages are 0, so the denominators stay what they were and the direction
    stays unbiased.  Nothing is in play between two calls of :meth:`next`.

    The policy acts in mode "sample" with ``generator``; ``env`` and ``policy`` belong to the source meanwhile.
    """

    def __init__(
        self, env: VecEnv, policy: Policy, config: GroupConfig, seeds: SeedStream, generator: torch.Generator
    ) -> None:
        """Raises UserError for numbers that contradict each other or leave rows without use."""
        _require(config, env.num_envs)
        self.env, self.policy, self.config = env, policy, config
        self.seeds, self.generator = seeds, generator
        self._state = policy.initial_state(env.num_envs)
        self._obs: Observation | None = None
        self._carried: list[Rollout] = []
        self._clear()

    def _clear(self) -> None:
        self._groups: list[Group] = []  # launched for this rollout, in order
        self._playing: dict[int, Member] = {}  # row -> the episode in it
        self._moments: list[Moment] = []
        self._steps = 0.0
        self._seconds = {"env_s": 0.0, "perception_s": 0.0, "act_s": 0.0}

    def next(self) -> Rollout:
        """Play until the rollout is complete.

        ``info`` counts what was played, thrown away or not: ``env_steps``, ``episodes``, ``successes``, ``truncations``
        and ``groups_played``; ``groups_refilled`` uniform groups thrown away and replaced, ``groups_uniform`` delivered
        ones, ``groups_old`` delivered ones from the rollout before and ``groups_carried`` for the next one.

        Raises NonFiniteError when the policy produced a NaN: that decision moved nothing, and a next call with mended
        weights goes on where this one stopped.
        """
        self._fill()
        while self._playing:
            self._decide()
            self._fill()
        return self._deliver()

    def state_dict(self) -> dict[str, Any]:
        """Where seeds and generator stand, and the groups carried over (see ``Resumable``)."""
        if self._moments:
            raise ContractError(
                f"{len(self._moments)} decisions of an unfinished rollout would be lost, so the source has no state to "
                "save now; ask between two calls of next()."
            )
        carried = [to_state(group) for group in self._carried]
        return {"seeds": self.seeds.drawn, "generator": self.generator.get_state(), "carried": carried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seeds.drawn = state["seeds"]
        self.generator.set_state(state["generator"])
        self._carried = [Rollout(**group) for group in state["carried"]]

    # -- launching --------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Launch the next members in free rows, for as long as any are wanted."""
        launched: dict[int, int] = {}
        for row in range(self.env.num_envs):
            if row in self._playing:
                continue
            group = self._open_group()
            if group is None:
                break
            self._playing[row] = Member(row, len(self._moments))
            group.episodes.append(self._playing[row])
            launched[row] = group.seed
        if launched:
            with self._clock("env_s"):
                self._reset(np.array(list(launched)), np.array(list(launched.values()), np.int64))

    def _open_group(self) -> Group | None:
        """The group that the next member belongs to, None when no more are wanted."""
        if self._groups and not self._groups[-1].full:
            return self._groups[-1]
        mixed = len(self._carried) + sum(group.mixed for group in self._groups)
        running = sum(not group.ended for group in self._groups)
        missing = self.config.groups - mixed
        if missing <= 0 or running >= missing + self.config.ahead or len(self._groups) == self.config.limit:
            return None
        self._groups.append(Group(self._new_seed(), self.config.size))
        return self._groups[-1]

    def _new_seed(self) -> int:
        seed = next(self.seeds)
        if seed in [group.seed for group in self._groups] + [int(part.seeds[0, 0]) for part in self._carried]:
            raise UserError(
                f"seed {seed} came twice within one rollout, so two groups could not be told apart; give the source a "
                "longer range of seeds."
            )
        return seed

    def _reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        if self._obs is None:  # an environment can only be stepped once every row was reset; what these do is ignored
            spare = np.setdiff1d(np.arange(self.env.num_envs), rows)
            rows, seeds = np.append(rows, spare), np.append(seeds, np.full(len(spare), seeds[0]))
        self._state = self.policy.reset_state(self._state, rows)
        self._obs = self.env.reset(rows, seeds)

    # -- playing ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        assert self._obs is not None, "something is played, so the rows were reset"
        features, state = self._encode(self._obs, self._state)
        with self._clock("act_s"):
            out, state = self.policy.act(features, state, "sample", self.generator)
            check_finite(out)
        with self._clock("env_s"):
            step = play(self.env, out)
        self._state, self._obs = state, step.obs
        self._moments.append(Moment(features, out, step))
        self._book(step)

    def _book(self, step: Step) -> None:
        """Note what the playing rows earned, and which of them are free now."""
        valid, reward = to_tensor(step.valid), to_tensor(step.reward).double()
        earned, steps = torch.where(valid, reward, 0.0).sum(1).tolist(), valid.sum(1).tolist()
        for row, episode in self._playing.items():
            episode.value += earned[row]
            self._steps += steps[row]
        succeeded = to_tensor(step.success).tolist()
        over = to_tensor(step.done).tolist()
        if self.env.spec.success == "once":
            over = [one or other for one, other in zip(over, succeeded, strict=True)]
        ended = {row: self._playing.pop(row) for row in list(self._playing) if over[row]}
        for row, episode in ended.items():
            episode.stop, episode.success = len(self._moments), succeeded[row]
        self._keep_last(step, {row: episode for row, episode in ended.items() if step.truncated[row]})

    def _keep_last(self, step: Step, truncated: dict[int, Member]) -> None:
        if truncated:
            rows = np.array(list(truncated))
            last, _ = self._encode(step.obs.select(rows), {name: item[rows] for name, item in self._state.items()})
            beyond = self.config.unfinished.beyond(last).tolist()
            for i, episode in enumerate(truncated.values()):
                episode.last, episode.beyond = {name: item[i] for name, item in last.items()}, beyond[i]

    def _encode(self, obs: Observation, state: State) -> tuple[Features, State]:
        with self._clock("perception_s"):
            return encode_observation(self.policy, obs, state, self.generator)

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    # -- delivering -------------------------------------------------------------------------------------------------

    def _deliver(self) -> Rollout:
        """The first ``groups`` mixed groups in the order of their launch; the others stay for the next rollout."""
        old, wanted = len(self._carried), self.config.groups
        uniform = [group.seed for group in self._groups if not group.mixed]
        filling = uniform[: max(0, wanted - old - (len(self._groups) - len(uniform)))]
        kept = [group for group in self._groups if group.mixed or group.seed in filling]
        parts = self._carried + [group.cut(self._moments) for group in kept]
        played = [episode for group in self._groups for episode in group.episodes]
        info = {
            "env_steps": self._steps,
            "episodes": float(len(played)),
            "successes": float(sum(episode.success for episode in played)),
            "truncations": float(sum(episode.last is not None for episode in played)),
            "groups_played": float(len(self._groups)),
            "groups_refilled": float(len(uniform) - len(filling)),
            "groups_uniform": float(len(filling)),
            "groups_old": float(old),
            "groups_carried": float(len(parts) - wanted),
            **self._seconds,
        }
        self._carried = parts[wanted:]
        self._clear()
        return beside(parts[:wanted], info)


def _require(config: GroupConfig, rows: int) -> None:
    """Raise UserError when the numbers contradict each other or some of ``rows`` would idle for ever."""
    if config.size < 2:
        raise UserError(
            f"groups of {config.size} cannot be compared within themselves, so nothing could be learnt; set size to 2 "
            "or more."
        )
    if not 0 <= config.ahead < config.groups <= config.limit:
        raise UserError(
            f"ahead {config.ahead}, groups {config.groups} and limit {config.limit} contradict each other, so no "
            "rollout could be completed; keep 0 <= ahead < groups <= limit."
        )
    if rows > config.most_rows:
        raise UserError(
            f"{rows} rows are more than the {config.most_rows} episodes that may be in play, so some would always "
            "idle; use fewer rows or more groups."
        )
