"""How far a learned world model (the dream) agrees with the simulator (the truth), with intervals.

Open loop: do the same actions from the same start succeed in both, and by which control step?  Closed loop: does the
dream rank and rate policies as the truth does?  (How alike the pictures are: ``likeness.py``.)  Results are frozen
dataclasses of finite numbers, so ``dataclasses.asdict`` of one is strict JSON.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.stats import Z95, Floats, Rate, fisher_z, mcnemar_exact, mmrv, wilson

NEVER = math.inf  # the control step of a success that did not come


@dataclass(frozen=True)
class ReplayAgreement:
    """The 2x2 table of replays at one horizon: was the task done within ``horizon`` control steps?

    tp: done in both; fp: in the dream only (hallucinated); fn: in the truth only (missed); tn: in neither.  Shares are
    in [0, 1] with 95 % Wilson intervals, for which replays must be independent (each with a start of its own).  A share
    of nothing, such as ``precision`` where the dream never succeeds, is None.
    """

    horizon: int
    tp: int
    fp: int
    fn: int
    tn: int
    accuracy: Rate  # (tp + tn) / n
    precision: Rate | None  # tp / (tp + fp)
    hallucinated: Rate | None  # fp / (fp + tn): failures that the dream takes for successes
    missed: Rate | None  # fn / (fn + tp): successes that the dream takes for failures
    kappa: float
    mcnemar_p: float  # that dream and truth succeed equally often: McNemar's exact test of fp and fn

    @classmethod
    def of(cls, horizon: int, tp: int, fp: int, fn: int, tn: int) -> ReplayAgreement:
        """From the four counts; ContractError without a replay or for a negative count."""
        counts = tp, fp, fn, tn
        if min(counts) < 0 or not any(counts):
            raise ContractError(
                f"tp, fp, fn, tn = {counts} at horizon {horizon} are no counts of replays, so there is no agreement to "
                "tell of; replay at least one sequence of actions in both."
            )
        shares = _share(tp, tp + fp), _share(fp, fp + tn), _share(fn, fn + tp)
        accuracy = _rate(tp + tn, sum(counts))
        return cls(horizon, *counts, accuracy, *shares, cohen_kappa(*counts), mcnemar_exact(fp, fn))

    @property
    def hallucinated_high(self) -> float:
        """Upper end of the hallucinated share's interval; 1 where no replay failed: then nothing speaks for less."""
        return 1.0 if self.hallucinated is None else self.hallucinated.high


@dataclass(frozen=True)
class PolicyAgreement:
    """How the dream judges ``policies`` policies whose true success rates are known.

    The policy is the unit.  The interval of ``r`` takes policies for independent, which checkpoints of one run are not;
    the noise of rates from few episodes pulls ``r`` and ``slope`` towards 0.
    """

    policies: int
    r: float  # Pearson's
    r_low: float
    r_high: float
    tau: float  # Kendall's tau-b
    mmrv: float  # convention of stats.mmrv: strict ">", gap of the true rates
    slope: float  # least squares, imagined = slope * true + intercept
    intercept: float
    optimism: float  # mean of imagined - true; above 0 the dream is too kind
    leverage: float  # most that leaving out one policy changes r; above 0.1, r hangs on that policy


def replay_agreement(
    imagined: ArrayLike, true: ArrayLike, length: ArrayLike, horizons: Sequence[int]
) -> tuple[ReplayAgreement, ...]:
    """Tables of ``n`` replays of the same actions from the same start in dream and truth, one for each of ``horizons``.

    ``imagined`` and ``true`` [n] are the control steps, from 1, with which the task was first done, or NEVER;
    ``length`` [n] how many actions were replayed.  At horizon h those replays are asked of which the truth is known:
    done within h, or h actions long.  The dream never decides whether it is asked; it has said no unless it was done
    within h, also where it broke off in doubt.

    Raises ContractError for shapes and steps that cannot be, and for a horizon that no replay reaches.
    """
    asked, steps = reached(horizons, length)
    dream, truth = _first_done("imagined", imagined, steps), _first_done("true", true, steps)
    tables = []
    for horizon in asked:
        known = (truth <= horizon) | (steps >= horizon)
        said, was = dream[known] <= horizon, truth[known] <= horizon
        counts = (int(np.sum(cell)) for cell in (said & was, said & ~was, ~said & was, ~said & ~was))
        tables.append(ReplayAgreement.of(horizon, *counts))
    return tuple(tables)


