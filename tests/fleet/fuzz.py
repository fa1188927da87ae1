"""``python -m tests.fleet.fuzz [COUNT]``: random and changed messages for everything that reads foreign bytes.

A million by default, three quarters of them valid messages that were changed.  Whatever comes out is a value or a
ContractError of one sentence, and memory stays bounded; exits with 1 when anything else came out.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from tests.fleet.checkpoints import manifest, signing_key
from tests.fleet.fleets import MemoryPolicies, hello, spool_of
from tests.fleet.records import SPEC, chain, step
from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError
from vla_rl.fleet import disk, payloads, protocol, record, registry, transport
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet import manifest as manifests

ROBOT, EPOCH = "arm-1", "0" * 32
SEGMENT = disk.SegmentName(7, 1234)


@dataclass(frozen=True)
class Decoder:
    """``read`` raises ContractError for whatever is not valid."""

    read: Callable[[bytes], object]
    valid: Sequence[bytes]
    change: Callable[[bytes, random.Random], bytes] | None = None


def decoders() -> dict[str, Decoder]:
    """All of them by name."""
    return {**_messages(), **_payloads(), **_policies(), **_requests()}


def _messages() -> dict[str, Decoder]:
    spool = spool_of(5, robot=ROBOT, epoch=EPOCH, payload=b"some payload")
    dropped = {"kind": "dropped", "previous": bytes(32), "count": 4, "payload": b"h" * 32}
    gone = record.FleetRecord(robot=ROBOT, epoch=EPOCH, seq=5, **dropped)
    valid = [protocol.write_records(spool.records), protocol.write_records(spool.records[2:3])]
    valid += [hello(spool).SerializeToString(), pb.FromRobot(heartbeat=pb.Heartbeat(sent_ns=5)).SerializeToString()]
    valid.append(b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x78\x05" + valid[1])  # fields that are not known
    valid.append(protocol.write_records([gone]))
    many = pb.Records(records=[pb.Record()] * (protocol.MAX_RECORDS + 100))
    valid.append(pb.FromRobot(records=many).SerializeToString())
    answers = [
        pb.FromServer(welcome=pb.Welcome(server=bytes(16), durable_seq=-1, credit_bytes=5)),
        pb.FromServer(ack=pb.Ack(durable_seq=4, credit_bytes=1)),
        pb.FromServer(nack=pb.Nack(expected=4)),
    ]
    said = [one.SerializeToString() for one in answers]
    frames = [disk.frame_head(SEGMENT, i, disk.RECORD, one.encoded) + one.encoded for i, one in enumerate(chain(3), 1)]
    encoded = [one.encoded for one in (*chain(3, episode="e", task="lift é"), gone)]
    files = [b"".join(frames), frames[0], b"vsegvseg" + frames[1]]
    return {
        "from a robot": Decoder(_from_robot, valid, change_message(pb.FromRobot)),
        "from a server": Decoder(protocol.read_from_server, said, change_message(pb.FromServer)),
        "record": Decoder(lambda data: record.decode(data).encoded, encoded),
        "segment": Decoder(lambda data: [*disk.scan_frames(SEGMENT, data)], files),
    }


def _payloads() -> dict[str, Decoder]:
    image = np.random.default_rng(0).integers(0, 255, (12, 10, 3), np.uint8)
    end = payloads.EpisodeEnd("success", 20, 3, 1, 2.5)
    introductions = [payloads.pack_introduction(SPEC), wire.pack({"event": "other", "spec": SPEC.to_json()})]
    steps = [step(i).payload(quality) for i in range(2) for quality in (payloads.LOSSLESS, 90)]
    pictures = [payloads.encode_picture(*one) for one in ((image, 90), (image, 0), (image[..., :1], 0))]
    return {
        "introduction": Decoder(payloads.unpack_introduction, introductions, change_wire),
        "step": Decoder(payloads.FleetStep.from_payload, steps, change_wire),
        "picture": Decoder(payloads.decode_picture, pictures),
        "episode's end": Decoder(payloads.EpisodeEnd.from_payload, [end.payload()], change_wire),
    }


def _policies() -> dict[str, Decoder]:
    key, body = signing_key(), manifest().encode()
    trusted = manifests.TrustedKeys([key.public_pem()])
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [0, 3], "data_offsets": [24, 24]},
    }
    packed = json.dumps(header).encode()
    file = len(packed).to_bytes(8, "little") + packed + bytes(24)
    return {
        "manifest": Decoder(manifests.Manifest.decode, [body], change_json),
        "signed manifest": Decoder(trusted.read, [key.sign(manifest())]),
        "safetensors": Decoder(lambda data: registry.read_header(io.BytesIO(data), len(data)), [file], change_header),
    }


class _Context:
    """A connection that is told why it is refused; a mistake of the server's is no refusal."""

    def peer(self) -> str:
        return "a fuzzer"

    def add_done_callback(self, done: Callable[[_Context], None]) -> None:
        done(self)

    async def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        raise (RuntimeError if code is grpc.StatusCode.INTERNAL else ContractError)(sentence)


