"""Which of several policies is best, from imagined rollouts of all and real episodes of some.

In log-odds, with ``t`` the true success of each of ``k`` policies, one Gaussian linear model:

    real      s_i of n_i succeed          binomial, of probability 1/(1 + exp(-t_i)); its curvature is at the mode
    imagined  x_i = t_i - a + e_i + m_i   a: by how much dreams are too strict; e_i: the error of the world model for
                                          this policy, variance ``spread^2``; m: noise of rollouts from the same starts

(empirical logits, Agresti 2013, "Categorical Data Analysis", 3.1; the spread between policies by DerSimonian and Laird
1986).  ``a`` is common, so it says nothing about which of two is better, and the starts are common, so their noise
partly cancels.  The posterior has a mean and a covariance of all ``t``: what is decided and what is not.

A search for the best of several, with imagined rollouts or without, plays a few episodes of the two policies that are
likeliest the best, again and again, until one of them is good enough with probability .95 (top-two sampling, Russo
2016, "Simple Bayesian algorithms for best-arm identification", arXiv 1602.08448; deviation: both of the two are played,
no coin chooses one).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch

from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import Z95
from vla_rl.evaluation.stats import Floats

SPREAD = 0.35  # prior guess: 8 points at a success of one half; it counts as two degrees of freedom
_WIDTH = 3.0  # prior standard deviation of a policy's log-odds: from 5 to 95 %
_STRICTNESS = 1.0  # prior standard deviation of ``a``
_MOST = 1 << 17  # real episodes; more is no plan
_DRAWS = 20_000
_HALF = 2.4  # deviations: 1.96 hold 87 % where few real episodes hardly ever fail, and the spread is a guess; simulated
_NEWTON = 40  # steps to the mode of a concave density, of at most 1 in log-odds; the last ones change nothing


@dataclass(frozen=True)
class Played:
    """A policy's imagined outcomes bool [n], from the same starts for all, and its real (successes, episodes)."""

    name: str
    imagined: np.ndarray
    real: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Estimate:
    """True success of a policy with its 95 % interval, and the probability that it is the best."""

    name: str
    success: float
    low: float
    high: float
    best: float


@dataclass(frozen=True)
class Pair:
    """``better`` succeeds more often than ``worse`` with ``probability``.

    ``episodes``: real ones of each of the two that would decide it, if the estimates are right; 0 where it is decided,
    None where no reasonable number would.  ``episodes_alone``: the same without any imagined rollout.
    """

    better: str
    worse: str
    probability: float
    episodes: int | None
    episodes_alone: int | None

    @property
    def decided(self) -> bool:
        return self.episodes == 0


@dataclass(frozen=True)
class Ranking:
    """``estimates``, the best first; ``pairs`` of all policies; ``strictness`` and ``spread`` of the world model."""

    estimates: tuple[Estimate, ...]
    pairs: tuple[Pair, ...]
    strictness: float
    spread: float


def rank(policies: Sequence[Played]) -> Ranking:
    """Raises UserError for fewer than two policies, equal names, or other numbers of imagined rollouts."""
    _check(policies)
    imagined = np.stack([np.asarray(one.imagined, bool) for one in policies])
    noise, spread = noise_covariance(imagined), _spread(policies)
    mean, covariance, strictness = posterior(policies, imagined, noise, spread)
    estimates = _estimates(policies, mean, covariance)
    order = np.argsort(-mean, kind="stable")
    pairs = [_pair(policies, mean, covariance, i, j) for i, j in combinations(order.tolist(), 2)]
    return Ranking(tuple(estimates[i] for i in order), tuple(pairs), strictness, spread)


def _check(policies: Sequence[Played]) -> None:
    names = [one.name for one in policies]
    if len(policies) < 2 or len(set(names)) < len(names):
        raise UserError(f"{names} are no two policies with names of their own, so there is nothing to rank; name more.")
    lengths = {len(one.imagined) for one in policies}
    if len(lengths) > 1 or lengths == {0}:
        raise UserError(
            f"the policies have {sorted(lengths)} imagined rollouts, so they cannot be compared start by start; play "
            "all of them from the same starts."
        )


def log_odds(successes: float, episodes: int) -> float:
    """The empirical logit: finite without a success or a failure."""
    return math.log((successes + 0.5) / (episodes - successes + 0.5))


def noise_covariance(imagined: np.ndarray) -> Floats:
    """[k,k] of the empirical logits of ``imagined`` bool [k,n]: the starts are the same, so outcomes are correlated."""
    n = imagined.shape[1]
    rates = (imagined.sum(1) + 0.5) / (n + 1)
    slope = 1.0 / (rates * (1.0 - rates))
    deviations = imagined - imagined.mean(1, keepdims=True)
    joint: Floats = deviations @ deviations.T / n**2 * slope[:, None] * slope
    # The variance of an empirical logit, which is not 0 where all outcomes are equal.
    np.fill_diagonal(joint, 1.0 / (imagined.sum(1) + 0.5) + 1.0 / ((~imagined).sum(1) + 0.5))
    return joint


