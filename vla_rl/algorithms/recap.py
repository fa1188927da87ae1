"""RECAP (Physical Intelligence 2025, pi*0.6, arXiv 2511.14759): imitate everything, conditioned on how good it was.

Returns count the time to completion.  With ``n`` actions left of an episode, ``S`` the time limit and ``C`` the cost of
a failure, in time limits:

    G  = clip(-(n - 1) / S - C [failure], -1, 0)

A distributional value learns ``p(G | o)`` in 201 bins by cross-entropy (``policies/critics.py``), and
``N`` decisions later

    A  = clip(-(actions between) / S + V(o_N), -1, 0) - V(o),    or G - V(o) where the episode ends before
    I  = 1[A >= eps],    eps: the (1 - p) quantile of the task's autonomous decisions

says which decisions were good; what a person did, in an intervention or a demonstration, always is.  The policy
imitates all of them with ``I`` as an input, left out with probability ``dropout``, and acts as if ``I = 1``
(``policies/advantage_conditioned.py``).  Of a decision in which a person intervened, only the actions that the person
chose are imitated.

An episode without success is a failure, at the time limit too; one that a person rescued is a success, as in the paper.
One that a simulator's breakdown ended, or that has not ended yet, has no return and is left out.  Data of older
policies need no importance weight, since the input says how good they were; ``max_age`` bounds their age nevertheless,
counted in updates from the learner's version.  It does not hold for what a person did, and the value learns from all.

Deviations: ``n`` counts low-level actions, ``N`` decisions; ``>=`` and not ``>``, for returns that are equal would
leave no good decision; both sides of the advantage are clipped as the value's target is, so that what cannot succeed
any more has the advantage 0 and not a negative one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import (
    DEMONSTRATED,
    ChunkLearner,
    Chunks,
    ChunkSampler,
    StepConfig,
    chunks_of,
    joined,
)
from vla_rl.algorithms.decisions import ages, flatten, mean
from vla_rl.contract.batch import OneProcess, Rollout
from vla_rl.contract.config import above_zero, at_least, within
from vla_rl.policies.advantage_conditioned import INDICATOR, NEGATIVE, POSITIVE, UNKNOWN
from vla_rl.policies.critics import DistributionalValue

_PART = 4096  # decisions that are valued at a time


@dataclass(frozen=True)
class RecapConfig(StepConfig):
    """The share of good decisions, and the schedule of gradient steps."""

    positive: float = within(0.4, 0.0, 1.0)  # p: of a task's autonomous decisions (paper: first .3, then .4)
    lookahead: int = at_least(10, 1)  # N: decisions until the value that an advantage is bootstrapped with
    failure_cost: float = at_least(1.0, 0)  # C, in time limits
    dropout: float = within(0.3, 0.0, 1.0)  # of the indicator
    max_age: int = at_least(1000, 0)  # updates after which autonomous decisions are no longer imitated
    value_steps: int = at_least(50, 1)  # gradient steps of the value per rollout
    steps: int = at_least(50, 1)  # of the policy
    value_lr: float = above_zero(1e-3)


@dataclass(frozen=True)
class Outcomes:
    """What became of ``N`` decisions of ended episodes, whose decisions follow each other.

    target     float [N]  G
    to_end     int [N]    low-level actions until the episode's end, those of the decision included
    remaining  int [N]    decisions until it, the decision included
    human      bool [N]   whether a person acted in the decision, or in all of them (demonstrations)
    """

    target: Tensor
    to_end: Tensor
    remaining: Tensor
    human: Tensor

    def select(self, index: Tensor) -> Outcomes:
        return Outcomes(*(getattr(self, item.name)[index] for item in fields(self)))

    def advantage(self, value: Tensor, lookahead: int, time_limit: int) -> Tensor:
        """A [N], given the ``value`` [N] of each decision's observation."""
        ahead = self.remaining > lookahead
        later = torch.arange(len(value), device=value.device) + lookahead * ahead
        between = (self.to_end - self.to_end[later]) / time_limit
        return torch.where(ahead, (value[later] - between).clamp(-1.0, 0.0), self.target) - value


def returns(to_end: Tensor, success: Tensor, time_limit: int, failure_cost: float) -> Tensor:
    """``G`` of decisions with ``to_end`` actions left, those of the decision included, of an episode that ``success``
    says succeeded.
    """
    cost = torch.where(success, 0.0, failure_cost)
    return (-(to_end - 1) / time_limit - cost).clamp(-1.0, 0.0)


