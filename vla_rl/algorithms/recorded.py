"""RECAP, and imitation weighed by advantages, from recorded episodes alone; and whether these can teach.

Returns and indicators are those of ``recap.py``, with a decision at every control step.  The value that an advantage is
bootstrapped with is that of the observation ``N`` control steps later, and advantages for ``N`` to ``N + H - 1`` are
averaged, ``H`` actions being a decision of the policy: at one of these steps whoever was recorded decided anew.

**Only what led to success can be good**, deviating from the paper: the best ``positive`` of it (a person's actions are
always good).  A failure lasts until the time limit, so most steps are a failure's; whatever share of all of them is
called good, errors of the value choose many of those, and how many of the successes are left depends on how many
episodes succeeded.

**Values are cross-fitted.**  Episodes are dealt into ``K`` folds, and the value of an observation is that of the
network that was fitted without its episode.  A network that has seen an episode remembers how it ended, and the better
it does, the more its advantages are noise.

**Good decisions are drawn more often** than they are among what is recorded, of which failures, that last until the
time limit, have most: what is drawn in proportion teaches the policy of good decisions by one in seven.

Advantage-weighted regression (Peng et al. 2019, arXiv 1910.00177; here with RECAP's returns and value):

    w = min(exp(A / (temperature std(A))), limit)

is how much more often a decision is drawn to be imitated; the policy is not conditioned.  Deviations: the temperature
is in standard deviations of the advantages, and weights are frequencies, which have the same mean gradient.

**Can the data teach?**  An advantage says something only where (a) some episodes fail and others succeed, (b) the value
sees which will, (c) different things were done in like situations, and (d) what was done decides.  :func:`measure`
says so of episodes that the networks have not seen: (b) as the share of the variance of returns that the value
explains, beside what task and clock alone explain; (d) as the share that the action explains besides; (c) as the share
of the variance of actions that is left among the nearest decisions of other episodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.chunks import Chunks
from vla_rl.algorithms.decisions import mean
from vla_rl.algorithms.recap import Outcomes, Recap, RecapConfig, returns, threshold
from vla_rl.contract.batch import OneProcess, Reducer, Rollout
from vla_rl.contract.config import above_zero, within
from vla_rl.policies.advantage_conditioned import INDICATOR, POSITIVE
from vla_rl.policies.critics import DistributionalValue

FOLD = "fold"  # among the features of recorded decisions, int [N]
_ACTION = "action"  # what the measure's second value reads besides
_NEIGHBOURS, _ASKED, _AMONG = 8, 1000, 4000  # nearest decisions of so many, looked for among so many
_Z95 = 1.96
Report = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class RecordedConfig(RecapConfig):
    """RECAP's, where ``positive`` is a share of the decisions that led to success; how often what is good is drawn."""

    positive: float = within(0.5, 0.0, 1.0)  # p: of a task's autonomous decisions in episodes that succeeded
    positive_share: float = within(0.8, 0.0, 1.0)  # of a minibatch: decisions that are good


@dataclass(frozen=True)
class WeightedConfig(RecordedConfig):
    """RECAP's returns and value, of which both shares and ``dropout`` have no effect; and the weights."""

    temperature: float = above_zero(1.0)  # of the weights, in standard deviations of the advantages
    limit: float = above_zero(20.0)  # of a weight


@dataclass(frozen=True)
class Recorded:
    """``N`` decisions of whole episodes, one at every control step, in order.

    chunks    with ``FOLD`` among their features
    outcomes  of all of them
    episode   int [N]
    success   bool [N]  of the decision's episode
    """

    chunks: Chunks
    outcomes: Outcomes
    episode: Tensor
    success: Tensor

    @classmethod
    def of(
        cls,
        chunks: Chunks,
        episode: Tensor,
        success: Tensor,
        person: Tensor,
        time_limit: int,
        config: RecapConfig,
        folds: int,
    ) -> Recorded:
        """``episode`` int [N], 0, 1, ... in order; ``success`` bool [episodes]; ``person`` bool [N,H] chose an action.

        Of a decision in which a person acted only what that person chose is imitated.
        """
        length = torch.bincount(episode)
        to_end = (length.cumsum(0))[episode] - torch.arange(len(episode))
        target = returns(to_end, success[episode], time_limit, config.failure_cost)
        acted = person & chunks.counts
        human = acted.any(-1)
        features = {**chunks.features, FOLD: _dealt(success, folds)[episode]}
        chosen = replace(chunks, counts=torch.where(human[:, None], acted, chunks.counts), features=features)
        return cls(chosen, Outcomes(target, to_end, to_end, human), episode, success[episode])

    def select(self, index: Tensor) -> Recorded:
        """The decisions at ``index`` (positions or a mask)."""
        return Recorded(
            self.chunks.select(index), self.outcomes.select(index), self.episode[index], self.success[index]
        )


