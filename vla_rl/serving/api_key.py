"""The secret that a policy server and its clients share; openpi's client sends ``Authorization: Api-Key KEY``."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from dataclasses import dataclass, field

from vla_rl.contract.errors import UserError
from vla_rl.contract.keys import read_key

VARIABLE = "VLA_RL_API_KEY"
_FORM = re.compile(r"[!-~]{16,1024}")  # what a header carries unchanged, and nobody guesses
_SCHEME = "Api-Key "


@dataclass(frozen=True)
class ApiKey:
    """A key, which is never printed."""

    _text: str = field(repr=False)

    def header(self) -> str:
        """The value of a request's Authorization."""
        return _SCHEME + self._text

    def matches(self, header: str) -> bool:
        """Whether ``header`` is that value; takes equally long whatever it is."""
        wanted, found = (
            hashlib.sha256(text.encode(errors="surrogateescape")).digest() for text in (self.header(), header)
        )
        return hmac.compare_digest(wanted, found)


def find_api_key(path: str) -> ApiKey | None:
    """The key in the file ``path`` or, with "", in the environment variable ``VLA_RL_API_KEY``; None when neither is.

    Raises UserError for a file that :func:`read_key` refuses, and for what is too short or has blanks inside; so an
    empty variable is no missing one.
    """
    if not path and VARIABLE not in os.environ:
        return None
    text = read_key(path).decode("latin-1") if path else os.environ[VARIABLE].strip()
    if not _FORM.fullmatch(text):
        where = f"the file {path!r}" if path else f"the environment variable {VARIABLE}"
        raise UserError(
            f"{where} holds no API key of 16 to 1024 visible ASCII characters, so it could be guessed or not be sent; "
            f"make one, for example with: openssl rand -hex 32{'' if path else ', or unset it'}."
        )
    return ApiKey(text)
