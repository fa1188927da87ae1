"""Off-policy learners of a fleet: residual TD3 or RLPD from a replay buffer of everything that robots did."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vla_rl.algorithms.decisions import ages
from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig, mean
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.contract.batch import OneProcess, Rollout
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Features, Mode, State, recorded
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.relabel import INTERVENTION, relabelled
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import side_by_side
from vla_rl.fleet.episodes import FleetEpisode
from vla_rl.policies.critics import QEnsemble
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.fleet.export import demonstrations_of
from vla_rl.recipes.off_policy import AdaptiveReplay, ReplayConfig
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.trainers import PolicyConfig, RunContext, Trainable, generator

_STREAM, _RELABEL = 4, 6  # of the learner's generator and of the base's noise in demonstrations
_NEVER = 1e-15  # gradient steps per decision: the fleet says when one is taken


@dataclass(frozen=True)
class LearnByReplay:
    """Residual TD3, RLPD or any other off-policy algorithm, on whole episodes of robots and on the demonstrations.

    The fleet decides when a gradient step happens, so the algorithm's ``utd_ratio`` has no effect; its other schedule
    holds: no step before ``learning_starts`` decisions of robots, the critics alone first, the actor in every
    ``policy_delay``-th step.  The replay's ``max_age`` counts publications, and its tasks are families of tasks.
    """

    policy: PolicyConfig = field(default_factory=TD3Residual)
    algorithm: OffPolicyConfig = field(default_factory=ResidualTD3Config)
    replay: ReplayConfig = field(default_factory=lambda: AdaptiveReplay(max_age=20))
    explore: bool = True  # simulated robots act with the policy's exploration noise

    @property
    def mode(self) -> Mode:
        """How robots act in virtual time."""
        return "sample" if self.explore else "eval"

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> ReplayLearner:
        """Raises UserError for an algorithm that learns offline first, and for a policy of latent noise."""
        numbers = replace(self.algorithm, utd_ratio=_NEVER)
        if numbers.offline_steps:
            raise UserError(
                f"{type(numbers).__name__} takes {numbers.offline_steps} steps before the first decision but a fleet's "
                "robots decide from the beginning; set offline_steps to 0, or choose ResidualTD3Config or RLPDConfig."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # module initialisation has no generator argument
            policy: Any = self.policy.build(RunContext(EnvConfig(""), base, seed, OneProcess()))
            horizon, dims = getattr(policy, "horizon", 1), policy.spec.action_dim
            if hasattr(policy, "latent"):
                raise UserError(
                    f"{type(policy).__name__} chooses noise and a robot sends actions, so its episodes could not be "
                    "learnt from; choose a policy of actions, such as TD3Residual."
                )
            sizes = {**policy.feature_sizes, "time": 1}
            critic = QEnsemble(sizes, horizon * dims, numbers.num_critics, numbers.critic)
        families = family_numbers(policy.spec)
        replay = self.replay.joined(*self._parts(policy, episodes, families, seed), policy)
        learner = numbers.build(policy, policy.trainable(), critic, replay, generator(seed, _STREAM))
        return ReplayLearner(learner, families)

    def rollout(self, policy: Any, episode: FleetEpisode, known: Collection[int]) -> Rollout:
        """See ``FleetMethod``; relabelled with the base's actions."""
        return relabelled_episode(policy, episode, known)

    def _parts(
        self, policy: Any, episodes: Demonstrations, families: torch.Tensor, seed: int
    ) -> tuple[Replay, dict[str, Replay]]:
        """The buffer of what robots do, and that of the demonstrations."""
        online, config = Replay(self.replay.capacity, self.replay.gamma, self.replay.n_step), self.replay
        if config.folder:
            raise UserError(
                "a fleet's learner saves its replay buffer with its state, so a folder for it would be a second one; "
                "leave replay.folder out."
            )
        if not config.share:
            return online, {}
        horizon, noise = getattr(policy, "horizon", 1), generator(seed, _RELABEL)
        offline = Replay(2 * horizon * len(episodes.state) + 2, config.gamma, config.n_step)
        for rollout in relabelled(episodes, policy, policy.spec, horizon, noise, horizon):
            offline.add(by_family(rollout, families))
        return online, {"demonstrations": offline}


class ReplayLearner:
    """A ``FleetLearner``: an off-policy learner whose ``update`` takes no steps, for somebody else counts them."""

    def __init__(self, learner: OffPolicy, families: torch.Tensor) -> None:
        """``families`` int [M]: the family of each instruction."""
        self.learner, self._families = learner, families
        self._said: dict[str, float] = {}  # by the learner of the latest episode

    @property
    def policy(self) -> Any:
        """What it changes."""
        return self.learner.policy

    def add(self, rollout: Rollout) -> int:
        """Put whole episodes into the replay buffer; returns how many decisions they have.

        Raises ContractError for a decision of a version that the learner has not reached, and for one of another shape.
        """
        ages(rollout, self.policy.version)
        self._said = self.learner.update(by_family(rollout, self._families))
        return int(rollout.valid.any(-1).sum())

    def learn(self, steps: int) -> dict[str, float]:
        """Take so many gradient steps of the critics; none, and no metrics, before ``learning_starts`` decisions."""
        inner = self.learner
        if inner.decisions < max(1, inner.config.learning_starts):
            return {}
        infos = [inner.step() for _ in range(steps)]
        return {**self._said, "critic/steps": float(inner.steps), **mean(infos)}

    def state_dict(self) -> dict[str, Any]:
        """All of the learner's (see ``Resumable``), its replay buffer included."""
        return self.learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)


def family_numbers(spec: Any) -> torch.Tensor:
    """int [M]: the number of the family of each instruction, in the order of their names."""
    names = [spec.family(task) for task in range(len(spec.tasks))]
    return torch.tensor([sorted(set(names)).index(name) for name in names])


def by_family(rollout: Rollout, families: torch.Tensor) -> Rollout:
    """``rollout`` whose tasks are families: else those of many instructions would have most of every batch."""
    return rollout if rollout.task is None else replace(rollout, task=families[rollout.task])


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
    actor = _BegunAnew(policy, np.append(False, person)) if hasattr(policy, "context") else policy
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
    """A policy with ``context`` for every step of one episode; it begins anew ``after`` [N+1] some of them."""

    policy: Any  # with context
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
        """See ``vla_rl/contract/policy.py``."""
        return recorded(self.policy, features)