def _spread(policies: Sequence[Played]) -> float:
    """Standard deviation of the world model's error between policies: the guess, and those whose truth is known."""
    known = [one for one in policies if one.real[1]]
    freedom = max(0, len(known) - 1)
    variance = _between(known) if freedom else 0.0
    return math.sqrt((freedom * variance + 2 * SPREAD**2) / (freedom + 2))


def _between(known: Sequence[Played]) -> float:
    """DerSimonian and Laird's variance between two or more policies, at least 0."""
    both = [(one.real, (int(one.imagined.sum()), len(one.imagined))) for one in known]
    gap = np.array([log_odds(*real) - log_odds(*dream) for real, dream in both])
    noise = np.array([_variance(*real) + _variance(*dream) for real, dream in both])
    weight = 1.0 / noise
    centre = float((weight * gap).sum() / weight.sum())
    excess = float((weight * (gap - centre) ** 2).sum()) - (len(known) - 1)
    return max(0.0, excess / float(weight.sum() - (weight**2).sum() / weight.sum()))


def _variance(successes: int, episodes: int) -> float:
    return 1.0 / (successes + 0.5) + 1.0 / (episodes - successes + 0.5)


def posterior(
    policies: Sequence[Played], imagined: np.ndarray, noise: Floats, spread: float
) -> tuple[Floats, Floats, float]:
    """Mean [k] and covariance [k,k] of the true log-odds, and the mean of ``a``.

    ``imagined`` bool [k,n] are the outcomes of ``policies``, and ``noise`` is :func:`noise_covariance` of them.
    """
    k = len(policies)
    design = np.hstack([np.eye(k), -np.ones((k, 1))])  # of x, given (t, a)
    weight = np.linalg.inv(noise + spread**2 * np.eye(k))
    prior = np.diag([*[_WIDTH**-2] * k, _STRICTNESS**-2]) + design.T @ weight @ design
    shown = design.T @ weight @ np.array([log_odds(int(row.sum()), len(row)) for row in imagined])
    won, played = np.array([[*one.real] for one in policies] + [[0, 0]], np.float64).T
    mean = np.linalg.solve(prior, shown)
    for _ in range(_NEWTON):
        rate = _rates(mean)
        covariance = np.asarray(np.linalg.inv(prior + np.diag(played * rate * (1.0 - rate))), np.float64)
        mean = mean + np.clip(covariance @ (shown - prior @ mean + won - played * rate), -1.0, 1.0)
    return mean[:k], covariance[:k, :k], float(mean[k])


def _estimates(policies: Sequence[Played], mean: Floats, covariance: Floats) -> list[Estimate]:
    draws = np.random.default_rng(0).multivariate_normal(mean, covariance, _DRAWS, method="cholesky")
    best = np.bincount(draws.argmax(1), minlength=len(mean)) / _DRAWS
    half = _HALF * np.sqrt(np.diag(covariance))
    found = []
    for i, one in enumerate(policies):
        success, low, high = _rates(mean[i] + half[i] * np.array([0.0, -1.0, 1.0])).tolist()
        won, played = one.real if one.real[1] else (int(one.imagined.sum()), len(one.imagined))
        # Log-odds have no 0 and no 1, which is where a policy may be that was never seen to succeed, or to fail.
        ends = low if won else 0.0, high if won < played else 1.0
        found.append(Estimate(one.name, success, *ends, best=float(best[i])))
    return found


def _pair(policies: Sequence[Played], mean: Floats, covariance: Floats, i: int, j: int) -> Pair:
    """``i``, which is estimated to be better, and ``j``."""
    gap = float(mean[i] - mean[j])
    both = np.ix_([i, j], [i, j])
    deviation = math.sqrt(_difference_variance(covariance[both], np.zeros(2)))
    probability = 0.5 * (1.0 + math.erf(gap / deviation / math.sqrt(2.0)))
    rates = _rates(mean[[i, j]])
    alone = np.diag([_WIDTH**2] * 2)
    needed = (_episodes(prior, gap, rates) for prior in (covariance[both], alone))
    return Pair(policies[i].name, policies[j].name, probability, *needed)


def _episodes(prior: Floats, gap: float, rates: Floats) -> int | None:
    """The fewest real episodes of each of two policies after which ``gap`` is 1.96 standard deviations."""

    def decides(n: int) -> bool:
        return gap > Z95 * math.sqrt(_difference_variance(prior, n * rates * (1.0 - rates)))

    if decides(0):
        return 0
    return bisect_left(range(_MOST), True, lo=1, key=decides) if decides(_MOST) else None


def _difference_variance(prior: Floats, information: Floats) -> float:
    """Of the difference of two with covariance ``prior`` [2,2] after observations of ``information`` [2] about each."""
    covariance = np.linalg.inv(np.linalg.inv(prior) + np.diag(information))
    return float(covariance[0, 0] + covariance[1, 1] - 2.0 * covariance[0, 1])