def _dealt(success: Tensor, folds: int) -> Tensor:
    """The fold int [episodes] of each: successes and failures are dealt in turn, so that all folds have both."""
    number = torch.where(success, success.long().cumsum(0), (~success).long().cumsum(0))
    return number % folds


class CrossFitted(nn.Module):
    """``DistributionalValue`` of features with ``FOLD``, by the network that was fitted without that fold."""

    def __init__(self, sizes: Mapping[str, int], folds: int) -> None:
        super().__init__()
        self.values = nn.ModuleList(DistributionalValue(sizes) for _ in range(folds))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """``V(o)`` [B] in [-1, 0]."""
        every = torch.stack([value(features) for value in self.values])
        return every.gather(0, features[FOLD].to(every.device)[None]).squeeze(0)

    def loss(self, features: Mapping[str, Tensor], target: Tensor) -> Tensor:
        """The mean over networks of the cross-entropy of what each may see, to the returns ``target`` [B]."""
        target, losses = target.to(next(self.parameters()).device), []
        for number, value in enumerate(self.values):
            seen = features[FOLD] != number
            if seen.any():
                part = {name: item[seen] for name, item in features.items()}
                losses.append(value.loss(part, target[seen.to(target.device)]))  # type: ignore[operator]  # a module
        return torch.stack(losses).mean() * len(losses)

    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Set the input mean and standard deviation from data; call once, before the first step."""
        for value in self.values:
            value.calibrate(features, reducer)  # type: ignore[operator]  # a module


class RecordedRecap(Recap):
    """RECAP of what is recorded: :meth:`fit_value` first, then every :meth:`update` takes ``block`` policy steps.

    ``value`` is ``CrossFitted``.  Its state leaves the recorded decisions out, which the run reads again.
    """

    config: RecordedConfig

    def __init__(self, *given: Any, recorded: Recorded, block: int) -> None:
        """``given`` as for ``Recap``, whose ``lookahead`` counts control steps here."""
        super().__init__(*given)
        self.recorded, self.block = recorded, block
        self.value_optimizer = self.optimizer_of([self.value])
        self._labelled: tuple[Chunks, Tensor, dict[str, float]] | None = None

    def optimizer_of(self, values: Sequence[nn.Module]) -> torch.optim.AdamW:
        """Of the networks of ``values``, each clipped by itself: no gradient tells it what it may not see."""
        groups = [[*network.parameters()] for value in values for network in value.values]  # type: ignore[union-attr]
        decay = self.config.weight_decay
        parameters = [{"params": group} for group in groups]
        return torch.optim.AdamW(parameters, self.config.value_lr, weight_decay=decay, fused=True)

    def fit_value(self, report: Report) -> None:
        """``config.value_steps`` gradient steps; ``report(step, metrics)`` is called after each."""
        for step in range(self.config.value_steps):
            report(step, self._value_step(self.recorded.chunks, self.recorded.outcomes))

    def update(self, rollout: Rollout) -> dict[str, float]:
        """``block`` gradient steps of the policy; ``rollout`` has nothing new in it."""
        if self._labelled is None:
            chunks, metrics = self.labelled(self.recorded.chunks, self.recorded.outcomes)
            self._labelled = chunks, self.recorded.outcomes.human, metrics
        chunks, human, metrics = self._labelled
        return {**metrics, **mean([self._policy_step(chunks, human) for _ in range(self.block)])}

    def advantage(self, outcomes: Outcomes, value: Tensor) -> Tensor:
        """The mean of those ``N``, ``N + 1``, ... control steps ahead, for as many as a decision has."""
        first = self.config.lookahead
        ahead = range(first, first + self.policy.horizon)
        return torch.stack([outcomes.advantage(value, steps, self.time_limit) for steps in ahead]).mean(0)

    def good(self, task: Tensor, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        """The best ``positive`` of each task's autonomous decisions that led to success, and what a person did."""
        led = self.recorded.success & ~outcomes.human
        return outcomes.human | (led & (advantage >= threshold(advantage, task, led, self.config.positive)))

    def label(self, chunks: Chunks, outcomes: Outcomes, advantage: Tensor) -> tuple[Chunks, dict[str, float]]:
        """As ``Recap`` does, and good ones are ``positive_share`` of a minibatch."""
        labelled, metrics = super().label(chunks, outcomes, advantage)
        good, share = labelled.features[INDICATOR] == POSITIVE, self.config.positive_share
        self.sampler = _Drawn(torch.where(good, share / good.sum(), (1.0 - share) / (~good).sum()))
        return labelled, metrics

    def asked(self, batch: Chunks) -> Chunks:
        """As ``Recap`` does, and where the policy is: what is recorded stays on the host."""
        return _moved(super().asked(batch), next(iter(self.parameters.values())).device)

    def _fresh(self, chunks: Chunks, outcomes: Outcomes) -> Tensor:
        """All of it: what says how good a decision was needs no weight for its age."""
        return torch.ones_like(outcomes.human)


