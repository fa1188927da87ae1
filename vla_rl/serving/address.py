"""Addresses of policy servers, as a user writes them where a checkpoint that is evaluated could stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from vla_rl.contract.errors import UserError, did_you_mean

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
