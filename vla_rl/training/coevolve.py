"""When a world model needs fresh real episodes: the policy moves to where it was not learnt, and is rewarded for it.

A policy that is improved in dreams is improved, too, at finding what only dreams allow.  Three signs tell of it: it
succeeds more often in dreams than it did in reality; more dreams end in doubt than did at first; and the inverse
dynamics read other actions from dreamt pictures than were made.  Any of them buys a batch of real episodes, played by
the policy as it is, from a fixed budget.  Every decision comes with its reasons, bought or not.

(WoVR's PACE refines once, by hand; Yang et al. 2026, arXiv 2602.13977.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class CoevolutionConfig:
    """How much reality may be bought, and what for."""

    budget: int = 100  # real episodes in all
    batch: int = 100  # of them at a time
    every: int = 12  # iterations of RL from one decision to the next
    gap: float = 0.03  # imagined success may be so far above real success, as last seen
    doubt: float = 0.05  # the share of dreams that doubt ends may rise so far above what it was at first
    slip: float = 1.15  # the inverse-dynamics residual may be so many times what it was at first

    def __post_init__(self) -> None:
        """Raise UserError for numbers that buy nothing sensible."""
        if self.budget < 0 or self.batch < 1 or self.every < 1:
            raise UserError(
                f"a budget of {self.budget} real episodes in batches of {self.batch} every {self.every} iterations "
                "cannot be spent; give a budget of at least 0 and at least 1 for the others."
            )


@dataclass(frozen=True)
class Signals:
    """How dreams stand; shares are in [0, 1]."""

    imagined: float  # success in dreams
    real: float  # success in the real episodes played last
    doubt: float  # share of dreams ended by doubt
    slip: float  # inverse-dynamics residual of dreams, see ``WorldModel.slip``


@dataclass(frozen=True)
class Decision:
    """``buy`` real episodes, for ``reasons``; none without."""

    signals: Signals
    usual: Signals  # what doubt and slip are compared with
    buy: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Coevolution:
    """What was spent, and what was usual when the world model was last trained."""

    config: CoevolutionConfig
    usual: Signals
    spent: int = 0

    def decide(self, signals: Signals) -> Decision:
        """Whether to buy, given how dreams stand now."""
        config, usual = self.config, self.usual
        signs = {
            f"imagined success {signals.imagined:.0%} outruns real success {signals.real:.0%}": (
                signals.imagined > signals.real + config.gap
            ),
            f"doubt ends {signals.doubt:.0%} of the dreams, at first {usual.doubt:.0%}": (
                signals.doubt > usual.doubt + config.doubt
            ),
            f"inverse-dynamics residual {signals.slip:.3f}, at first {usual.slip:.3f}": (
                signals.slip > usual.slip * config.slip
            ),
        }
        reasons = tuple(reason for reason, seen in signs.items() if seen)
        buy = min(config.batch, config.budget - self.spent) if reasons else 0
        return Decision(signals, usual, buy, reasons)

    def renewed(self, signals: Signals, bought: int) -> Coevolution:
        """After ``bought`` real episodes were learnt from, with how dreams stand since."""
        return replace(self, usual=signals, spent=self.spent + bought)
