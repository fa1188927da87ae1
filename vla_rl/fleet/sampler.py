"""Which task and which kind of data a fleet's learner draws next: SOP's adaptive sampler, with a share for corrections.

Tasks are uniform.  Within a task, the weight of the robots' own data against recorded data follows the losses
(SOP, Agibot 2026, agibot.com/research/sop; its equation in a form that does not overflow):

    w_on = exp(a L_on) / (exp(a L_on) + exp(L_off)) = sigmoid(a L_on - L_off),  clipped to [.2, .8]

where L is the mean loss of the last W = 200 gradient steps that drew such data.  What the policy cannot do yet on the
robots is so drawn more often.

Ours, for SOP does not say: a task without recorded data has w_on = 1, one without data of robots w_on = 0 (a cold
start, which is logged), and the losses of a kind that was never drawn count as equal (w_on = 1/2).  Human
corrections are a third stratum: their share of ``w_on`` is their share of the robots' data, but at least
``min_corrections`` of the task; the other two give way in proportion.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.contract.config import check_limits, check_ordered, check_positive
from vla_rl.contract.errors import ContractError, UserError

ONLINE, CORRECTIONS, OFFLINE = range(3)  # columns of counts and weights
STRATA = ("online", "corrections", "offline")
log = logging.getLogger("vla_rl.fleet")


@dataclass(frozen=True)
class SamplerConfig:
    """SOP's numbers; it says ``a > 1`` and not how much."""

    a: float = 1.5  # factor of the online loss
    window: int = 200  # gradient steps in the mean loss of a stratum
    bounds: tuple[float, float] = (0.2, 0.8)  # of w_on
    min_corrections: float = 0.2  # of a task that has corrections

    def __post_init__(self) -> None:
        check_positive(self, "a")
        check_limits(self, a=(0.0, 1e6), window=(1, math.inf), min_corrections=(0.0, 1.0))
        check_ordered(self, "bounds")
        if not 0.0 <= self.bounds[0] <= self.bounds[1] <= 1.0:
            raise UserError(
                f"SamplerConfig.bounds is {self.bounds}, which is no range of a weight; choose two numbers from 0 to 1."
            )


class AdaptiveSampler:
    """Draws (task, stratum) pairs; tasks are numbered, as in a replay buffer's column, and may become more.

    ``counts`` int [M,3] says how many samples each of ``M`` tasks has that are autonomous data of robots, human
    corrections and recorded data (``STRATA``); the caller draws the samples themselves.
    """

    def __init__(self, config: SamplerConfig | None = None) -> None:
        self.config = config or SamplerConfig()
        self._losses: dict[tuple[int, int], deque[float]] = {}
        self._cold: set[int] = set()  # tasks that were logged as such

    def weights(self, counts: np.ndarray) -> np.ndarray:
        """The probability [M,3] of drawing each task and stratum; 0 for those without data, 1 in all.

        Raises ContractError for counts of another shape and UserError when there is no data at all.
        """
        if counts.ndim != 2 or counts.shape[1] != len(STRATA) or (counts < 0).any():
            raise ContractError(
                f"the counts of samples are an array {list(counts.shape)}, so no weights can be formed; give numbers "
                f"of at least 0 as [tasks, {len(STRATA)}]."
            )
        has_data = counts.sum(1) > 0
        if not has_data.any():
            raise UserError("no task has any data yet, so nothing can be drawn; record some or wait for a robot.")
        found = np.zeros(counts.shape)
        for task in np.flatnonzero(has_data):
            found[task] = self._within(int(task), counts[task])
        return found / has_data.sum()

    def draw(self, counts: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
        """``size`` independent draws by :meth:`weights`, int [size,2]: task and stratum."""
        weights = self.weights(counts)
        drawn = generator.choice(weights.size, size=size, p=weights.ravel())
        return np.stack(np.divmod(drawn, len(STRATA)), axis=1)

    def record(self, drawn: np.ndarray, losses: np.ndarray) -> None:
        """Note the ``losses`` [B] of one gradient step on what was ``drawn`` [B,2].

        Raises ContractError for a loss that is not finite; none of the step's is then noted.
        """
        if not np.isfinite(losses).all():
            task, stratum = drawn[np.flatnonzero(~np.isfinite(losses))[0]]
            raise ContractError(
                f"a loss of task {task} ({STRATA[stratum]}) is not finite, so it would decide what is drawn for the "
                f"next {self.config.window} steps and was not noted; look for NaN in that task's data."
            )
        for task, stratum in np.unique(drawn, axis=0).tolist():
            window = self._losses.setdefault((task, stratum), deque(maxlen=self.config.window))
            window.append(float(losses[(drawn == (task, stratum)).all(1)].mean()))

    # -- one task ---------------------------------------------------------------------------------------------------

    def _within(self, task: int, counts: np.ndarray) -> np.ndarray:
        """The weights [3] of the strata of ``task``, which sum to 1."""
        robots, recorded = int(counts[[ONLINE, CORRECTIONS]].sum()), int(counts[OFFLINE])
        if not robots and task not in self._cold:
            log.warning("task %d has no data of robots yet, so only recorded data of it are drawn (w_on = 0)", task)
            self._cold.add(task)
        online = self._online_weight(task, counts) if robots and recorded else float(robots > 0)
        by_strata = np.zeros(len(STRATA))
        by_strata[OFFLINE] = 1.0 - online
        if not counts[CORRECTIONS]:
            by_strata[ONLINE] = online
            return by_strata
        corrections = max(self.config.min_corrections, online * counts[CORRECTIONS] / robots)
        by_strata[ONLINE] = online * counts[ONLINE] / robots
        others = by_strata.sum()
        if others:
            by_strata *= (1.0 - corrections) / others
        by_strata[CORRECTIONS] = corrections if others else 1.0
        return by_strata

    def _online_weight(self, task: int, counts: np.ndarray) -> float:
        online = self._mean(task, [ONLINE, CORRECTIONS], counts)
        offline = self._mean(task, [OFFLINE], counts)
        if online is None or offline is None:
            return 0.5
        return float(np.clip(sigmoid(self.config.a * online - offline), *self.config.bounds))

    def _mean(self, task: int, strata: Sequence[int], counts: np.ndarray) -> float | None:
        """The mean loss of the samples in ``strata``, each as many as they are; None where none was drawn yet."""
        known = [stratum for stratum in strata if self._losses.get((task, stratum)) and counts[stratum]]
        if not known:
            return None
        means = [float(np.mean(self._losses[task, stratum])) for stratum in known]
        return float(np.average(means, weights=counts[known]))

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The windows of losses and which cold starts were logged (see ``Resumable``)."""
        losses = {f"{task}/{stratum}": list(window) for (task, stratum), window in self._losses.items()}
        return {"losses": losses, "cold": sorted(self._cold)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cold = set(state["cold"])
        self._losses = {}
        for name, losses in state["losses"].items():
            task, stratum = map(int, name.split("/"))
            self._losses[task, stratum] = deque(losses, maxlen=self.config.window)


def sigmoid(x: float) -> float:
    """``1 / (1 + exp(-x))``, without overflow for any ``x``."""
    return 0.5 * (1.0 + math.tanh(0.5 * x))
