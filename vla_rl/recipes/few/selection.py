"""The best of several candidates is executed, while collecting and when deployed (QWM, arXiv 2608.17163).

Candidates are the actor's decision and others with its exploration noise.  What differs is who scores them: the
simulator and the critics of the state it ends in, a latent model that is learnt beside the critics, or the critics
alone, without any model.  Critics learn from what was executed, and from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from vla_rl.algorithms.guard import Release, ReleaseConfig
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.ranking import Attempts
from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import VecEnv
from vla_rl.contract.limits import check_limits
from vla_rl.contract.policy import ActionOut, Features, Mode, Policy, State
from vla_rl.experience.rollout import RolloutSource
from vla_rl.recipes.few.simulator import Moments, Simulator, Wrapped
from vla_rl.recipes.few.uses import InUse
from vla_rl.recipes.world_models import latent_model
from vla_rl.training.latent_model import LatentModelTrainer

if TYPE_CHECKING:
    from vla_rl.recipes.world_models import LatentModel

Value = Callable[[Features], Tensor]
"""What the critics expect [B] of the actor from features {name: [B,...]} on."""


class Scores(Protocol):
    """Says of candidates in ``E`` environments how good they are."""

    def __call__(self, features: Features, state: State, candidates: Sequence[ActionOut]) -> Tensor:
        """[n,E] of ``n`` candidates, given what the policy knows."""


class Selecting(Wrapped):
    """Executes the candidate with the highest score, whatever the mode."""

    def __init__(self, policy: Policy, candidates: int, scores: Scores) -> None:
        super().__init__(policy)
        self.candidates, self.scores = candidates, scores

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        modes: list[Mode] = ["eval", *(["sample"] * (self.candidates - 1))]  # type: ignore[list-item]
        tried = [self.policy.act(features, state, one, generator) for one in modes]
        best = self.scores(features, state, [out for out, _ in tried]).argmax(0)
        rows = torch.arange(len(best))

        def chosen(items: list[Tensor]) -> Tensor:
            return torch.stack(items)[best, rows]

        action, sample = (chosen([getattr(one, name) for one, _ in tried]) for name in ("action", "sample"))
        after = {name: chosen([state[name] for _, state in tried]) for name in tried[0][1]}
        return replace(tried[0][0], action=action, sample=sample, aux={}), after


@dataclass(frozen=True)
class Selection:
    """Scored by the simulator: the reward of the decision and the value of what follows it."""

    candidates: int = 8

    def __post_init__(self) -> None:
        check_limits(self, candidates=(2, math.inf))

    def attach(self, source: RolloutSource, learner: OffPolicy, simulator: Simulator, gamma: float) -> InUse:
        value = value_of(learner)
        return Selected(
            source, simulator, self.candidates, lambda env, copies: SimulatorScores(env, copies, value, gamma)
        )


@dataclass(frozen=True)
class CriticSelection:
    """Scored by the critics, without a model: what selection is worth by itself."""

    candidates: int = 8

    def __post_init__(self) -> None:
        check_limits(self, candidates=(2, math.inf))

    def attach(self, source: RolloutSource, learner: OffPolicy, simulator: Simulator, gamma: float) -> InUse:
        scores = CriticScores(learner)
        return Selected(source, simulator, self.candidates, lambda env, copies: scores)


@dataclass(frozen=True)
class LatentSelection:
    """Scored by a latent model, which learns from the same decisions as the critics: a step in ``every`` of theirs.

    The actor's own decision is executed while the model does not rank the outcomes of episodes that it has not learnt
    from (``release``): the best of several by a model that errs is where it errs most.
    """

    model: Any  # a ``world_models.latent.LatentConfig``
    candidates: int = 8
    release: ReleaseConfig | None = ReleaseConfig(auroc=0.8, hold=0.75)  # None: select from the beginning
    every: int = 4  # a step of the model costs one and a half of the critics

    def __post_init__(self) -> None:
        check_limits(self, candidates=(2, math.inf), every=(1, math.inf))

    def attach(self, source: RolloutSource, learner: OffPolicy, simulator: Simulator, gamma: float) -> InUse:
        policy: Any = learner.policy
        sizes = {**policy.feature_sizes, "time": 1}
        horizon = getattr(policy, "horizon", 1)
        model = latent_model(sizes, horizon * source.env.spec.action_dim, self.model)
        trainer = LatentModelTrainer(
            model, list(model.parameters()), learner.policy, learner.critic, self.model.lr, learner.generator
        )
        scores = LatentScores(model, trainer, learner, gamma**horizon, self.release, self.every)
        return Selected(source, simulator, self.candidates, lambda env, copies: scores, scores.learn)


class Selected:
    """An ``InUse``: the source acts by the best candidate, and so does what is deployed."""

    def __init__(
        self,
        source: RolloutSource,
        simulator: Simulator,
        candidates: int,
        scores: Callable[[VecEnv, Simulator], Scores],
        learn: Callable[[Rollout, int], dict[str, float]] = lambda rollout, steps: {},
    ) -> None:
        """``scores(env, simulator)`` scores in ``env``, of which ``simulator`` has copies."""
        self.candidates, self.scores, self.learn = candidates, scores, learn
        source.policy = self.deployed(source.policy, source.env, simulator)

    def deployed(self, policy: Policy, env: VecEnv, simulator: Simulator) -> Policy:
        return Selecting(policy, self.candidates, self.scores(env, simulator))


class SimulatorScores:
    """``reward + gamma^n value`` after the decision was tried in copies of ``env``."""

    def __init__(self, env: VecEnv, simulator: Simulator, value: Value, gamma: float) -> None:
        self.env, self.simulator, self.value, self.gamma = env, simulator, value, gamma

    def __call__(self, features: Features, state: State, candidates: Sequence[ActionOut]) -> Tensor:
        moments = self.simulator.moments(self.env, features, state)
        every = Moments.joined([moments] * len(candidates))
        found = self.simulator.step(every, torch.cat([out.action for out in candidates]))
        reward, factor = found.discounted(self.gamma)
        return (reward + factor * self.value(found.after.features)).view(len(candidates), len(moments))


class CriticScores:
    """The mean of the critics."""

    def __init__(self, learner: OffPolicy) -> None:
        self.learner = learner

    def __call__(self, features: Features, state: State, candidates: Sequence[ActionOut]) -> Tensor:
        policy, critic = self.learner.policy, self.learner.critic
        return torch.stack(
            [critic(features, policy.critic_action(features, out.sample, out.action)).mean(0) for out in candidates]
        )


class LatentScores:
    """The latent model's reward and value after the decision; equal for all while it is held, so the first is taken."""

    def __init__(
        self,
        model: LatentModel,
        trainer: LatentModelTrainer,
        learner: OffPolicy,
        discount: float,
        release: ReleaseConfig | None,
        every: int = 1,
    ) -> None:
        self.model, self.trainer, self.learner, self.discount = model, trainer, learner, discount
        self.every, self._counted = every, 0  # steps of the critics for one of the model; since its last
        self.release, self.attempts = Release(release) if release else None, Attempts()

    @property
    def held(self) -> bool:
        """Whether nothing is selected by the model."""
        return not self.trainer.steps or (self.release is not None and not self.release.open)

    def __call__(self, features: Features, state: State, candidates: Sequence[ActionOut]) -> Tensor:
        if self.held:
            return torch.zeros(len(candidates), len(candidates[0].action))
        return torch.stack([self._score(features, out.sample, out.action) for out in candidates])

    def learn(self, rollout: Rollout, steps: int) -> dict[str, float]:
        """See how well the model foresees ``rollout``, then take one in ``every`` of ``steps``; metrics of the last."""
        metrics: dict[str, float] = {}
        if self.release:
            self.release.add(self.attempts.add(rollout, self._foreseen(rollout)))
            metrics = {"model/auroc": self.release.share, "model/held": float(self.held)}
        due, self._counted = divmod(self._counted + steps, self.every)
        for _ in range(due):
            metrics |= self.trainer.step(self.learner.replay, self.learner.config.batch)
        return metrics

    @torch.no_grad()
    def _foreseen(self, rollout: Rollout) -> Tensor:
        """[T,E]: what the model expected of every decision."""
        features = {name: item[:-1].flatten(0, 1) for name, item in rollout.features.items()}
        found = self._score(features, rollout.sample.flatten(0, 1), rollout.executed.flatten(0, 1))
        return found.view(rollout.valid.shape[:2])

    def _score(self, features: Features, sample: Tensor, action: Tensor) -> Tensor:
        chosen = self.learner.policy.critic_action(features, sample, action)
        return self.model.score(features, chosen, self.discount)


def value_of(learner: OffPolicy) -> Value:
    """The mean of the critics for the actor's own decision."""

    @torch.no_grad()
    def value(features: Features) -> Tensor:
        action = learner.policy.rsample(features, learner.generator).action
        found: Tensor = learner.critic(features, action).mean(0)
        return found

    return value
