"""When a world model needs real episodes again: the policy leaves its training data, and exploits its errors.

A policy that is improved in imagination learns to exploit what only the world model allows.  Three signals show it: the
policy succeeds more often in imagination than it did in reality; more rollouts are truncated by uncertainty than at
first; and the inverse dynamics estimate other actions from imagined pictures than were made.  Any of them buys a batch
of real episodes, played by the present policy, from a fixed budget.  Every decision is kept with its reasons.

Shares are of few episodes, so that equal ones differ by chance.  A share counts as higher when an interval of the
difference lies above what is allowed; with equal shares that happens in at most two of a hundred decisions.

(WoVR's PACE refines once, by hand; Yang et al. 2026, arXiv 2602.13977.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import difference


@dataclass(frozen=True)
class CoevolutionConfig:
    """How many real episodes may be bought, and for which signals."""

    budget: int = 0  # real episodes in all; three seeds show no gain from buying some (docs/results/imagination.md)
    batch: int = 50  # per purchase
    every: int = 12  # iterations of RL from one decision to the next
    success_gap: float = 0.0  # by which imagined success may exceed real success, as last played
    uncertainty_rise: float = 0.0  # of the share of rollouts truncated by uncertainty, above the baseline
    z: float = 2.576  # half-width of the intervals of both differences, in standard errors
    inverse_dynamics_ratio: float = 1.15  # of the inverse-dynamics error to the baseline

    def __post_init__(self) -> None:
        """Raise UserError for numbers that buy nothing sensible."""
        if self.z <= 0.0:
            raise UserError(
                f"an interval of {self.z:g} standard errors on either side lets chance buy real episodes; give "
                "coevolution.z above 0."
            )
        if self.budget < 0 or self.batch < 1 or self.every < 1:
            raise UserError(
                f"a budget of {self.budget} real episodes in batches of {self.batch} every {self.every} iterations "
                "cannot be spent; give a budget of at least 0 and at least 1 for the others."
            )


@dataclass(frozen=True)
class Signals:
    """What a decision depends on; shares are in [0, 1]."""

    imagined: float  # success in imagination
    real: float | None  # success in the real episodes that the policy played last, None if there are none
    uncertain: float  # share of imagined rollouts truncated by uncertainty
    inverse_dynamics_error: float  # see ``WorldModel.inverse_dynamics_error``
    rollouts: int  # imagined for these signals
    real_episodes: int


@dataclass(frozen=True)
class Decision:
    """``buy`` real episodes, for ``reasons``; 0 without any."""

    signals: Signals
    baseline: Signals  # after the world model was last trained
    buy: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Coevolution:
    """What was spent, and the signals when the world model was last trained."""

    config: CoevolutionConfig
    baseline: Signals
    spent: int = 0

    def decide(self, signals: Signals) -> Decision:
        """Whether to buy, given the present ``signals``."""
        config, baseline = self.config, self.baseline
        signs = {
            f"imagined success {signals.imagined:.0%} exceeds real success {signals.real or 0.0:.0%}": (
                self._exceeds(signals.imagined, signals, signals.real, signals.real_episodes, config.success_gap)
            ),
            f"uncertainty truncates {signals.uncertain:.0%} of the rollouts, at first {baseline.uncertain:.0%}": (
                self._exceeds(
                    signals.uncertain, signals, baseline.uncertain, baseline.rollouts, config.uncertainty_rise
                )
            ),
            f"inverse-dynamics error {signals.inverse_dynamics_error:.3f}, at first "
            f"{baseline.inverse_dynamics_error:.3f}": (
                signals.inverse_dynamics_error > baseline.inverse_dynamics_error * config.inverse_dynamics_ratio
            ),
        }
        reasons = tuple(reason for reason, fired in signs.items() if fired)
        buy = min(config.batch, config.budget - self.spent) if reasons else 0
        return Decision(signals, baseline, buy, reasons)

    def _exceeds(self, share: float, signals: Signals, other: float | None, others: int, allowed: float) -> bool:
        """Whether the interval of ``share`` of the rollouts minus ``other``, of ``others``, lies above ``allowed``."""
        if other is None:
            return False
        counts = (round(share * signals.rollouts), signals.rollouts), (round(other * others), others)
        return difference(*counts, self.config.z)[0] > allowed

    def renewed(self, signals: Signals, bought: int) -> Coevolution:
        """After training on ``bought`` real episodes, with the ``signals`` since."""
        return replace(self, baseline=signals, spent=self.spent + bought)
