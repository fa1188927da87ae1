"""Agreement of a learned world model with the simulator, with intervals.

Open loop: do the same actions from the same initial state succeed in both, by which control step, and with which
rewards?  Closed loop: does the world model rank and rate policies as the simulator does?  (Similarity of frames:
``object_positions.py``.)  Results are frozen dataclasses of finite numbers, so ``dataclasses.asdict`` of one is strict
JSON.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.intervals import wilson
from vla_rl.evaluation.stats import Floats, Rate, fisher_z, mcnemar_exact, mmrv

NEVER = math.inf  # the control step of a success in a replay without one


@dataclass(frozen=True)
class ReplayAgreement:
    """The 2x2 table of replays at one horizon: was there a success within ``horizon`` control steps?

    tp: in both; fp: in the world model only (hallucinated); fn: in the simulator only (missed); tn: in neither.  Rates
    are in [0, 1] with 95 % Wilson intervals, which assume independent replays (each with its own initial state).  A
    rate over no replay is None: ``precision``, for example, when the world model never succeeds.
    """

    horizon: int
    tp: int
    fp: int
    fn: int
    tn: int
    accuracy: Rate  # (tp + tn) / n
    precision: Rate | None  # tp / (tp + fp)
    hallucinated: Rate | None  # fp / (fp + tn): true failures that succeed in the world model
    missed: Rate | None  # fn / (fn + tp): true successes that fail in the world model
    kappa: float
    mcnemar_p: float  # McNemar's exact test (of fp and fn) that both succeed equally often

    @classmethod
    def of(cls, horizon: int, tp: int, fp: int, fn: int, tn: int) -> ReplayAgreement:
        """From the four counts; ContractError without a replay or for a negative count."""
        counts = tp, fp, fn, tn
        if min(counts) < 0 or not any(counts):
            raise ContractError(
                f"tp, fp, fn, tn = {counts} at horizon {horizon} are no counts of replays, so agreement is undefined; "
                "replay at least one sequence of actions in both."
            )
        shares = _share(tp, tp + fp), _share(fp, fp + tn), _share(fn, fn + tp)
        accuracy = Rate.counted(tp + tn, sum(counts))
        return cls(horizon, *counts, accuracy, *shares, cohen_kappa(*counts), mcnemar_exact(fp, fn))

    @property
    def hallucinated_high(self) -> float:
        """Upper bound of the hallucinated rate's interval; 1 when no replay truly failed (no evidence for less)."""
        return 1.0 if self.hallucinated is None else self.hallucinated.high

    @property
    def missed_high(self) -> float:
        """Upper bound of the missed rate's interval; 1 when no replay truly succeeded by the horizon."""
        return 1.0 if self.missed is None else self.missed.high


@dataclass(frozen=True)
class PolicyAgreement:
    """Agreement of imagined and true success rates over ``policies`` policies.

    The policy is the unit.  The interval of ``r`` assumes independent policies, which checkpoints of one run are not;
    noise in rates from few episodes pulls ``r`` and ``slope`` towards 0.
    """

    policies: int
    r: float  # Pearson's
    r_low: float
    r_high: float
    tau: float  # Kendall's tau-b
    mmrv: float  # convention of stats.mmrv: strict ">", gap of the true rates
    slope: float  # least squares, imagined = slope * true + intercept
    intercept: float
    optimism: float  # mean of imagined - true; above 0 the world model is too optimistic
    leverage: float  # largest change of r when one policy is left out; above 0.1, r depends on that policy


def replay_agreement(
    imagined: ArrayLike, true: ArrayLike, length: ArrayLike, horizons: Sequence[int]
) -> tuple[ReplayAgreement, ...]:
    """One table per horizon, from ``n`` replays of the same actions from the same state in model and simulator.

    ``imagined`` and ``true`` [n] are the control steps, from 1, of the first success, or NEVER; ``length`` [n] the
    numbers of actions replayed.  Horizon h uses the replays whose true outcome by h is known: a true success within h,
    or at least h actions.  The world model does not influence which replays are used; an imagined rollout without a
    success within h counts as a failure, also one that was truncated for its uncertainty.

    Raises ContractError for impossible shapes and steps, and for a horizon that no replay reaches.
    """
    checked, steps = check_horizons(horizons, length)
    imagined_step, true_step = _success_steps("imagined", imagined, steps), _success_steps("true", true, steps)
    tables = []
    for horizon in checked:
        known = (true_step <= horizon) | (steps >= horizon)
        said, was = imagined_step[known] <= horizon, true_step[known] <= horizon
        counts = (int(np.sum(cell)) for cell in (said & was, said & ~was, ~said & was, ~said & ~was))
        tables.append(ReplayAgreement.of(horizon, *counts))
    return tuple(tables)


