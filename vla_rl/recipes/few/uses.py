"""Uses of a model of decisions beside a residual.  Here those of batches; those of acting: ``selection.py``.

- :class:`Branches` of one decision (MAD-TD, arXiv 2410.08896): a small share of the critics' batch are decisions of the
  present actor from recorded states.
- :class:`Branches` that begin with what was executed (value expansion, Feinberg et al. 2018, arXiv 1803.00101): targets
  look further ahead, along decisions of the present actor.  STEVE's weights (Buckman et al. 2018, arXiv 1807.01675)
  distrust a model where it errs; the simulator in its place does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.contract.batch import ReplayBuffer, Rollout, Transitions
from vla_rl.contract.env import VecEnv
from vla_rl.contract.limits import check_limits
from vla_rl.contract.policy import Features, Policy
from vla_rl.experience.mixture import Mixture
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource
from vla_rl.recipes.few.simulator import Consequence, Moments, Simulator, Watching


class InUse(Protocol):
    """A use of a model in one run."""

    def learn(self, rollout: Rollout, steps: int) -> dict[str, float]:
        """Look at ``rollout``, then train the model for ``steps`` gradient steps; returns metrics."""

    def deployed(self, policy: Policy, env: VecEnv, simulator: Simulator) -> Policy:
        """What acts in ``env`` when ``policy`` is deployed; ``simulator`` has copies of ``env``."""


class Use(Protocol):
    """The frozen dataclass of one use of a model."""

    def attach(self, source: RolloutSource, learner: OffPolicy, simulator: Simulator, gamma: float) -> InUse:
        """Change what collects and what is learnt from."""


class OnlyLearning:
    """An ``InUse`` without a model of its own, and without one that acts."""

    def learn(self, rollout: Rollout, steps: int) -> dict[str, float]:
        return {}

    def deployed(self, policy: Policy, env: VecEnv, simulator: Simulator) -> Policy:
        return policy


@dataclass(frozen=True)
class NoModel:
    """The residual alone."""

    def attach(self, source: RolloutSource, learner: OffPolicy, simulator: Simulator, gamma: float) -> InUse:
        return OnlyLearning()


@dataclass(frozen=True)
class Branches:
    """``share`` of every batch from short imagined episodes that begin in recorded moments."""

    share: float = 0.1
    decisions: int = 1
    first: Literal["actor", "executed"] = "actor"  # the first decision: the present actor's, or what was executed there
    new: int = 32  # branches after every rollout
    kept: int = 1024  # the latest of them, so that they are of an actor of today

    def __post_init__(self) -> None:
        check_limits(self, share=(0, 1), decisions=(1, math.inf), new=(1, math.inf), kept=(self.new, math.inf))

    def attach(self, source: RolloutSource, learner: OffPolicy, simulator: Simulator, gamma: float) -> InUse:
        policy = source.policy
        source.policy = watching = Watching(policy, simulator, source.env)
        replay = Replay(self.kept * (self.decisions + 1), gamma, self.decisions)
        learner.replay = Branched(learner.replay, replay, self, policy, watching, learner.generator)
        return OnlyLearning()


class Branched:
    """A ``ReplayBuffer`` of ``real`` decisions, and of branches that begin in the moments of real decisions."""

    def __init__(
        self,
        real: ReplayBuffer,
        branches: Replay,
        config: Branches,
        policy: Policy,
        watching: Watching,
        generator: torch.Generator,
    ) -> None:
        self.mixture = Mixture(
            {"online": real, "branches": branches}, {"online": 1.0 - config.share, "branches": config.share}
        )
        self.config, self.policy, self.watching, self.generator = config, policy, watching, generator
        self._moments: list[Moments] = []  # of all real decisions, rollout by rollout
        self._executed: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.mixture)

    def add(self, rollout: Rollout) -> int:
        """Add real decisions, and branches of today's actor from any that are known by now."""
        new = self.mixture.add(rollout)
        self._moments.append(Moments.joined(self.watching.take()))
        self._executed.append(rollout.executed.flatten(0, 1))
        if len(self._moments) > 1:  # one piece, which rows are drawn from
            self._moments, self._executed = [Moments.joined(self._moments)], [torch.cat(self._executed)]
        self.mixture.parts["branches"].add(self._branches())
        return new

    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        return self.mixture.sample(size, generator)

    @torch.no_grad()
    def _branches(self) -> Rollout:
        moments, executed = self._moments[0], self._executed[0]
        drawn = torch.randint(len(moments), (self.config.new,), generator=self.generator)
        moment, consequences, features = moments.select(drawn.numpy()), list[Consequence](), list[Features]()
        for depth in range(self.config.decisions):
            action = executed[drawn]
            if depth or self.config.first == "actor":
                action = self.policy.act(moment.features, moment.state, "eval", self.generator)[0].action
            consequence = self.watching.simulator.step(moment, action)
            features.append(moment.features)
            consequences.append(consequence)
            moment = consequence.after
        return as_rollout([*features, moment.features], consequences)

    def state_dict(self) -> dict[str, Any]:
        return self.mixture.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mixture.load_state_dict(state)


def as_rollout(features: list[Features], consequences: list[Consequence]) -> Rollout:
    """Branches [T,E] as whole episodes: those that are not over by the end are truncated there."""

    def over_time(name: str) -> Tensor:
        return torch.stack([getattr(one, name) for one in consequences])

    valid = over_time("valid")
    active = valid.any(-1)
    ends = (over_time("terminated") | over_time("truncated")) & active
    ends[-1] |= active[-1]
    terminated = over_time("terminated") & ends
    truncated = ends & ~terminated
    index = truncated.nonzero()
    stacked = {name: torch.stack([item[name] for item in features]) for name in features[0]}
    executed, zeros = over_time("executed"), torch.zeros(active.shape)
    return Rollout(
        features=stacked,
        sample=torch.zeros_like(executed),
        executed=executed,
        aux={},
        logprob=zeros,
        reward=over_time("reward"),
        valid=valid,
        intervened=torch.zeros_like(valid),
        terminated=terminated,
        truncated=truncated,
        success=over_time("success") & ends,
        version=zeros.long(),
        final_index=index,
        final_features=final_features(stacked, index),
        seeds=zeros.long(),
        task=zeros.long(),
        robot="branches",
    )


def final_features(features: Mapping[str, Tensor], index: Tensor) -> Features:
    """The features {name: [F,...]} after the decisions ``index`` int [F,2]."""
    return {name: item[index[:, 0] + 1, index[:, 1]] for name, item in features.items()}
