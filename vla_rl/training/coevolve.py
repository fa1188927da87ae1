"""When a world model needs real episodes again: the policy leaves its training data, and exploits its errors.

A policy that is improved in imagination learns to exploit what only the world model allows.  Three signals show it: the
policy succeeds more often in imagination than it did in reality; more rollouts are truncated by uncertainty than at
first; and the inverse dynamics estimate other actions from imagined pictures than were made.  Any of them buys a batch
of real episodes, played by the present policy, from a fixed budget.  Every decision is kept with its reasons.

(WoVR's PACE refines once, by hand; Yang et al. 2026, arXiv 2602.13977.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class CoevolutionConfig:
    """How many real episodes may be bought, and for which signals."""

    budget: int = 100  # real episodes in all
    batch: int = 100  # per purchase
    every: int = 12  # iterations of RL from one decision to the next
    success_gap: float = 0.03  # by which imagined success may exceed real success, as last played
    uncertainty_rise: float = 0.05  # of the share of rollouts truncated by uncertainty, above the baseline
    inverse_dynamics_ratio: float = 1.15  # of the inverse-dynamics error to the baseline

    def __post_init__(self) -> None:
        """Raise UserError for numbers that buy nothing sensible."""
        if self.budget < 0 or self.batch < 1 or self.every < 1:
            raise UserError(
                f"a budget of {self.budget} real episodes in batches of {self.batch} every {self.every} iterations "
                "cannot be spent; give a budget of at least 0 and at least 1 for the others."
            )


@dataclass(frozen=True)
class Signals:
    """What a decision depends on; shares are in [0, 1]."""

    imagined: float  # success in imagination
    real: float  # success in the real episodes played last
    uncertain: float  # share of imagined rollouts truncated by uncertainty
    inverse_dynamics_error: float  # see ``WorldModel.inverse_dynamics_error``


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
            f"imagined success {signals.imagined:.0%} exceeds real success {signals.real:.0%}": (
                signals.imagined > signals.real + config.success_gap
            ),
            f"uncertainty truncates {signals.uncertain:.0%} of the rollouts, at first {baseline.uncertain:.0%}": (
                signals.uncertain > baseline.uncertain + config.uncertainty_rise
            ),
            f"inverse-dynamics error {signals.inverse_dynamics_error:.3f}, at first "
            f"{baseline.inverse_dynamics_error:.3f}": (
                signals.inverse_dynamics_error > baseline.inverse_dynamics_error * config.inverse_dynamics_ratio
            ),
        }
        reasons = tuple(reason for reason, fired in signs.items() if fired)
        buy = min(config.batch, config.budget - self.spent) if reasons else 0
        return Decision(signals, baseline, buy, reasons)

    def renewed(self, signals: Signals, bought: int) -> Coevolution:
        """After training on ``bought`` real episodes, with the ``signals`` since."""
        return replace(self, baseline=signals, spent=self.spent + bought)