def outcomes_of(rollout: Rollout, time_limit: int, failure_cost: float) -> tuple[Outcomes, Tensor]:
    """What became of the decisions of ``rollout``, and bool [T,E]: of which this is known.

    They are in the order of ``flatten``.
    """
    active, ends = rollout.valid.any(-1), rollout.terminated | rollout.truncated
    count = rollout.valid.sum(-1)
    to_end, remaining = torch.zeros_like(count), torch.zeros_like(count)
    known, success = torch.zeros_like(ends), torch.zeros_like(ends)
    for t in reversed(range(len(ends))):
        later = min(t + 1, len(ends) - 1)  # of the last one there is none, and nothing is known
        carried = ~ends[t] & active[t]
        to_end[t] = count[t] + carried * to_end[later]
        remaining[t] = active[t].long() + carried * remaining[later]
        # A breakdown ends an episode by a decision without valid actions.
        known[t] = active[t] & (ends[t] | (known[later] if later > t else False))
        success[t] = torch.where(ends[t], rollout.success[t], success[later])
    target = returns(to_end, success, time_limit, failure_cost)
    human = (rollout.intervened & rollout.valid).any(-1) | (rollout.version == DEMONSTRATED)
    return Outcomes(*(flatten(item, known) for item in (target, to_end, remaining, human))), known


def threshold(advantage: Tensor, task: Tensor, autonomous: Tensor, positive: float) -> Tensor:
    """eps of each decision's task, [N]: the ``1 - positive`` quantile of the ``advantage`` [N] of its autonomous ones.

    It is linear between two advantages, and infinite for a task without autonomous decisions.
    """
    found = torch.full_like(advantage, math.inf)
    for number in task[autonomous].unique().tolist():
        own = task == number
        found[own] = torch.quantile(advantage[own & autonomous], 1.0 - positive)
    return found