def _requests() -> dict[str, Decoder]:
    policies = MemoryPolicies()
    served, context = transport.Downloads(policies, lambda context: ""), _Context()
    loop = asyncio.new_event_loop()
    chunk = pb.ChunkRequest(sha256=policies.publish(b"abc"), offset=1, count=2).SerializeToString()
    first = pb.ManifestRequest(version=1).SerializeToString()
    asked = {
        "manifest": (served._manifest, first, pb.ManifestRequest),
        "chunk": (served._chunk, chunk, pb.ChunkRequest),
    }
    return {
        f"request for a {name}": Decoder(
            lambda data, read=read: loop.run_until_complete(read(data, context)), [valid], change_message(kind)
        )
        for name, (read, valid, kind) in asked.items()
    }


def _from_robot(data: bytes) -> object:
    """As a session reads it: a message, then its records or its introduction."""
    message = protocol.read_from_robot(data)
    if message.WhichOneof("message") == "records":
        return [one.encoded for one in protocol.read_records(ROBOT, EPOCH, message.records)]
    if message.WhichOneof("message") == "hello":
        protocol.check_hello(message.hello)
    return message


ODD: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 5, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63), 0.5, float("inf"), float("nan")),
    *("", "x", "F32", "..", "../x", "\ud800", "é" * 70, "x" * 2000, [], [1], [0, 3], [2, 3], {}, {"x": 1}),
    *([[]], [[1], [1, 2]], "0" * 64, "step", [1, "x"], -0.1, 1e300),
)


def change_bytes(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """A few changes: bytes, bits, pieces removed, inserted, repeated or taken from ``others``; or cut short."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(8):
            case 0 if at < len(made):
                made[at] = draw.randrange(256)
            case 1 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 2:
                del made[at : at + draw.randint(1, 8)]
            case 3:
                made[at:at] = draw.randbytes(draw.randint(1, 8))
            case 4:
                del made[at:]
            case 5:
                made[at:at] = made[at : at + draw.randint(1, 64)]
            case 6:
                other = draw.choice(others)
                begin = draw.randrange(len(other) + 1)
                made[at : at + draw.randint(0, 32)] = other[begin : begin + draw.randint(1, 64)]
            case 7:
                made[at : at + 4] = draw.choice((bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x80"))
    return bytes(made)


def change_value(value: Any, draw: random.Random) -> Any:
    """``value`` with one entry changed, missing or added, at any depth."""
    inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if _is_list(value) else []
    if inner and draw.random() < 0.8:
        key, item = draw.choice(inner)
        made: Any = dict(value) if isinstance(value, dict) else list(value)
        made[key] = change_value(item, draw)
        return made
    if isinstance(value, dict) and draw.random() < 0.5:
        made = dict(value)
        if draw.random() < 0.5 and made:
            del made[draw.choice(list(made))]
        else:
            made[draw.choice(("x", "shape", "names", "low", "__metadata__", "event"))] = draw.choice(ODD)
        return made
    if _is_list(value) and draw.random() < 0.5:
        return [*value, *(value or [draw.choice(ODD)])][: draw.randint(0, 20)]
    if isinstance(value, np.ndarray) and draw.random() < 0.7:
        return value.astype(draw.choice(("float64", "uint8", "float32", "bool"))).reshape(draw.choice(((-1,), (1, -1))))
    if isinstance(value, bool | int | float) and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 0.5))
    if isinstance(value, str) and value and draw.random() < 0.6:
        return value[:-1] + draw.choice("xé0/.")
    return draw.choice(ODD)


def change_json(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(change_value(json.loads(data), draw)).encode()


def change_wire(data: bytes, draw: random.Random) -> bytes:
    try:
        return wire.pack(change_value(wire.unpack(data), draw))
    except ContractError:  # what was made of it cannot be written
        return data[:-1]


def change_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header is another one, of the right length."""
    size = int.from_bytes(data[:8], "little")
    head = change_json(data[8 : 8 + size], draw)
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def change_message(make: Callable[[], Any]) -> Callable[[bytes, random.Random], bytes]:
    """Changes one field of a protobuf message, or of a message in it."""

    def change(data: bytes, draw: random.Random) -> bytes:
        message = make()
        message.ParseFromString(data)
        _change_field(message, draw)
        return bytes(message.SerializeToString())

    return change


def _change_field(message: Any, draw: random.Random) -> None:
    fields = list(message.ListFields())
    if not fields:
        return
    field, value = draw.choice(fields)
    if field.message_type is not None:
        _change_field(draw.choice(list(value)) if field.is_repeated else value, draw)
    elif isinstance(value, bytes):
        setattr(message, field.name, draw.choice((b"", value[:-1], value + b"x", bytes(len(value)))))
    elif isinstance(value, str):
        setattr(message, field.name, draw.choice(("", value + "é", "x" * 2000, value + "?")))
    else:
        made = draw.choice((0, 1, 2, 4, value + 1, max(value - 1, 0), (1 << 62) - 1, 1 << 62, (1 << 63) - 1))
        with contextlib.suppress(ValueError):  # more than the field's bits
            setattr(message, field.name, bool(made) if isinstance(value, bool) else made)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


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
