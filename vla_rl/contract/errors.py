"""Errors a user can act on: one sentence that names the offender, the consequence and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend; the command line prints its sentence without a traceback."""


class ContractError(UserError, ValueError):
    """Data that breaks the contract: wrong shape, dtype, range or a spec that does not match."""


class NonFiniteError(UserError, ArithmeticError):
    """A NaN or infinity in an action, a loss or a gradient; the message names the tensor and the step."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` when something close is known, else the list of what is known."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options) or 'none'}."
