"""One number of an environment that may differ between episodes."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.contract.errors import UserError


@dataclass(frozen=True)
class Parameter:
    """One number of an environment that may differ between episodes.

    ``nominal`` is its value in the environment as it is; ``low`` and ``high`` are the inclusive bounds in ``unit``;
    ``integer`` parameters take whole numbers only (an index, a count of control steps).
    """

    name: str
    nominal: float
    low: float
    high: float
    unit: str
    meaning: str
    integer: bool = False

    def check(self, value: float) -> None:
        """Raise UserError unless ``value`` is allowed."""
        whole = not self.integer or float(value).is_integer()
        if not (self.low <= value <= self.high and whole):
            kind = "whole number" if self.integer else "number"
            raise UserError(
                f"parameter {self.name!r} cannot be {value:g}; give a {kind} from {self.low:g} to {self.high:g} "
                f"({self.unit}: {self.meaning})."
            )

    def grid(self, count: int) -> tuple[float, ...]:
        """About ``count`` increasing values from ``low`` to ``high``, ``nominal`` among them.

        They are evenly spaced below ``nominal`` and above it, with as many on either side where both sides exist.
        """
        sides = [end for end in (self.low, self.high) if end != self.nominal]
        steps = max(1, (count - 1) // len(sides)) if sides else 0
        span = (self.nominal + (end - self.nominal) * i / steps for end in sides for i in range(1, steps + 1))
        # Six digits, as they are printed.
        rounded = (float(round(v)) if self.integer else float(f"{v:.6g}") for v in (self.nominal, *span))
        return tuple(sorted({min(max(value, self.low), self.high) for value in rounded}))
