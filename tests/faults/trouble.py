"""What goes wrong besides kills, one thing at a time: links, disks, clocks, and a robot that is replaced."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from tests.faults.board import POINTS
from tests.faults.fleet import Fleet

HOUR_MS = 3_600_000
FAILING = ("before write", "before sync", "before commit", "before folder sync", "before create")


def reset(fleet: Fleet, draw: random.Random) -> None:
    """Every connection ends with a reset."""
    for one in fleet.robots:
        one.proxy.reset()


def cut(fleet: Fleet, draw: random.Random) -> None:
    """A connection is cut in the middle of something."""
    draw.choice(fleet.robots).proxy.cut_after(draw.randint(0, 40_000))


def slow(fleet: Fleet, draw: random.Random) -> None:
    """A link is late and narrow."""
    proxy = draw.choice(fleet.robots).proxy
    proxy.delay_s, proxy.bytes_per_s = draw.uniform(0.0, 0.05), draw.uniform(50_000, 500_000)


def freeze(fleet: Fleet, draw: random.Random) -> None:
    """A link carries nothing, and neither end learns of it."""
    draw.choice(fleet.robots).proxy.freeze()


def refuse(fleet: Fleet, draw: random.Random) -> None:
    """The server cannot be reached."""
    one = draw.choice(fleet.robots)
    one.proxy.refuse()
    one.proxy.reset()


def flipped_bit(fleet: Fleet, draw: random.Random) -> None:
    """A bit changes on the way."""
    draw.choice(fleet.robots).proxy.flip()


def full_disk(fleet: Fleet, draw: random.Random) -> None:
    """Somebody's disk is full; a robot drops whole episodes then, and no intervention."""
    draw.choice((fleet.server, *fleet.robots)).board["full"] = 1


def failing_disk(fleet: Fleet, draw: random.Random) -> None:
    """A write or a sync of somebody's disk fails: that process ends, and is started again."""
    draw.choice(fleet.processes).board["failing"] = POINTS.index(draw.choice(FAILING))


def clock_jump(fleet: Fleet, draw: random.Random) -> None:
    """Somebody's clock goes forward by up to an hour, and its wall clock anywhere."""
    board = draw.choice((fleet.server, *fleet.robots)).board
    board["ahead_ms"] += draw.randint(0, HOUR_MS)
    board["wall_ms"] = draw.randint(-1000 * HOUR_MS, 1000 * HOUR_MS)


def replaced_robot(fleet: Fleet, draw: random.Random) -> None:
    """A robot is replaced by another one of its name, and is told so."""
    old = draw.choice(fleet.robots)
    fleet.until(lambda: old.board["acknowledged"] or old.ended() or fleet.server.ended(), "the server knows a robot")
    new = fleet.replace(old)
    fleet.until(lambda: new.board["told"] or new.ended() or fleet.server.ended(), "a namesake is told so")


TROUBLE: Mapping[str, Callable[[Fleet, random.Random], None]] = {
    made.__name__: made
    for made in (
        *(reset, cut, slow, freeze, refuse, flipped_bit),
        *(full_disk, failing_disk, clock_jump, replaced_robot),
    )
}


def calm(fleet: Fleet) -> None:
    """Links carry, disks have room and do not fail."""
    for one in fleet.robots:
        one.proxy.calm()
        one.board["failing"] = one.board["full"] = 0
    fleet.server.board["failing"] = fleet.server.board["full"] = fleet.learner.board["failing"] = 0
