"""Groups for GRPO and RLOO: ``n`` episodes from one seed, and new groups until enough of them hold a signal.

A group is **mixed** when its returns are not all equal; only mixed groups give an algorithm a gradient.  Dynamic
sampling (DAPO, arXiv 2503.14476) replaces uniform groups by groups with new seeds.  Given that a group is kept, the
gradient is ``grad J / P(mixed)``, and a task's share of the kept groups is proportional to its ``P(mixed)``: the two
factors cancel for every task, up to one constant, provided that **which** groups are kept depends on nothing else (a
curriculum changes which are played: tasks then weigh as often as it draws them).  So

- a seed is played once, and not repeated until its group is mixed (that would multiply hard tasks by ``1 / P``);
- groups are delivered in the order of their launch and not of their end (which would favour short episodes), and the
  groups that one rollout does not need open the next one;
- a truncated member stays in its group, with its reward so far + V.  **Leaving it out is not an option**: that
  maximises ``E[R | not truncated]``, which rewards actions that lead lost episodes into truncation.  Example: of two
  equally likely actions, one succeeds or fails and the other succeeds or is truncated, each with probability 1/2.  The
  gradient towards the second is 1/9 when truncated episodes are dropped, 0 when they earn nothing more, and 1/16 with
  ``V = .5``, which is too much if none of them would have succeeded.  So ``V`` is 0 unless a calibrated one exists, and
  a share of truncated episodes that rises during training (``truncated`` among the metrics) is a warning.

All members have one seed, hence one task, scene and initial state.  In an imagined environment a seed determines the
initial state, the context frames and the model's noise: members differ by the policy's actions and by nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vla_rl.contract.batch import TRUNCATION_RETURN, Rollout
from vla_rl.contract.env import WORKER, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Features, Policy
from vla_rl.contract.tracker import HostStep
from vla_rl.experience.curriculum import InOrder, SeedStream
from vla_rl.experience.driver import ATTEMPTS, Decision, no_seconds
from vla_rl.experience.rollout import (
    DrivenSource,
    device_of,
    episode_column,
    moved,
    side_by_side,
    to_policy_device,
    to_state,
)


@dataclass(frozen=True)
class GroupConfig:
    """How many groups a rollout holds and how many may be played for it.

    ``ahead`` trades idle environments against age.  While a rollout is being collected, so many groups more than are
    still missing may run; those that turn out not to be needed, at most ``ahead``, open the next rollout.  So no
    decision is older than one rollout, and in each at least ``groups - ahead`` groups are new.  With 0 no group is
    carried over, and environments idle while the last groups end.
    """

    groups: int = 16  # G
    size: int = 8  # n: episodes in each
    ahead: int = 4  # less than ``groups``
    limit: int = 64  # groups played for one rollout at most; with ``limit = groups`` uniform groups are not replaced
    num_envs: int = 64  # with more environments, more of them idle while the last groups end
    # V: what truncated members would still have earned, undiscounted, for instance on average when they were continued
    # in a simulator; it is calibrated for such policies only, and every excess rewards truncation.
    truncation_value: float = 0.0
    curriculum: InOrder = InOrder()  # which scenes are played next

    def build(self, env: VecEnv, policy: Policy, seeds: SeedStream, generator: torch.Generator) -> GroupSource:
        stream = self.curriculum.stream(seeds, env.spec, self.limit + self.ahead)
        return GroupSource(env, policy, self, stream, generator)

    def split(self, parts: int) -> GroupConfig:
        if any(number % parts for number in (self.groups, self.ahead, self.limit, self.num_envs)):
            raise UserError(
                f"{self} cannot be shared equally by {parts} processes, so nothing was started; choose groups, ahead, "
                "limit and num_envs as multiples of the processes."
            )
        shares = {name: getattr(self, name) // parts for name in ("groups", "ahead", "limit", "num_envs")}
        return replace(self, **shares, curriculum=self.curriculum.split(parts))

    def __str__(self) -> str:
        return f"{self.groups} groups of {self.size} episodes (at most {self.limit} played)"

    @property
    def max_envs(self) -> int:
        """The largest useful number of environments."""
        return min(self.groups + self.ahead, self.limit) * self.size


class GroupSource(DrivenSource):
    """Rollouts whose columns are whole episodes: ``size`` columns a group, ``groups`` groups a rollout.

    Columns with one seed are one group; they differ in length and idle (``valid`` False) after their end.  Any free
    environment takes the next member of the newest group, so neither a group nor its members wait for each other.  An
    episode ends when the environment ends it, or at its first success where the environment counts success "once".  A
    member whose simulator broke down (cause "worker") is played again, ``ATTEMPTS`` times at most.

    A rollout is complete when ``groups`` groups are mixed, carried-over ones included.  If ``limit`` groups were not
    enough, uniform ones fill it up: their advantages are 0, so the denominators stay what they were and the direction
    stays unbiased.  No episode is running between two calls of :meth:`next`.

    ``info`` counts all that was played, delivered or not: ``env_steps``, ``episodes``, ``successes``, ``truncations``
    and ``groups_played``; ``groups_refilled`` uniform groups replaced, ``groups_uniform`` uniform groups delivered,
    ``groups_old`` groups delivered from the rollout before, ``groups_carried`` for the next one.
    """

    def __init__(
        self, env: VecEnv, policy: Policy, config: GroupConfig, seeds: SeedStream, generator: torch.Generator
    ) -> None:
        """Raises UserError for numbers that contradict each other or leave environments without use."""
        _require(config, env.num_envs)
        super().__init__(env, policy, seeds, generator)
        self.config = config
        self._carried: list[Rollout] = []
        self._clear()

    def _clear(self) -> None:
        self._groups: list[Group] = []  # launched for this rollout, in order
        self._running: dict[int, Member] = {}  # env_id -> the member that it plays
        self._decisions: list[Decision] = []
        self._steps = 0.0
        self._lost = 0  # episodes that were truncated because their simulator broke down
        self._diverged = 0  # and because a reward or an observation was not finite
        self.driver.seconds = no_seconds()

    def advance(self) -> bool:
        self._fill()
        if self._running:
            self._decide()
            self._fill()
        return not self._running

    def state_dict(self) -> dict[str, Any]:
        """Seeds, generator and the groups carried over (see ``Resumable``)."""
        return self._shared_state(len(self._decisions)) | {"carried": [to_state(group) for group in self._carried]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._carried = [moved(Rollout(**group), device_of(self.policy)) for group in state["carried"]]

    def _fill(self) -> None:
        """Launch the next members in free environments, as long as more are wanted."""
        launched: dict[int, int] = {}
        for env_id in range(self.env.num_envs):
            if env_id in self._running:
                continue
            group = self._open_group()
            if group is None:
                break
            self._running[env_id] = Member(env_id, len(self._decisions))
            group.members.append(self._running[env_id])
            launched[env_id] = group.seed
        if launched:
            self._reset(np.array(list(launched)), np.array(list(launched.values()), np.int64))

    def _open_group(self) -> Group | None:
        """The group of the next member, None when no more members are wanted."""
        if self._groups and not self._groups[-1].full:
            return self._groups[-1]
        mixed = len(self._carried) + sum(group.mixed for group in self._groups)
        running = sum(not group.ended for group in self._groups)
        missing = self.config.groups - mixed
        if missing <= 0 or running >= missing + self.config.ahead or len(self._groups) == self.config.limit:
            return None
        taken = [group.seed for group in self._groups] + [int(part.seeds[0, 0]) for part in self._carried]
        seed = self.seeds.draw(taken)
        if seed in taken:
            raise UserError(
                f"seed {seed} came twice within one rollout, so two groups could not be distinguished; give the source "
                "a longer range of seeds."
            )
        self._groups.append(Group(seed, self.config.size))
        return self._groups[-1]

    def _reset(self, env_ids: np.ndarray, seeds: np.ndarray) -> None:
        if self.driver.obs is None:  # every environment must be reset once before a step; the spare ones are ignored
            spare = np.setdiff1d(np.arange(self.env.num_envs), env_ids)
            env_ids, seeds = np.append(env_ids, spare), np.append(seeds, np.full(len(spare), seeds[0]))
        self.driver.reset(env_ids, seeds)

    # -- playing ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        decision = self.driver.step()
        self._decisions.append(replace(decision, step=to_policy_device(decision)).without_pictures())
        self.seeds.ended(decision, self._record(decision.host, decision.step.cause))

    def _record(self, step: HostStep, cause: Sequence[str]) -> list[int]:
        """Add what the running members earned, and free the environments of those that ended; returns these."""
        valid, reward = torch.as_tensor(step.valid), torch.as_tensor(step.reward).double()
        earned, steps = torch.where(valid, reward, 0.0).sum(1).tolist(), valid.sum(1).tolist()
        for env_id, member in self._running.items():
            member.reward += earned[env_id]
            self._steps += steps[env_id]
        self._diverged += sum(cause[env_id] == "diverged" for env_id in self._running)
        again = self._begin_again(cause)
        success, done = step.success.tolist(), step.done.tolist()
        if self.env.spec.success == "once":
            done = [one or other for one, other in zip(done, success, strict=True)]
        over = [env_id for env_id in self._running if done[env_id] and env_id not in again]
        ended = {env_id: self._running.pop(env_id) for env_id in over}
        for env_id, member in ended.items():
            member.stop, member.success = len(self._decisions), success[env_id]
        self._keep_final({env_id: member for env_id, member in ended.items() if step.truncated[env_id]})
        return over

    def _begin_again(self, cause: Sequence[str]) -> list[int]:
        """Reset the environments of members whose simulator broke down, with the seeds of their groups."""
        lost = [env_id for env_id in self._running if cause[env_id] == WORKER]
        self._lost += len(lost)
        again = [env_id for env_id in lost if self._running[env_id].attempts < ATTEMPTS]
        for env_id in again:
            self._running[env_id].begin_again(len(self._decisions))
        self.driver.reset(np.array(again, np.int64), self.driver.seeds[again])
        return again

    def _keep_final(self, truncated: dict[int, Member]) -> None:
        """Give ``truncated`` members the features of their last observation and its value."""
        if truncated:
            final = self.driver.final_features(np.array(list(truncated)))
            for i, member in enumerate(truncated.values()):
                member.final = {name: item[i] for name, item in final.items()}
                member.truncation_return = float(self.config.truncation_value)

    def deliver(self) -> Rollout:
        """The first ``groups`` mixed groups in the order of their launch; the others stay for the next rollout."""
        old, wanted = len(self._carried), self.config.groups
        uniform = [group.seed for group in self._groups if not group.mixed]
        filling = uniform[: max(0, wanted - old - (len(self._groups) - len(uniform)))]
        kept = [group for group in self._groups if group.mixed or group.seed in filling]
        parts = self._carried + [group.to_rollout(self._decisions, self.env.spec.name) for group in kept]
        members = [member for group in self._groups for member in group.members]
        info = {
            "env/steps": self._steps,
            "rollout/episodes": float(len(members)),
            "rollout/successes": float(sum(member.success for member in members)),
            "rollout/truncations": float(sum(member.final is not None for member in members)),
            "rollout/groups_played": float(len(self._groups)),
            "rollout/groups_refilled": float(len(uniform) - len(filling)),
            "rollout/groups_uniform": float(len(filling)),
            "rollout/groups_old": float(old),
            "rollout/groups_carried": float(len(parts) - wanted),
            **self.driver.seconds,
            **self.seeds.counters(),
            **({"rollout/truncated_by_worker": float(self._lost)} if self._lost else {}),
            **({"rollout/diverged": float(self._diverged)} if self._diverged else {}),
        }
        self._carried = parts[wanted:]
        self._clear()
        return replace(side_by_side(parts[:wanted], info), spans=self.driver.spans.take())


def _require(config: GroupConfig, num_envs: int) -> None:
    """Raise UserError when the numbers contradict each other or some environments would never be used."""
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
    if num_envs > config.max_envs:
        raise UserError(
            f"{num_envs} environments are more than the {config.max_envs} episodes that may run at once, so some "
            "would always idle; use fewer environments or more groups."
        )


@dataclass
class Member:
    """One member of a group: the environment that plays it and what it has earned so far."""

    env_id: int
    start: int  # its first decision, as an index into the decisions of the rollout
    stop: int | None = None  # one after its last decision
    reward: float = 0.0  # sum of its rewards
    success: bool = False
    final: Features | None = None  # features of its last observation if it was truncated
    truncation_return: float = 0.0  # what it would still have earned then
    attempts: int = 1  # how often it was begun

    @property
    def episode_return(self) -> float:
        return self.reward + self.truncation_return

    def begin_again(self, start: int) -> None:
        """Forget what was played: its simulator broke down, and it is played anew from decision ``start`` on."""
        self.start, self.reward, self.attempts = start, 0.0, self.attempts + 1

    def to_rollout(self, decisions: Sequence[Decision], seed: int, robot: str) -> Rollout:
        """The episode as one column, with its truncation return if it was truncated."""
        part = episode_column(decisions[self.start : self.stop], self.env_id, seed, self.final, robot)
        count, device = len(part.final_index), part.final_index.device
        remaining = torch.full((count,), self.truncation_return, dtype=torch.float64, device=device)
        return replace(part, final_features={**part.final_features, TRUNCATION_RETURN: remaining})


@dataclass
class Group:
    """``size`` members that start from ``seed``; ``members`` are those that were launched."""

    seed: int
    size: int
    members: list[Member] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.members) == self.size

    @property
    def ended(self) -> bool:
        return self.full and all(member.stop is not None for member in self.members)

    @property
    def mixed(self) -> bool:
        """Whether it has ended and the returns of its members differ."""
        return self.ended and any(member.episode_return != self.members[0].episode_return for member in self.members)

    def to_rollout(self, decisions: Sequence[Decision], robot: str) -> Rollout:
        """Its episodes as columns, in the order in which they were launched."""
        return side_by_side([member.to_rollout(decisions, self.seed, robot) for member in self.members])