class WeightedImitation(RecordedRecap):
    """Decisions are drawn in proportion to ``w``, and the policy imitates them as anything."""

    name = "advantage-weighted imitation"
    config: WeightedConfig

    def label(self, chunks: Chunks, outcomes: Outcomes, advantage: Tensor) -> tuple[Chunks, dict[str, float]]:
        weight = advantage_weights(advantage, self.config)
        self.sampler = _Drawn(torch.where(outcomes.human, weight.clamp_min(1.0), weight))
        effective = weight.sum().square() / weight.square().sum() / len(weight)
        return chunks, {"policy/effective_share": float(effective)}

    def asked(self, batch: Chunks) -> Chunks:
        return _moved(batch, next(iter(self.parameters.values())).device)


def _moved(batch: Chunks, device: torch.device) -> Chunks:
    features = {name: item.to(device) for name, item in batch.features.items()}
    return Chunks(features, *(item.to(device) for item in (batch.actions, batch.counts, batch.task, batch.version)))


def advantage_weights(advantage: Tensor, config: WeightedConfig) -> Tensor:
    """``w`` [N] of ``advantage`` [N]."""
    scale = config.temperature * advantage.std(correction=0).clamp_min(1e-6)
    return (advantage / scale).clamp_max(math.log(config.limit)).exp()


