"""What robots download beside their stream: manifests of policies by version, ranges of chunks by SHA-256."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.channels import CHUNK, CHUNK_BYTES, MANIFEST
from vla_rl.fleet.connections import Peer, peer_of

log = logging.getLogger("vla_rl.fleet")
Code = grpc.StatusCode
_AT_ONCE = 4  # downloads of a robot, also those that it does not read


class Policies(Protocol):
    """What robots can download; ``changes`` grows whenever some robot's ``head`` (version, state) may have changed.

    ``manifest`` and ``chunk`` (at most ``count`` bytes from ``offset`` on) raise KeyError for what there is not.
    """

    def head(self, robot: str) -> tuple[int, str]: ...

    def changes(self) -> int: ...

    def manifest(self, version: int) -> bytes: ...

    def chunk(self, sha256: bytes, offset: int, count: int) -> bytes: ...


class Downloads:
    """Answers from ``policies`` to whom ``admit`` lets in; it raises UserError for anybody else."""

    def __init__(self, policies: Policies, admit: Callable[[grpc.ServicerContext], str]) -> None:
        self._policies, self._admit, self._lock = policies, admit, threading.Lock()
        self._running: list[tuple[str, Peer]] = []  # whose, and where to

    def peers(self) -> set[Peer]:
        """Where something is on its way to."""
        with self._lock:
            return {peer for _, peer in self._running}

    def calls(self) -> dict[str, grpc.RpcMethodHandler]:
        """gRPC's handlers by name."""
        return {
            MANIFEST: grpc.unary_unary_rpc_method_handler(self._manifest),
            CHUNK: grpc.unary_unary_rpc_method_handler(self._chunk),
        }

    def _manifest(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        def read() -> bytes:
            return self._policies.manifest(pb.ManifestRequest.FromString(data).version)

        return self._answer(read, context)

    def _chunk(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        def read() -> bytes:
            asked = pb.ChunkRequest.FromString(data)
            if len(asked.sha256) != 32:
                raise ContractError(f"a chunk was asked for by {len(asked.sha256)} bytes; ask by its SHA-256.")
            return self._policies.chunk(asked.sha256, asked.offset, min(asked.count, CHUNK_BYTES))

        return self._answer(read, context)

    def _answer(self, read: Callable[[], bytes], context: grpc.ServicerContext) -> bytes:
        code, sentence = Code.INTERNAL, "the server made a mistake, which is in its log."
        try:
            self._begin(self._admit(context), context)
            data: bytes = pb.Bytes(data=read()).SerializeToString()
            return data
        except ContractError as error:
            code, sentence = Code.INVALID_ARGUMENT, f"a request for a policy was refused: {error}"
        except DecodeError as error:
            code, sentence = Code.INVALID_ARGUMENT, f"a request for a policy cannot be read ({error}); update vla-rl."
        except UserError as error:
            code, sentence = Code.PERMISSION_DENIED, str(error)
        except BlockingIOError as error:
            code, sentence = Code.RESOURCE_EXHAUSTED, str(error)
        except KeyError as error:
            code, sentence = Code.NOT_FOUND, f"the server has no {error.args[0] if error.args else 'such policy'}."
        except Exception:
            log.exception("a download failed")
        log.warning("a download by %s was refused: %s", context.peer(), sentence)
        context.abort(code, sentence)
        raise AssertionError("abort raises")

    def _begin(self, robot: str, context: grpc.ServicerContext) -> None:
        """Count it until it has arrived or was given up; raises BlockingIOError where a robot has too many."""
        peer = peer_of(context.peer())
        one = (robot or f"{peer}", peer)  # without certificates a connection is a robot
        with self._lock:
            if sum(owner == one[0] for owner, _ in self._running) >= _AT_ONCE:
                raise BlockingIOError(f"a robot may download {_AT_ONCE} pieces at once, so this one waits; ask later.")
            self._running.append(one)
        if not context.add_callback(lambda: self._end(one)):
            self._end(one)

    def _end(self, one: tuple[str, Peer]) -> None:
        with self._lock:
            self._running.remove(one)
