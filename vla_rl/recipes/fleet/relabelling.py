"""What a robot sent as decisions for a replay buffer: relabelled with what the policy's base would have done."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.policy import ActionOut, ContextPolicy, Features, Mode, State, recorded
from vla_rl.experience.columns import side_by_side
from vla_rl.experience.relabel import INTERVENTION, relabelled
from vla_rl.fleet.episodes import FleetEpisode
from vla_rl.recipes.fleet.export import demonstrations_of

_TERMINAL = ("success", "failure")  # what a person says of the task; every other outcome ends an episode from outside


def relabelled_episode(policy: Any, episode: FleetEpisode, known: Collection[int]) -> Rollout:
    """``episode`` as decisions of ``policy``, with reward 1 for a success; a person's steps are marked.

    A policy that decides every control step, such as a residual, gets one column; one with chunks of ``H`` actions as
    many as there are steps at which the first chunk can begin (at most ``H``).  The base of a residual begins a new
    chunk after every step of a person, as on a robot.  Its noise was not recorded: it is drawn anew, from the
    episode's name alone, so that a learner that was killed gets the same decisions again.

    ``known``: the versions of the fleet's policy; a robot that ran another policy counts as one of version 0.  An
    episode that a person called a success or a failure is terminated, any other truncated at its last observation, and
    the action after that one is left out.  Raises ContractError for a task or an action that the policy does not have.
    """
    horizon = getattr(policy, "horizon", 1)
    person, steps = np.array(episode.intervened), demonstrations_of(episode)
    extras = {**steps.extras, INTERVENTION: person}
    if episode.end.outcome in _TERMINAL:
        del extras["next.success"]  # so that "next.done" says where it was terminated
    else:
        extras["next.done"] = np.zeros(len(person), bool)
    shown = replace(steps, extras=extras, robot=episode.sender.robot)
    actor = _BegunAnew(policy, np.append(False, person)) if isinstance(policy, ContextPolicy) else policy
    noise = [torch.Generator().manual_seed(_number(episode))]
    columns = list(relabelled(shown, actor, policy.spec, horizon, noise, horizon))
    version = torch.tensor([one if one in known else 0 for one in episode.versions])
    return side_by_side([_of_robot(column, version[first::horizon], episode) for first, column in enumerate(columns)])


def _of_robot(column: Rollout, version: torch.Tensor, episode: FleetEpisode) -> Rollout:
    """``column`` with what a recording by a script does not have."""
    success = column.success & episode.end.success
    return replace(column, version=version[: len(column.reward), None], success=success)


def _number(episode: FleetEpisode) -> int:
    return zlib.crc32("/".join([*episode.sender, episode.name]).encode())


@dataclass
class _BegunAnew:
    """A ``ContextPolicy`` that decides at every step of one episode and begins anew ``after`` [N+1] some of them."""

    policy: ContextPolicy
    after: np.ndarray  # bool: whether a person acted in the step before
    version: int = 0
    _step: int = 0

    def encode(self, obs: Observation) -> Features:
        return self.policy.encode(obs)

    def initial_state(self, num_envs: int) -> State:
        return self.policy.initial_state(num_envs)

    def reset_state(self, state: State, env_ids: Array) -> State:
        return self.policy.reset_state(state, env_ids)

    def context(self, features: Features, state: State, generator: Any) -> tuple[Features, State]:
        """Called once for every step, in order."""
        if self.after[self._step]:
            state = self.policy.reset_state(state, np.zeros(1, np.int64))
        self._step += 1
        return self.policy.context(features, state, generator)

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        return self.policy.act(features, state, mode, generator)

    def recorded(self, features: Features) -> Features:
        """See ``SelectivePolicy``."""
        return recorded(self.policy, features)
