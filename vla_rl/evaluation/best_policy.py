"""How many real episodes it takes to find the best of several policies, with imagined rollouts and without.

A search plays a few episodes of the two policies that are likeliest the best, again and again, until one of them is
good enough with probability .95 (top-two sampling, Russo 2016, "Simple Bayesian algorithms for best-arm
identification", arXiv 1602.08448; deviation: both of the two are played, no coin chooses one).  What is believed is the
posterior of :mod:`vla_rl.evaluation.ranking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_rl.evaluation.ranking import Played, Ranking, noise_covariance, posterior
from vla_rl.evaluation.stats import Floats

CONFIDENCE = 0.95
TOLERANCE = 0.02  # of success: a policy that is so much worse than the best one is as good as found
MOST = 2000  # real episodes; a search ends there
_BATCH = 8  # episodes of each of the two
_DRAWS = 1000
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
        success = _rates(rng.multivariate_normal(mean, covariance, _DRAWS, method="cholesky"))
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
    found: Floats = 1.0 / (1.0 + np.exp(-log_odds))
    return found
