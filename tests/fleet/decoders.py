"""Everything that reads what another machine or a damaged disk gives: valid messages, changes, and its own code."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from tests.fleet.episodes import SPEC, step
from tests.fleet.fleets import MemoryPolicies, MemorySpool, hello
from tests.fleet.manifests import manifest, signing_key
from tests.fleet.mutations import change_header, change_json, change_message, change_wire
from tests.fleet.records import chain
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
    return {
        **_messages(),
        **_payloads(),
        **_policies(),
        **_requests(),
    }


def _messages() -> dict[str, Decoder]:
    spool = MemorySpool(ROBOT, EPOCH, payload=b"some payload")
    spool.put(5)
    valid = [protocol.write_records(spool.records), protocol.write_records(spool.records[2:3])]
    valid += [hello(spool).SerializeToString(), pb.FromRobot(heartbeat=pb.Heartbeat(sent_ns=5)).SerializeToString()]
    valid.append(b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x78\x05" + valid[1])  # fields that are not known
    valid.append(protocol.write_records([_dropped()]))
    many = pb.Records(records=[pb.Record()] * (protocol.MAX_RECORDS + 100))
    valid.append(pb.FromRobot(records=many).SerializeToString())
    answers = [
        pb.FromServer(welcome=pb.Welcome(server=bytes(16), durable_seq=-1, credit_bytes=5)),
        pb.FromServer(ack=pb.Ack(durable_seq=4, credit_bytes=1)),
        pb.FromServer(nack=pb.Nack(expected=4)),
    ]
    frames = [disk.frame_head(SEGMENT, i, disk.RECORD, one.encoded) + one.encoded for i, one in enumerate(chain(3), 1)]
    return {
        "from a robot": Decoder(
            _from_robot,
            valid,
            change_message(pb.FromRobot),
        ),
        "from a server": Decoder(
            protocol.read_from_server,
            [one.SerializeToString() for one in answers],
            change_message(pb.FromServer),
        ),
        "record": Decoder(
            lambda data: record.decode(data).encoded,
            [*(one.encoded for one in chain(3, episode="e", task="lift é")), _dropped().encoded],
        ),
        "segment": Decoder(
            lambda data: [one for one in disk.scan_frames(SEGMENT, data)],
            [b"".join(frames), frames[0], b"vsegvseg" + frames[1]],
        ),
    }


def _dropped() -> record.FleetRecord:
    return record.FleetRecord(
        robot=ROBOT, epoch=EPOCH, seq=5, kind="dropped", previous=bytes(32), count=4, payload=b"h" * 32
    )


def _payloads() -> dict[str, Decoder]:
    spec_of = SPEC.to_json()
    image = np.random.default_rng(0).integers(0, 255, (12, 10, 3), np.uint8)
    end = payloads.EpisodeEnd("success", 20, 3, 1, 2.5)
    made = [step(i) for i in range(2)]
    return {
        "introduction": Decoder(
            payloads.unpack_introduction,
            [payloads.pack_introduction(SPEC), wire.pack({"event": "other", "spec": spec_of})],
            change_wire,
        ),
        "step": Decoder(
            payloads.FleetStep.from_payload,
            [one.payload(quality) for one in made for quality in (payloads.LOSSLESS, 90)],
            change_wire,
        ),
        "picture": Decoder(
            payloads.decode_picture,
            [
                payloads.encode_picture(image, 90),
                payloads.encode_picture(image, 0),
                payloads.encode_picture(image[..., :1], 0),
            ],
        ),
        "episode's end": Decoder(
            payloads.EpisodeEnd.from_payload,
            [end.payload()],
            change_wire,
        ),
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
    return {
        "manifest": Decoder(
            manifests.Manifest.decode,
            [body],
            change_json,
        ),
        "signed manifest": Decoder(trusted.read, [key.sign(manifest())]),
        "safetensors": Decoder(
            lambda data: registry.read_header(io.BytesIO(data), len(data)),
            [len(packed).to_bytes(8, "little") + packed + bytes(24)],
            change_header,
        ),
    }


class _Context:
    """A connection that is told why it is refused; a mistake of the server's is no refusal."""

    def peer(self) -> str:
        return "a fuzzer"

    def add_callback(self, done: Callable[[], None]) -> bool:
        return False  # it is over

    def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        raise (RuntimeError if code is grpc.StatusCode.INTERNAL else ContractError)(sentence)


def _requests() -> dict[str, Decoder]:
    policies = MemoryPolicies()
    chunk = pb.ChunkRequest(sha256=policies.publish(b"abc"), offset=1, count=2)
    served, context = transport.Downloads(policies, lambda context: ""), _Context()
    return {
        "request for a manifest": Decoder(
            lambda data: served._manifest(data, context),
            [pb.ManifestRequest(version=1).SerializeToString()],
            change_message(pb.ManifestRequest),
        ),
        "request for a chunk": Decoder(
            lambda data: served._chunk(data, context),
            [chunk.SerializeToString()],
            change_message(pb.ChunkRequest),
        ),
    }


def _from_robot(data: bytes) -> object:
    """As a session reads it: a message, then its records or its introduction."""
    message = protocol.read_from_robot(data)
    if message.WhichOneof("message") == "records":
        return [one.encoded for one in protocol.read_records(ROBOT, EPOCH, message.records)]
    if message.WhichOneof("message") == "hello":
        protocol.check_hello(message.hello)
    return message
