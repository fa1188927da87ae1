"""What the last record of an episode says: how it ended, and how much of it was whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError

MAX_OUTCOME = 64  # characters
_MOST_STEPS, _MOST_SECONDS = 1 << 31, 1e9  # so that sums of them stay numbers


@dataclass(frozen=True)
class EpisodeEnd:
    """The end of an episode of ``steps`` control steps, of which a person chose ``intervened`` and the supervisor
    changed ``clipped``.

    ``outcome`` is a cause as in ``Step.cause``; "success" is one.  Raises ContractError for numbers that cannot be.
    """

    outcome: str
    steps: int
    intervened: int
    clipped: int
    seconds: float

    def __post_init__(self) -> None:
        counts = (self.intervened, self.clipped)
        if not 0 < len(self.outcome) <= MAX_OUTCOME or not self.outcome.isprintable():
            raise _refused(f"the outcome {self.outcome!r:.80}")
        if not 0 <= self.steps <= _MOST_STEPS or not all(0 <= count <= self.steps for count in counts):
            raise _refused(f"{self.steps} steps, of which {self.intervened} intervened and {self.clipped} clipped")
        if not 0 <= self.seconds <= _MOST_SECONDS:
            raise _refused(f"a length of {self.seconds!r} s")

    @property
    def success(self) -> bool:
        """Whether the episode succeeded."""
        return self.outcome == "success"

    def payload(self) -> bytes:
        """The payload of the record that ends an episode."""
        return wire.pack(asdict(self))

    @classmethod
    def from_payload(cls, payload: bytes) -> EpisodeEnd:
        """What :meth:`payload` packed; raises ContractError for any other bytes."""
        message = wire.unpack(payload)
        if not isinstance(message, dict) or message.keys() != _TYPES.keys():
            raise _refused(f"{type(message).__name__} instead of {', '.join(_TYPES)}")
        for name, right in _TYPES.items():
            if not right(message[name]):
                raise _refused(f"{name} {message[name]!r:.80}")
        return cls(**message)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "outcome": lambda value: type(value) is str,
    "steps": lambda value: type(value) is int,
    "intervened": lambda value: type(value) is int,
    "clipped": lambda value: type(value) is int,
    "seconds": lambda value: type(value) is float,
}


def _refused(what: str) -> ContractError:
    return ContractError(
        f"the end of an episode says {what}, so the episode is not counted; look at the program that recorded it."
    )
