"""Addresses of policy servers, as a user writes them where a checkpoint that is evaluated could stand."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.trust import read_key

Protocol = Literal["openpi", "vla-eval"]
_SCHEMES: dict[str, tuple[Protocol, str]] = {
    "ws": ("openpi", "ws"),
    "wss": ("openpi", "wss"),
    "vla-eval+ws": ("vla-eval", "ws"),
    "vla-eval+wss": ("vla-eval", "wss"),
}


def names_server(name: object) -> bool:
    """Whether ``name`` is the address of a policy server and no checkpoint."""
    return str(name).partition("://")[0] in _SCHEMES and "://" in str(name)


@dataclass(frozen=True)
class Address:
    """Where a policy server is and how it is asked.

    ``ws://HOST:PORT`` (or ``wss``) is a server of openpi, ``vla-eval+ws://HOST:PORT`` a model server of the vla-eval
    harness; ``?replan_steps=5&layout=module:function&answer_s=60`` sets the rest.
    """

    protocol: Protocol
    url: str
    replan_steps: int = 0  # actions of every chunk that are executed; 0: all that the environment takes at once
    layout: str = ""  # "module:function" from a SingleObservation to a request; "": the protocol's usual keys
    answer_s: float = 120.0  # how long an answer may take; the first one often compiles the model
    key_file: str = ""  # holds the server's API key; "": the environment variable VLA_RL_API_KEY, if it is set

    @classmethod
    def parse(cls, name: str) -> Address:
        """The address that a user wrote; raises UserError for one that cannot be used."""
        parts = urlsplit(name)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise UserError(
                f"{name!r} is no address of a policy server, so nobody can be asked for actions; write "
                "ws://HOST:PORT or vla-eval+ws://HOST:PORT."
            )
        protocol, scheme = _SCHEMES[parts.scheme]
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        read: Mapping[str, Callable[[str], object]] = {
            "replan_steps": int,
            "layout": str,
            "answer_s": float,
            "key_file": str,
        }
        options: dict[str, object] = {}
        for option, text in given.items():
            if option not in read:
                raise UserError(
                    f"the address {name!r} has an option {option!r}, which has no meaning; {did_you_mean(option, read)}"
                )
            try:
                options[option] = read[option](text)
            except ValueError as error:
                raise UserError(f"{option} of the address {name!r} is {text!r}; write a number.") from error
        return cls(protocol, urlunsplit((scheme, parts.netloc, parts.path, "", "")), **options)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        if self.replan_steps < 0 or not 0 < self.answer_s < math.inf:
            raise UserError(
                f"replan_steps={self.replan_steps} and answer_s={self.answer_s} have no meaning; execute at least one "
                "action of a chunk, and wait for a positive time."
            )


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