def trusted_horizon(tables: Sequence[ReplayAgreement], most: float = 0.10) -> ReplayAgreement:
    """The table of the longest horizon whose hallucinated share is at most ``most`` (in (0, 1)) by its upper bound.

    A shorter horizon may exceed it: there, a success dreamt a little too soon counts as hallucinated.  This is a
    selection, so the share to report comes from other replays.

    Raises UserError when there is none.
    """
    trusted = [table for table in tables if table.hallucinated_high <= most]
    if trusted:
        return max(trusted, key=lambda table: table.horizon)
    bounds = ", ".join(f"{100 * table.hallucinated_high:.1f} % at {table.horizon}" for table in tables) or "none asked"
    fewest = math.ceil(Z95**2 * (1 - most) / most)
    raise UserError(
        f"no horizon keeps hallucinated successes within {100 * most:g} % (upper bounds: {bounds}), so RL has no "
        "dream to trust; train the world model further, or replay more actions that fail (without one hallucination, "
        f"{fewest} failures are enough)."
    )


@dataclass(frozen=True)
class Trusted:
    """How sure a dream must be of a success for it to count, how usual its doubts, and the table of the longest horizon
    trusted then."""

    threshold: float
    quantile: float
    table: ReplayAgreement


@dataclass(frozen=True)
class Trust:
    """How the threshold of success, the limits of doubt and the horizon of dreams are chosen, on replays kept for that.

    ``quantiles`` of usual doubt are where a dream may be ended: 1 is never.  The best of many pairs is chosen, so its
    bound is kinder than that of a pair named beforehand: what is to be reported comes from other replays, and for that
    to be at most 10 %, less is asked for here.
    """

    most: float = 0.08  # of the upper bound of the hallucinated share
    thresholds: tuple[float, ...] = (0.5, 0.7, 0.9)
    quantiles: tuple[float, ...] = (1.0, 0.99, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

    def choose(
        self, done_by: Callable[[float, float], ArrayLike], true: ArrayLike, length: ArrayLike, horizons: Sequence[int]
    ) -> Trusted:
        """The longest trusted horizon under any threshold and limits, then the highest accuracy.

        ``done_by(threshold, quantile)`` [n] says when dreams are first a success to them; the others as for
        :func:`replay_agreement`.  Raises UserError, as :func:`trusted_horizon` does, when none leaves a horizon.
        """
        found, last = [], None
        for threshold, quantile in itertools.product(self.thresholds, self.quantiles):
            tables = replay_agreement(done_by(threshold, quantile), true, length, horizons)
            try:
                found.append(Trusted(threshold, quantile, trusted_horizon(tables, self.most)))
            except UserError as error:
                last = error
        if not found:
            raise last or UserError("no threshold was given, so no dream could be a success; give at least one.")
        return max(found, key=lambda one: (one.table.horizon, one.table.accuracy.success))


def policy_agreement(imagined: ArrayLike, true: ArrayLike) -> PolicyAgreement:
    """How success rates in the dream follow the true ones, both [k] in [0, 1], of the same k >= 4 policies.

    ``r`` has the interval ``tanh(atanh r +- 1.96/sqrt(k-3))`` (Fisher 1921); for r = +-1 it is the limit, the point r,
    which says that the line fits and nothing about how sure that is.  A dream of one rate for all ranks nothing: r, tau
    and slope are 0, the interval is [-1, 1].  Where leaving out one policy leaves none that differ, r without it is 0.

    Raises ContractError for shapes and values that are no rates, UserError for fewer than 4 policies and for policies
    whose true rates are all the same: nothing can follow what does not vary.
    """
    dream, truth = _rates(imagined, true)
    k = truth.size
    r = _pearson(dream, truth)
    low, high = _interval(r, k) if np.ptp(dream) > 0 else (-1.0, 1.0)
    slope = r * float(dream.std() / truth.std())
    without = [_pearson(np.delete(dream, u), np.delete(truth, u)) for u in range(k)]
    return PolicyAgreement(
        policies=k,
        r=r,
        r_low=low,
        r_high=high,
        tau=kendall_tau_b(dream, truth),
        mmrv=mmrv(dream, truth),
        slope=slope,
        intercept=float(dream.mean() - slope * truth.mean()),
        optimism=float((dream - truth).mean()),
        leverage=max(abs(r - other) for other in without),
    )


def summary(replays: ReplayAgreement, policies: PolicyAgreement) -> dict[str, float | int | None]:
    """The numbers a world model is judged by, for a ``summary.json``; ``replays`` at the horizon that is used."""
    return {
        "horizon": replays.horizon,
        "accuracy": replays.accuracy.success,
        "hallucinated": None if replays.hallucinated is None else replays.hallucinated.success,
        "hallucinated_high": replays.hallucinated_high,
        "policies": policies.policies,
        "r": policies.r,
        "r_low": policies.r_low,
        "r_high": policies.r_high,
    }


def cohen_kappa(tp: int, fp: int, fn: int, tn: int) -> float:
    """Agreement beyond chance ``(p_o - p_e) / (1 - p_e)`` of four counts (Cohen 1960), in whole numbers up to the end.

    Where dream and truth give one and the same answer throughout, it is 0/0 and counts as 0: a dream that always says
    the same has shown no more than chance, whatever the truth is.
    """
    chance = (tp + fp) * (fp + tn) + (tp + fn) * (fn + tn)
    return 2 * (tp * tn - fp * fn) / chance if chance else 0.0


def kendall_tau_b(x: Floats, y: Floats) -> float:
    """Rank correlation with ties (Kendall 1945) of [k] and [k]; 0 where one of them is all ties."""
    dx, dy = (np.sign(values[:, None] - values[None, :]) for values in (x, y))
    untied = math.sqrt(float((dx**2).sum() * (dy**2).sum()))
    return float((dx * dy).sum()) / untied if untied else 0.0


def reached(horizons: Sequence[int], length: ArrayLike) -> tuple[list[int], NDArray[np.int64]]:
    """Both, checked: every replay lasts ``length`` [n] >= 1 control steps, and one of them to each of ``horizons``.

    Raises ContractError otherwise.
    """
    steps = np.asarray(length)
    if steps.ndim != 1 or not steps.size or not np.issubdtype(steps.dtype, np.integer) or steps.min() < 1:
        raise ContractError(
            f"lengths of replays, {steps.dtype} {list(steps.shape)}, do not say how long each lasted, so no horizon "
            "can be asked about; give one whole number of control steps, from 1, per replay."
        )
    for horizon in horizons:
        if not 1 <= horizon <= steps.max():
            raise ContractError(
                f"horizon {horizon} is outside 1..{steps.max()}, the control steps of the longest replay, so nothing "
                "is known about it; ask within, or replay longer."
            )
    return [int(horizon) for horizon in horizons], steps


def _rate(count: int, n: int) -> Rate:
    return Rate(count / n, *wilson(count, n), n)


def _share(count: int, n: int) -> Rate | None:
    return _rate(count, n) if n else None


def _first_done(name: str, first: ArrayLike, length: NDArray[np.int64]) -> Floats:
    steps = np.asarray(first, dtype=np.float64)
    if steps.shape != length.shape or not np.all(((steps >= 1) & (steps <= length)) | (steps == NEVER)):
        raise ContractError(
            f"first successes {name!r} of shape {list(steps.shape)} are not one step from 1 to its replay's length, or "
            f"NEVER, for each of {length.size} replays, so no horizon can be asked about; count control steps from 1."
        )
    return steps


def _rates(imagined: ArrayLike, true: ArrayLike) -> tuple[Floats, Floats]:
    dream, truth = (np.asarray(values, dtype=np.float64) for values in (imagined, true))
    proper = all(np.all((values >= 0) & (values <= 1)) for values in (dream, truth))
    if truth.ndim != 1 or dream.shape != truth.shape or not proper:
        raise ContractError(
            f"imagined {list(dream.shape)} and true {list(truth.shape)} are not two success rates in [0, 1] for every "
            "policy, so they cannot be compared; give one of each."
        )
    if truth.size < 4:
        raise UserError(
            f"{truth.size} policies do not show whether the dream ranks policies, as r has no interval below 4; judge "
            "12 or more."
        )
    if np.ptp(truth) == 0:
        raise UserError(
            f"all {truth.size} policies truly succeed in {100 * truth[0]:.1f} %, so no rate can follow theirs; choose "
            "policies that differ, such as checkpoints from bad to good."
        )
    return dream, truth


def _pearson(x: Floats, y: Floats) -> float:
    # The values are asked, because the rounding of a mean can give equal values a variance.
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    dx, dy = x - x.mean(), y - y.mean()
    return float(np.clip(dx @ dy / math.sqrt(float((dx @ dx) * (dy @ dy))), -1.0, 1.0))


def _interval(r: float, k: int) -> tuple[float, float]:
    return (r, r) if abs(r) == 1.0 else fisher_z(r, k)
