"""Errors that a user can act on: one sentence that names the offender, the consequence and the cure."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(Exception):
    """A mistake that the user can mend; the command line prints the sentence without a traceback."""


class ContractError(UserError, ValueError):
    """Data that breaks the contract: a wrong shape, dtype or range, or a spec that does not match."""


class NonFiniteError(UserError, ArithmeticError):
    """A NaN or infinity in an action, a loss or a gradient; the message names the tensor and the step."""


class Terminated(KeyboardInterrupt):
    """SIGTERM; it differs from Ctrl-C in its exit status only."""


def printable(text: str) -> str:
    """``text`` without what steers a terminal: a folder of others may have put it there."""
    return _CONTROL.sub("?", text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` when a known name is close, else the list of all known names."""
    options = sorted(known)
    close = difflib.get_close_matches(name[:200], options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options) or 'none'}."


def cause_of(error: BaseException) -> str:
    """``error`` of somebody else's code, for a sentence: its kind, its text, and the line that raised it."""
    text = " ".join(traceback.format_exception_only(error)[-1].split()).rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not {"site-packages", "lib"} & set(Path(frame.filename).parts)]
    where = f", at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{text[:300]}{where}"