@dataclass(frozen=True)
class TrustedHorizon:
    """A choice of ``TrustConfig``: the threshold of the success probability, the quantile of the uncertainty at which
    imagined rollouts are truncated, and the table of the longest horizon that is trusted with them."""

    threshold: float
    quantile: float
    table: ReplayAgreement


@dataclass(frozen=True)
class TrustConfig:
    """How success threshold, uncertainty limits and horizon are chosen, on replays reserved for this choice.

    A strict threshold hallucinates nothing because nothing succeeds: RL in such rollouts gets no reward.  So where
    replays truly succeed, ``max_missed`` bounds how many of these successes may be missed, and a horizon by which none
    truly succeeds is not trusted; 1 asks for nothing, for rollouts that succeed from keyframes alone.

    ``quantiles`` of the uncertainty of ordinary replays are candidates for its limit: 1 truncates nothing.  The best of
    many pairs is chosen, so its bound is more favourable than that of a pair fixed in advance.  Report the rate on
    other replays; ``max_hallucinated`` is below 10 % to leave room for that.
    """

    max_hallucinated: float = 0.08  # for the upper bound of the hallucinated rate
    thresholds: tuple[float, ...] = (0.5, 0.7, 0.9)
    quantiles: tuple[float, ...] = (1.0, 0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
    max_missed: float = 0.9  # for the upper bound of the missed rate, where there are true successes
    min_imagined: float = 0.25  # of the policy's true success, for that in its own imagined rollouts; 0: any will do

    def choose(
        self,
        success_steps: Callable[[float, float], ArrayLike],
        true: ArrayLike,
        length: ArrayLike,
        horizons: Sequence[int],
    ) -> TrustedHorizon:
        """The longest trusted horizon over all thresholds and quantiles; among equals the most accurate.

        ``success_steps(threshold, quantile)`` [n] gives the control steps of the first imagined successes; the others
        as for :func:`replay_agreement`.  A horizon is trusted by the upper bound of its hallucinated rate; a shorter
        one may not be, because an imagined success that comes slightly too early counts as hallucinated there.  Raises
        UserError if no pair has a horizon, or if all that have one miss more than ``max_missed``.
        """
        found: list[TrustedHorizon] = []
        tables: tuple[ReplayAgreement, ...] = ()
        for threshold, quantile in itertools.product(self.thresholds, self.quantiles):
            tables = replay_agreement(success_steps(threshold, quantile), true, length, horizons)
            honest = [table for table in tables if table.hallucinated_high <= self.max_hallucinated]
            found += [TrustedHorizon(threshold, quantile, table) for table in honest]
        if not found:
            if not (self.thresholds and self.quantiles):
                raise UserError("no threshold or quantile is given, so no imagined rollout can succeed; give one.")
            raise self._untrusted(tables)
        rewarding = [choice for choice in found if choice.table.missed_high <= self.max_missed]
        if np.isfinite(np.asarray(true, np.float64)).any():
            if not rewarding:
                raise self._unrewarded([choice.table for choice in found])
            found = rewarding
        return max(found, key=lambda choice: (choice.table.horizon, choice.table.accuracy.success))

    def require_closed_loop(self, imagined: tuple[int, int], true: tuple[int, int]) -> None:
        """Raise UserError where a policy that truly succeeds hardly does so in its own imagined rollouts.

        Both are (successes, rollouts).  Replays of what was recorded say little about that: they may agree where a
        policy that looks at imagined pictures is lost.
        """
        high, low = wilson(*imagined)[1], wilson(*true)[0]
        if high < self.min_imagined * low:
            raise UserError(
                f"the policy succeeds in {imagined[0]} of {imagined[1]} imagined rollouts and in {true[0]} of "
                f"{true[1]} real ones, so RL would hardly be rewarded in imagination; look at the outcome at every "
                "control step, if you do not yet (plan.imagination.outcome_every 1), or train longer (plan.fit.video)."
            )

    def _untrusted(self, tables: Sequence[ReplayAgreement]) -> UserError:
        share = f"{100 * self.max_hallucinated:g} %"
        bounds = ", ".join(f"{100 * one.hallucinated_high:.1f} % at {one.horizon}" for one in tables) or "no horizon"
        fewest = 1 + bisect_left(range(1, 1 << 60), -self.max_hallucinated, key=lambda n: -wilson(0, n)[1])
        return UserError(
            f"no horizon keeps hallucinated successes within {share} (upper bounds: {bounds}), so RL has no imagined "
            "rollouts to learn from; train the world model further, or replay more action sequences that fail (without "
            f"one hallucination, {fewest} failures are enough)."
        )

    def _unrewarded(self, honest: Sequence[ReplayAgreement]) -> UserError:
        table = min(honest, key=lambda table: (table.missed_high, -table.horizon))
        return UserError(
            f"whatever keeps hallucinated successes within {100 * self.max_hallucinated:g} % misses too many true ones "
            f"(at best {table.fn} of {table.fn + table.tp} by step {table.horizon}, an upper bound of "
            f"{100 * table.missed_high:.1f} % where {100 * self.max_missed:g} % are allowed), so RL would hardly be "
            "rewarded; train the world model further, replay more action sequences that succeed, or raise "
            "trust.max_missed."
        )


def policy_agreement(imagined: ArrayLike, true: ArrayLike) -> PolicyAgreement:
    """Agreement of imagined with true success rates, both [k] in [0, 1], of the same k >= 4 policies.

    ``r`` has the interval ``tanh(atanh r +- 1.96/sqrt(k-3))`` (Fisher 1921); for r = +-1 that would be a point, which
    carries no uncertainty, so it is [-1, 1] then.  A world model that gives all policies one rate ranks nothing: r, tau
    and slope are 0, the interval is [-1, 1].  If all policies but one are equal, r without it is 0.

    Raises ContractError for shapes and values that are no rates, UserError for fewer than 4 policies and for policies
    with equal true rates, for which a correlation is undefined.
    """
    estimates, truth = _rates(imagined, true)
    k = truth.size
    r = _pearson(estimates, truth)
    low, high = fisher_z(r, k) if np.ptp(estimates) > 0 and abs(r) < 1.0 - 1e-9 else (-1.0, 1.0)
    slope = r * float(estimates.std() / truth.std())
    without = [_pearson(np.delete(estimates, u), np.delete(truth, u)) for u in range(k)]
    return PolicyAgreement(
        policies=k,
        r=r,
        r_low=low,
        r_high=high,
        tau=kendall_tau_b(estimates, truth),
        mmrv=mmrv(estimates, truth),
        slope=slope,
        intercept=float(estimates.mean() - slope * truth.mean()),
        optimism=float((estimates - truth).mean()),
        leverage=max(abs(r - reduced) for reduced in without),
    )


def cohen_kappa(tp: int, fp: int, fn: int, tn: int) -> float:
    """Agreement beyond chance ``(p_o - p_e) / (1 - p_e)`` of four counts (Cohen 1960), in integers up to the division.

    It is 0/0 when model and simulator give the same single answer throughout, and counts as 0 then: a model that always
    answers the same shows no agreement beyond chance.
    """
    chance = (tp + fp) * (fp + tn) + (tp + fn) * (fn + tn)
    return 2 * (tp * tn - fp * fn) / chance if chance else 0.0


def kendall_tau_b(x: Floats, y: Floats) -> float:
    """Rank correlation with ties (Kendall 1945) of [k] and [k]; 0 if all entries of one are tied."""
    dx, dy = (np.sign(values[:, None] - values[None, :]) for values in (x, y))
    untied = math.sqrt(float((dx**2).sum() * (dy**2).sum()))
    return float((dx * dy).sum()) / untied if untied else 0.0


def check_horizons(horizons: Sequence[int], length: ArrayLike) -> tuple[list[int], NDArray[np.int64]]:
    """``horizons`` and ``length`` [n] as arrays, checked: lengths of at least 1, and every horizon reached by a replay.

    Raises ContractError otherwise.
    """
    steps = np.asarray(length)
    if steps.ndim != 1 or not steps.size or not np.issubdtype(steps.dtype, np.integer) or steps.min() < 1:
        raise ContractError(
            f"lengths of replays, {steps.dtype} {list(steps.shape)}, are not one integer per replay, so no horizon can "
            "be evaluated; give one number of control steps, from 1, per replay."
        )
    for horizon in horizons:
        if not 1 <= horizon <= steps.max():
            raise ContractError(
                f"horizon {horizon} is outside 1..{steps.max()}, the control steps of the longest replay, so there is "
                "no data for it; choose one inside, or replay longer sequences."
            )
    return [int(horizon) for horizon in horizons], steps


def _share(count: int, n: int) -> Rate | None:
    return Rate.counted(count, n) if n else None


def _success_steps(name: str, first: ArrayLike, length: NDArray[np.int64]) -> Floats:
    steps = np.asarray(first, dtype=np.float64)
    if steps.shape != length.shape or not np.all(((steps >= 1) & (steps <= length)) | (steps == NEVER)):
        raise ContractError(
            f"first successes {name!r} of shape {list(steps.shape)} are not one step from 1 to its replay's length, or "
            f"NEVER, for each of {length.size} replays, so no horizon can be evaluated; count control steps from 1."
        )
    return steps


def _rates(imagined: ArrayLike, true: ArrayLike) -> tuple[Floats, Floats]:
    estimates, truth = (np.asarray(values, dtype=np.float64) for values in (imagined, true))
    in_range = all(np.all((values >= 0) & (values <= 1)) for values in (estimates, truth))
    if truth.ndim != 1 or estimates.shape != truth.shape or not in_range:
        raise ContractError(
            f"imagined {list(estimates.shape)} and true {list(truth.shape)} are not two success rates in [0, 1] per "
            "policy, so they cannot be compared; give one of each."
        )
    if truth.size < 4:
        raise UserError(
            f"{truth.size} policies do not show whether the world model ranks policies, as r has no interval below 4; "
            "evaluate 12 or more."
        )
    if np.ptp(truth) == 0:
        raise UserError(
            f"all {truth.size} policies truly succeed in {100 * truth[0]:.1f} %, so a correlation is undefined; choose "
            "policies that differ, such as checkpoints from bad to good."
        )
    return estimates, truth


def _pearson(x: Floats, y: Floats) -> float:
    # Compare the values themselves: rounding of the mean can give equal values a variance.
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    dx, dy = x - x.mean(), y - y.mean()
    return float(np.clip(dx @ dy / math.sqrt(float((dx @ dx) * (dy @ dy))), -1.0, 1.0))


@dataclass(frozen=True)
class RewardAgreement:
    """Predicted and recorded rewards of the call that ends after ``horizon`` calls, over the ``replays`` that have it.

    ``correlation`` is Pearson's, None where fewer than three replays remain or one side is constant: what equals itself
    everywhere ranks nothing.  ``error`` is the root mean square error, ``spread`` the standard deviation of what was
    recorded, which is the error of the best constant.
    """

    horizon: int
    replays: int
    correlation: float | None
    error: float
    spread: float


def reward_agreement(
    predicted: np.ndarray, recorded: np.ndarray, calls: np.ndarray, horizons: Sequence[int]
) -> tuple[RewardAgreement, ...]:
    """``predicted`` and ``recorded`` float [n,K]: rewards of each call; ``calls`` [n]: how many are whole.

    Replays whose recording has no rewards (NaN) are left out.
    """
    results = []
    for horizon in horizons:
        kept = (calls >= horizon) & np.isfinite(recorded[:, horizon - 1])
        one, other = predicted[kept, horizon - 1].astype(float), recorded[kept, horizon - 1].astype(float)
        if len(one):
            ranks = len(one) > 2 and np.ptp(one) > 0 and np.ptp(other) > 0
            error = float(np.sqrt(np.square(one - other).mean()))
            found = _pearson(one, other) if ranks else None
            results.append(RewardAgreement(horizon, len(one), found, error, float(other.std())))
    return tuple(results)
