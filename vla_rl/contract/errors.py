"""Errors that a user can act on: one sentence that names the offender, the consequence and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can mend; the command line prints the sentence without a traceback."""


class ContractError(UserError, ValueError):
    """Data that breaks the contract: a wrong shape, dtype or range, or a spec that does not match."""


class NonFiniteError(UserError, ArithmeticError):
    """A NaN or infinity in an action, a loss or a gradient; the message names the tensor and the step."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` when a known name is close, else the list of all known names."""
    options = sorted(known)
    close = difflib.get_close_matches(name[:200], options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options) or 'none'}."
