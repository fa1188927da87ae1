"""One record of a robot, as it is written, sent and stored: who, which number, what, and the hash of the one before.

A robot's records are numbered 0, 1, 2, ... without gaps within an epoch, which is the life of one spool (the store on
the robot).  Each record holds the SHA-256 of the record before, so that a missing, changed or reordered record is
noticed wherever the records are read.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from vla_rl.contract.errors import ContractError

KINDS = ("step", "episode_end", "event", "dropped")
NO_HASH = bytes(32)  # "previous" of the first record of an epoch
MAX_PAYLOAD = 16 << 20  # bytes
MAX_TASK = 1024  # bytes in UTF-8
_MAX_SEQ = (1 << 62) - 1
_MAGIC = b"vfr1"
# magic, kind, intervened, lengths of robot, episode and task, length of the payload, seq, count, version, captured,
# wall, epoch, previous
_HEAD = struct.Struct("<4sBBHHHIQQqqq16s32s")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EPISODE = re.compile(r"[A-Za-z0-9._:/-]{0,128}")
_EPOCH = re.compile(r"[0-9a-f]{32}")


class Sender(NamedTuple):
    """Whose sequence numbers count together: a robot, and the epoch of its spool."""

    robot: str
    epoch: str


@dataclass(frozen=True, kw_only=True)
class FleetRecord:
    """``payload``: bytes of ``contract/wire.py``; ``captured_ns``: the robot's monotonic clock; ``wall_ns``: its wall
    clock, which nothing is decided by.

    ``kind`` "dropped" stands for the ``count`` records from ``seq`` on, which the robot gave up because its disk was
    full; its payload is the hash of the last of them, so that the chain goes on behind it.  Every other record has
    ``count`` 1.  Raises ContractError for a field out of its bounds.
    """

    robot: str
    epoch: str
    seq: int
    kind: str
    previous: bytes
    episode: str = ""
    task: str = ""
    policy_version: int = 0
    intervened: bool = False
    captured_ns: int = 0
    wall_ns: int = 0
    count: int = 1
    payload: bytes = b""

    def __post_init__(self) -> None:
        wrong = self._wrong()
        if wrong:
            raise ContractError(
                f"a record of robot {self.robot!r:.80} has {wrong}, so it is refused; look at the program that made it."
            )

    def _wrong(self) -> str:
        if not NAME.fullmatch(self.robot):
            return "a robot's name that is not 1 to 64 letters, digits, '.', '_' or '-'"
        if not _EPOCH.fullmatch(self.epoch):
            return f"the epoch {self.epoch!r:.80}, which is not 32 hexadecimal digits"
        if self.kind not in KINDS:
            return f"the kind {self.kind!r:.80}, which is not one of {', '.join(KINDS)}"
        if not _EPISODE.fullmatch(self.episode):
            return f"the episode {self.episode!r:.80}, which is not at most 128 letters, digits or ._:/-"
        if len(self.task.encode(errors="replace")) > MAX_TASK or not _is_text(self.task):
            return f"a task that is not at most {MAX_TASK} bytes of UTF-8"
        if not 0 <= self.seq <= _MAX_SEQ or not 1 <= self.count <= _MAX_SEQ - self.seq + 1:
            return f"the sequence numbers {self.seq} and {self.count - 1} more"
        if self.count != 1 and self.kind != "dropped":
            return f"a count of {self.count}, which only a dropped record may have"
        if not all(-(1 << 63) <= n < 1 << 63 for n in (self.policy_version, self.captured_ns, self.wall_ns)):
            return "a policy version or a time beyond 64 bits"
        if len(self.previous) != len(NO_HASH):
            return f"a previous hash of {len(self.previous)} bytes"
        if len(self.payload) > MAX_PAYLOAD:
            return f"a payload of {len(self.payload)} bytes, more than {MAX_PAYLOAD}"
        if self.kind == "dropped" and len(self.payload) != len(NO_HASH):
            return "no hash of the last record that was dropped"
        return ""

    @property
    def sender(self) -> Sender:
        return Sender(self.robot, self.epoch)

    @property
    def last(self) -> int:
        """The last sequence number that this record stands for."""
        return self.seq + self.count - 1

    @cached_property
    def encoded(self) -> bytes:
        """The record as bytes; every record has exactly one encoding."""
        robot, episode, task = (text.encode() for text in (self.robot, self.episode, self.task))
        head = _HEAD.pack(
            _MAGIC,
            KINDS.index(self.kind),
            self.intervened,
            len(robot),
            len(episode),
            len(task),
            len(self.payload),
            self.seq,
            self.count,
            self.policy_version,
            self.captured_ns,
            self.wall_ns,
            bytes.fromhex(self.epoch),
            self.previous,
        )
        return b"".join((head, robot, episode, task, self.payload))

    @cached_property
    def hash(self) -> bytes:
        """What the next record holds as ``previous``: SHA-256 of the encoded record, of the last one if dropped."""
        return self.payload if self.kind == "dropped" else hashlib.sha256(self.encoded).digest()

    def after(self, seq: int, previous: bytes) -> FleetRecord:
        """What a dropped record still stands for behind ``seq``, whose hash is ``previous``."""
        return replace(self, seq=seq + 1, count=self.last - seq, previous=previous)


def decode(data: bytes) -> FleetRecord:
    """The record in ``data``, all of it; raises ContractError for any other bytes."""
    if len(data) < _HEAD.size:
        raise _unreadable(data, "is too short")
    magic, kind, intervened, robots, episodes, tasks, payloads, seq, count, version, captured, wall, epoch, previous = (
        _HEAD.unpack_from(data)
    )
    if magic != _MAGIC or kind >= len(KINDS) or intervened > 1:
        raise _unreadable(data, "does not begin like one")
    ends = [_HEAD.size]
    for length in (robots, episodes, tasks, payloads):
        ends.append(ends[-1] + length)
    if ends[-1] != len(data):
        raise _unreadable(data, f"announces {ends[-1]}")
    try:
        robot, episode, task = (data[start:end].decode() for start, end in pairwise(ends[:4]))
    except UnicodeDecodeError as error:
        raise _unreadable(data, "holds text that is not UTF-8") from error
    return FleetRecord(
        robot=robot,
        epoch=epoch.hex(),
        seq=seq,
        kind=KINDS[kind],
        previous=previous,
        episode=episode,
        task=task,
        policy_version=version,
        intervened=bool(intervened),
        captured_ns=captured,
        wall_ns=wall,
        count=count,
        payload=bytes(data[ends[3] :]),
    )


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _unreadable(data: bytes, why: str) -> ContractError:
    return ContractError(
        f"a record of {len(data)} bytes {why}, so it cannot be read and is refused; look for a broken or foreign "
        "sender."
    )