class _Drawn:
    """A ``ChunkSampler`` in proportion to ``weights`` [N], which follow from the value's state."""

    def __init__(self, weights: Tensor) -> None:
        self._sums = weights.double().cpu().cumsum(0)

    def draw(self, chunks: Chunks, human: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """Positions, with replacement."""
        at = torch.rand(size, generator=generator, dtype=torch.float64) * self._sums[-1]
        return torch.searchsorted(self._sums, at, right=True).clamp_max(len(self._sums) - 1).to(chunks.task.device)

    def record(self, losses: Tensor) -> None:
        """They change nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


# -- whether the data can teach ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """What :func:`measure` finds; shares are of the variance of returns in episodes that were not fitted.

    by_clock   what the mean of the task at that control step explains
    by_value   what the value of the observation explains
    by_action  what the action explains besides: (share, its lower and upper 95 % limit over episodes)
    coverage   the variance of actions among the nearest decisions of other episodes, as a share of that of the task
    """

    by_clock: float
    by_value: float
    by_action: tuple[float, float, float]
    coverage: float

    def warnings(self) -> list[str]:
        """Sentences about what makes it doubtful that an advantage says anything."""
        found = []
        if self.by_value < self.by_clock + 0.02:
            found.append(
                "the value sees hardly more than task and clock say, so advantages are mostly luck; record more "
                "episodes, or look whether the policy's features show what decides."
            )
        if self.by_action[1] <= 0.0:
            found.append(
                "that actions matter is not shown (the interval reaches 0), so do not expect more than from imitating "
                "the successes; record more episodes, or more different actions."
            )
        if self.coverage < 0.05:
            found.append(
                "in like situations nearly the same was always done, so there is nothing better to prefer; record with "
                "more noise, or by several policies or people."
            )
        return found


def measure(learner: RecordedRecap, sizes: Mapping[str, int], generator: torch.Generator, report: Report) -> Measure:
    """Whether the decisions of ``learner``, whose value is fitted, can teach; ``sizes`` are of what its value reads.

    Two more values are fitted, as long as its own, to decisions whose whole chunk was executed: one reads the chunk as
    well.  Past an episode's end a chunk would show that it ends.
    """
    horizon, recorded = learner.policy.horizon, learner.recorded
    seen = {name: recorded.chunks.features[name] for name in (*sizes, FOLD)}  # and no pictures
    recorded = replace(recorded, chunks=replace(recorded.chunks, features=seen))
    by_value = explained(recorded, learner.predicted(recorded.chunks))
    whole = recorded.select(recorded.outcomes.to_end >= horizon)
    actions = whole.chunks.actions[:, :horizon].flatten(1).float()
    with_action = replace(whole, chunks=replace(whole.chunks, features={**whole.chunks.features, _ACTION: actions}))
    given = {**sizes, _ACTION: actions.shape[1]}
    device = next(learner.value.parameters()).device
    pair = [CrossFitted(item, len(learner.value.values)).to(device) for item in (sizes, given)]  # type: ignore[arg-type]
    without, with_it = _fitted(learner, pair, with_action, generator, report)
    gain = _gain(with_action, without, with_it)
    inputs = pair[0].values[0].trunk.inputs(whole.chunks.features)  # type: ignore[union-attr,operator]  # a module
    return Measure(explained(recorded, _by_clock(recorded)), by_value, gain, _coverage(inputs.cpu(), whole, generator))


def _fitted(
    learner: RecordedRecap, values: Sequence[nn.Module], recorded: Recorded, generator: torch.Generator, report: Report
) -> list[Tensor]:
    """What each of ``values``, fitted to the same minibatches, says of ``recorded`` [N]."""
    config = learner.config
    every: list[Any] = list(values)
    optimizer = learner.optimizer_of(every)
    for value in every:
        value.calibrate(recorded.chunks.features, OneProcess())
    for step in range(config.value_steps):
        index = torch.randint(len(recorded.chunks), (config.batch,), generator=generator)
        features = recorded.chunks.select(index).features
        loss = sum(value.loss(features, recorded.outcomes.target[index]) for value in every)
        learner.descend(optimizer, loss)
        report(step, {"value/loss": float(loss.detach()) / len(every)})
    return [learner.predicted(recorded.chunks, value) for value in every]


def explained(recorded: Recorded, predicted: Tensor) -> float:
    """1 - the squared error of ``predicted`` [N] over the variance of the returns; below 0: worse than a constant."""
    target = recorded.outcomes.target
    spread = (target - target.mean()).square().sum().clamp_min(1e-12)
    return float(1.0 - (target - predicted).square().sum() / spread)


def _gain(recorded: Recorded, without: Tensor, with_it: Tensor) -> tuple[float, float, float]:
    """By how much more ``with_it`` explains than ``without`` does, and its interval over episodes."""
    target = recorded.outcomes.target
    better = (target - without).square() - (target - with_it).square()
    _, number = recorded.episode.unique(return_inverse=True)
    by_episode = torch.zeros(int(number.max()) + 1).index_add_(0, number, better)
    spread = (target - target.mean()).square().sum().clamp_min(1e-12)
    error = _Z95 * by_episode.std(correction=0) * math.sqrt(len(by_episode))
    low, middle, high = ((by_episode.sum() + sign * error) / spread for sign in (-1.0, 0.0, 1.0))
    return float(middle), float(low), float(high)


def _by_clock(recorded: Recorded) -> Tensor:
    """The mean return [N] of the decisions of other folds at the same task and control step; theirs in all if none."""
    target, fold = recorded.outcomes.target, recorded.chunks.features[FOLD]
    time = torch.arange(len(target)) - torch.searchsorted(recorded.episode, recorded.episode)
    key = recorded.chunks.task * (int(time.max()) + 1) + time
    found = torch.empty_like(target)
    for number in fold.unique().tolist():
        others, own = fold != number, fold == number
        total, count = (
            torch.zeros(int(key.max()) + 1).index_add_(0, key[others], item[others])
            for item in (target, torch.ones_like(target))
        )
        known = count[key[own]] > 0
        found[own] = torch.where(known, (total / count.clamp_min(1))[key[own]], target[others].mean())
    return found


def _coverage(inputs: Tensor, recorded: Recorded, generator: torch.Generator) -> float:
    """The variance of first actions among the nearest decisions, in standardised ``inputs`` [N,F], of other episodes
    with the same task, as a share of that within the task.
    """
    chosen = torch.randperm(len(inputs), generator=generator)[:_AMONG]
    task, episode, action = (item[chosen] for item in (recorded.chunks.task, recorded.episode, recorded.chunks.actions))
    first, near, within, whole = action[:, 0], inputs[chosen].detach(), 0.0, 0.0
    for number in task.unique().tolist():
        own = (task == number).nonzero()[:, 0]
        if len(own) <= 2 * _NEIGHBOURS:
            continue
        asked = own[:_ASKED]
        distance = torch.cdist(near[asked], near[own])
        distance.masked_fill_(episode[asked][:, None] == episode[own][None], math.inf)
        nearest = own[distance.topk(_NEIGHBOURS, largest=False).indices]
        share = len(own) / len(asked)
        within += share * float(first[nearest].var(1).sum())
        whole += share * len(asked) * float(first[own].var(0).sum())
    return within / whole if whole else math.nan
