"""``python -m tests.fleet.fuzz [COUNT]``: random and changed messages for everything that reads foreign bytes.

A million by default, three quarters of them valid messages that were changed.  Whatever comes out is a value or a
ContractError of one sentence, and memory stays bounded; exits with 1 when anything else came out.
"""

from __future__ import annotations

import logging
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.fleet.decoders import Decoder, decoders
from tests.fleet.mutations import change_bytes
from vla_rl.contract.errors import ContractError

COUNT = 1_000_000
MAX_GROWTH_MB = 256  # a picture of MAX_SIDE pixels a side, twice, and what is around it


@dataclass
class Found:
    """What became of the messages; ``wrong``: what must not come out."""

    messages: int = 0
    changed: int = 0  # of them made from valid ones
    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    growth_mb: float = 0.0
    seconds: float = 0.0


def fuzz(count: int, seed: int = 0) -> Found:
    """Give ``count`` messages to the decoders."""
    start, draw, found, made = time.monotonic(), random.Random(seed), Found(), decoders()
    before, log = 0.0, logging.getLogger("vla_rl.fleet")
    level = log.level
    log.setLevel(logging.ERROR)  # refusals are expected here
    for number in range(count):
        name = draw.choice(list(made))
        data, changed = message(made[name], draw)
        found.messages, found.changed = found.messages + 1, found.changed + changed
        _give(name, made[name], data, found)
        if number == count // 100:
            before = _peak_mb()
    log.setLevel(level)
    found.growth_mb, found.seconds = _peak_mb() - before, time.monotonic() - start
    return found


def message(decoder: Decoder, draw: random.Random) -> tuple[bytes, bool]:
    """One message, and whether it was made from a valid one."""
    valid, kind = draw.choice(decoder.valid), draw.random()
    if kind < 0.05:
        return draw.randbytes(draw.choice((0, 3, 40, 300))), False
    if kind < 0.2:
        return valid[: draw.randint(0, 8)] + draw.randbytes(draw.randint(0, 200)), False
    if kind < 0.25:
        return valid, False
    if decoder.change is not None and kind < 0.7:
        return decoder.change(valid, draw), True
    return change_bytes(valid, decoder.valid, draw), True


def _give(name: str, decoder: Decoder, data: bytes, found: Found) -> None:
    try:
        decoder.read(data)
        found.read[name] += 1
    except ContractError as error:
        found.refused[name] += 1
        if not str(error).endswith(".") or len(str(error)) > 1000:
            found.wrong.append(f"{name} refuses {data[:60]!r} by {str(error)[:300]!r}")
    except Exception as error:
        found.wrong.append(f"{name} answers {data[:60]!r} by {type(error).__name__}: {str(error)[:200]}")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(given: Sequence[str]) -> int:
    """Run and print; returns the exit code."""
    found = fuzz(int(given[0]) if given else COUNT)
    share = found.changed / found.messages
    print(f"{found.messages} messages, {share:.0%} of them changed valid ones, in {found.seconds:.0f} s")
    for name in decoders():
        print(f"  {name}: {found.read[name]} read, {found.refused[name]} refused")
    print(f"memory grew by {found.growth_mb:.0f} MB; {len(found.wrong)} other answers")
    for line in found.wrong[:20]:
        print(f"  {line}")
    return int(bool(found.wrong) or share < 0.5 or found.growth_mb > MAX_GROWTH_MB)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