class Recap(ChunkLearner[RecapConfig]):
    """A ``LoopLearner`` of an ``AdvantageConditioned`` policy, with its value."""

    name = "RECAP"
    resumed = (*ChunkLearner.resumed, "value", "value_optimizer", "sampler")

    def __init__(
        self,
        policy: object,
        parameters: Mapping[str, nn.Parameter],
        value: DistributionalValue,
        time_limit: int,
        config: RecapConfig,
        generator: torch.Generator,
        sampler: ChunkSampler | None = None,
    ) -> None:
        """``time_limit``: S, in low-level actions; ``sampler`` None: tasks are equally likely.

        Raises UserError for a policy without a loss for every action.
        """
        super().__init__(policy, parameters, None, config, generator, sampler)
        self.value, self.time_limit = value, time_limit
        self.outcomes: Outcomes | None = None
        decay = config.weight_decay
        self.value_optimizer = torch.optim.AdamW(value.parameters(), config.value_lr, weight_decay=decay, fused=True)

    # -- experience -------------------------------------------------------------------------------------------------

    def add(self, rollout: Rollout) -> int:
        """Keep the decisions of the episodes that ended in ``rollout``; returns how many.

        Demonstrations are rollouts of version ``DEMONSTRATED``.  Raises ContractError for a decision of a version that
        the learner has not reached.
        """
        ages(rollout, self.policy.version)
        outcomes, known = outcomes_of(rollout, self.time_limit, self.config.failure_cost)
        human = rollout.intervened & rollout.valid
        counts = torch.where(human.any(-1, keepdim=True), human, rollout.valid) & known[..., None]
        return self.take(chunks_of(rollout, counts, self.policy), outcomes)

    def take(self, new: Chunks, outcomes: Outcomes) -> int:
        """Keep decisions of ended episodes and what became of them, ``N`` each; returns how many."""
        if len(new):
            chunks = joined([self.kept, new]) if self.kept else new
            parts = [self.outcomes, outcomes] if self.outcomes else [outcomes]
            merged = Outcomes(*(torch.cat([getattr(part, item.name) for part in parts]) for item in fields(Outcomes)))
            newest = torch.arange(len(chunks), device=chunks.task.device)[-self.config.capacity :]
            self.kept, self.outcomes = chunks.select(newest), merged.select(newest)
        return len(new)

    # -- learning ---------------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Add ``rollout``, fit the value, say which decisions were good, and imitate; nothing without an ended episode.

        Raises NonFiniteError before a NaN could enter the weights.
        """
        new = self.add(rollout)
        dropped = int(rollout.valid.any(-1).sum()) - new
        metrics = {"rollout/decisions": float(new), "rollout/unfinished_decisions": float(dropped)}
        return {**metrics, **self.learn(self.config.steps)}

    def learn(self, steps: int) -> dict[str, float]:
        """Fit the value, say which decisions were good, and take ``steps`` gradient steps of the policy.

        The value takes ``value_steps / steps`` of the config as many.  Without an ended episode nothing happens, and
        there are no metrics.
        """
        if self.kept is None or self.outcomes is None:
            return {}
        value_steps = round(steps * self.config.value_steps / self.config.steps)
        infos = [self._value_step(self.kept, self.outcomes) for _ in range(value_steps)]
        learnable, labels = self.labelled(self.kept, self.outcomes)
        human = self.outcomes.human[self._fresh(self.kept, self.outcomes)]
        infos += [self._policy_step(learnable, human) for _ in range(steps)]
        return {**labels, "replay/size": float(len(self.kept)), **mean(infos)}

    def labelled(self, chunks: Chunks, outcomes: Outcomes) -> tuple[Chunks, dict[str, float]]:
        """The decisions to imitate, with their labels, and metrics."""
        value = self.predicted(chunks)
        advantage = self.advantage(outcomes, value)
        new, metrics = self.label(chunks, outcomes, advantage)
        fresh = self._fresh(chunks, outcomes)
        metrics |= {
            "value/mean": float(value.mean()),
            "value/error": float((value - outcomes.target).square().mean().sqrt()),
            "policy/advantage_std": float(advantage.std(correction=0)),
            "rollout/human": float(outcomes.human.double().mean()),
            "rollout/too_old": float((~fresh).sum()),
        }
        return new if fresh.all() else new.select(fresh), metrics

    def advantage(self, outcomes: Outcomes, value: Tensor) -> Tensor:
        """A [N], given the ``value`` [N] of each decision's observation."""
        return outcomes.advantage(value, self.config.lookahead, self.time_limit)

    def label(self, chunks: Chunks, outcomes: Outcomes, advantage: Tensor) -> tuple[Chunks, dict[str, float]]:
        """``chunks`` with ``INDICATOR`` among their features, given the ``advantage`` [N] of each, and metrics."""
        autonomous, good = ~outcomes.human, self.good(chunks.task, outcomes, advantage)
        indicator = torch.where(good, POSITIVE, NEGATIVE)
        share = float(good[autonomous].double().mean()) if autonomous.any() else 1.0
        return replace(chunks, features={**chunks.features, INDICATOR: indicator}), {"policy/positive": share}

    def good(self, task: Tensor, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        """bool [N]: which decisions were good, given their ``task`` and ``advantage`` [N]."""
        return outcomes.human | (advantage >= threshold(advantage, task, ~outcomes.human, self.config.positive))

    def asked(self, batch: Chunks) -> Chunks:
        """A minibatch as it is imitated: some decisions have no label."""
        left_out = torch.rand(len(batch), generator=self.generator) < self.config.dropout
        indicator = batch.features[INDICATOR].masked_fill(left_out.to(batch.task.device), UNKNOWN)
        return replace(batch, features={**batch.features, INDICATOR: indicator})

    def _fresh(self, chunks: Chunks, outcomes: Outcomes) -> Tensor:
        """bool [N]: what is imitated; decisions that are too old are not."""
        age = self.policy.version - chunks.version
        return outcomes.human | (age <= self.config.max_age)

    @torch.no_grad()
    def predicted(self, chunks: Chunks, value: nn.Module | None = None) -> Tensor:
        """What ``value``, or the learner's own, says of the observations before ``chunks``, [N]."""
        parts = torch.arange(len(chunks), device=chunks.task.device).split(_PART)
        found = [(value or self.value)(chunks.select(part).features) for part in parts]
        return torch.cat(found).to(chunks.task.device)

    def _value_step(self, chunks: Chunks, outcomes: Outcomes) -> dict[str, float]:
        if not self.steps and not self.value_optimizer.state:
            self.value.calibrate(chunks.features, OneProcess())
        index = torch.randint(len(chunks), (self.config.batch,), generator=self.generator).to(chunks.task.device)
        loss = self.value.loss(chunks.select(index).features, outcomes.target[index])
        self.descend(self.value_optimizer, loss)
        return {"value/loss": float(loss.detach())}

    def _policy_step(self, chunks: Chunks, human: Tensor) -> dict[str, float]:
        config = self.config
        batch = self.asked(chunks.select(self.sampler.draw(chunks, human, config.batch, self.generator)))
        losses = self.policy.imitation_losses(batch.features, batch.actions, config.draws, self.generator)
        loss = losses[batch.counts].mean()
        self.descend(self.optimizer, loss)
        self.sampler.record((losses.detach() * batch.counts).sum(1) / batch.counts.sum(1))
        self.steps += 1
        return {"policy/loss": float(loss.detach())}

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """And what became of the decisions."""
        outcomes = self.outcomes
        found = {item.name: getattr(outcomes, item.name) for item in fields(Outcomes)} if outcomes else {}
        return {**super().state_dict(), "outcomes": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.outcomes = Outcomes(**state["outcomes"]) if state["outcomes"] else None