CONFIDENCE = 0.95
TOLERANCE = 0.02  # of success: a policy that is so much worse than the best one is as good as found
MOST = 2000  # real episodes; a search ends there
_BATCH = 8  # episodes of each of the two
_SAMPLES = 1000
_UNINFORMED = 1e3  # spread of a world model that says nothing, in log-odds


@dataclass(frozen=True)
class Search:
    """Real ``episodes`` that were played, and the policy that was ``found``, by its number."""

    episodes: int
    found: int


@dataclass(frozen=True)
class Searches:
    """Real episodes int [n] of searches that know imagined rollouts, and of searches ``alone``, without them."""

    informed: np.ndarray
    alone: np.ndarray


def find_best(policies: Sequence[Played], truth: Floats, spread: float, rng: np.random.Generator) -> Search:
    """One search among ``policies`` that truly succeed with the probabilities ``truth`` [k]; at most ``MOST`` episodes.

    ``spread`` is how much the world model errs between policies (:class:`~vla_rl.evaluation.ranking.Ranking`).
    """
    imagined = np.stack([np.asarray(one.imagined, bool) for one in policies])
    noise, known, played = noise_covariance(imagined), list(policies), 0
    while True:
        mean, covariance, _ = posterior(known, imagined, noise, spread)
        success = _rates(rng.multivariate_normal(mean, covariance, _SAMPLES, method="cholesky"))
        best = int(np.bincount(success.argmax(1), minlength=len(known)).argmax())
        good = success[:, best] >= success.max(1) - TOLERANCE
        if good.mean() >= CONFIDENCE or played >= MOST:
            return Search(played, best)
        for i in (best, _rival(success, best)):
            won = int(rng.binomial(_BATCH, truth[i]))
            known[i] = replace(known[i], real=(known[i].real[0] + won, known[i].real[1] + _BATCH))
            played += _BATCH


def expected_searches(policies: Sequence[Played], found: Ranking, count: int = 25, seed: int = 0) -> Searches:
    """``count`` searches of each kind, whose true successes are drawn from what is believed now."""
    rng = np.random.default_rng(seed)
    imagined = np.stack([np.asarray(one.imagined, bool) for one in policies])
    mean, covariance, _ = posterior(policies, imagined, noise_covariance(imagined), found.spread)
    truths = _rates(rng.multivariate_normal(mean, covariance, count, method="cholesky"))
    informed, alone = (
        np.array([find_best(policies, truth, spread, rng).episodes for truth in truths])
        for spread in (found.spread, _UNINFORMED)
    )
    return Searches(informed, alone)


def _rival(success: Floats, best: int) -> int:
    """The policy that is most often the best of all others, from draws ``success`` [n,k]."""
    others = success.copy()
    others[:, best] = -1.0
    return int(np.bincount(others.argmax(1), minlength=success.shape[1]).argmax())


def _rates(log_odds: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-log_odds))


_MOST_KEPT = 4096  # recorded decisions that are kept: distances to more say no more
_QUANTILE = 0.99


@dataclass(frozen=True)
class Tried:
    """Recorded decisions, state and actions, in units of their standard deviations.

    ``limit``: 99 % of the recorded decisions have one of another episode that is nearer.
    """

    decisions: Floats  # [N,F]
    mean: Floats
    std: Floats
    limit: float

    @classmethod
    def of(cls, state: np.ndarray, chunk: np.ndarray, episode: np.ndarray) -> Tried:
        """From ``state`` [N,S], ``chunk`` [N,H,D] and ``episode`` int [N]; UserError for fewer than two episodes."""
        if len(np.unique(episode)) < 2:
            raise UserError(
                "the recorded decisions are of fewer than two episodes, so nobody can tell how much episodes differ; "
                "record more."
            )
        kept = np.unique(np.linspace(0, len(state) - 1, min(_MOST_KEPT, len(state))).astype(np.int64))
        flat = _flat(state[kept], chunk[kept])
        mean, std = flat.mean(0), flat.std(0).clip(1e-6)
        decisions = (flat - mean) / std
        distance = _distances(decisions, decisions)
        distance[episode[kept][:, None] == episode[kept]] = np.inf
        return cls(decisions, mean, std, float(np.quantile(distance.min(1), _QUANTILE)))

    def left(self, state: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """bool [B]: which decisions, ``state`` [B,S] and ``chunk`` [B,H,D], are further from all recorded ones."""
        if not len(state):
            return np.zeros(0, bool)
        asked = (_flat(state, chunk) - self.mean) / self.std
        return _distances(asked, self.decisions).min(1) > self.limit


def _flat(state: np.ndarray, chunk: np.ndarray) -> Floats:
    """[N,S+H*D]"""
    parts = [np.asarray(one, np.float64).reshape(len(one), -1) for one in (state, chunk)]
    return np.concatenate(parts, 1)


def _distances(one: Floats, other: Floats) -> np.ndarray:
    """[B,N], relative to the square root of the number of entries."""
    return torch.cdist(torch.from_numpy(one), torch.from_numpy(other)).numpy() / one.shape[1] ** 0.5
