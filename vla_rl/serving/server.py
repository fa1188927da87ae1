"""Serves a policy to benchmarks of the vla-eval harness, on this machine only.

Like the harness's own model servers it answers GET /health.  Unlike them it refuses: other machines, web pages (a
request with an Origin), messages that are oversized, malformed or slow, and connections beyond a number.  A benchmark
on another machine reaches it through ``ssh -L``.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from websockets.frames import CloseCode

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.serving.episode import Episode, ServedPolicy
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.vla_eval import Kind, Message, check_hello, hello, pack, read_observation, unpack
from vla_rl.serving.websocket import ClosedError, Connection, DisconnectedError, Limits, accept

Layout = Callable[[Mapping[str, Any]], SingleObservation]
log = logging.getLogger("vla_rl.serving")
_LIMITS = Limits()
_PAGES = {"/health": '{"status": "ok"}\n'}
_FAREWELL = 1.0  # seconds that open connections have in all when the server is closed


class PolicyServer(socketserver.ThreadingTCPServer):
    """Listens on ``port`` of 127.0.0.1 (0: any that is free) and answers each connection in a thread of its own.

    ``layout`` turns the harness's observation into ours.  At most ``max_connections`` are answered at a time.  Raises
    UserError when the port cannot be had.
    """

    daemon_threads, block_on_close = True, False
    allow_reuse_address = True

    def __init__(
        self,
        served: ServedPolicy,
        port: int,
        layout: Layout = read_observation,
        limits: Limits = _LIMITS,
        max_connections: int = 256,
    ) -> None:
        self.served, self.layout, self.limits = served, layout, limits
        self._places = threading.BoundedSemaphore(max_connections)
        self._answering: set[threading.Thread] = set()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} cannot be served on ({error}), so nobody could ask for actions; choose another one, or "
                "--port 0 for any that is free."
            ) from error

    @property
    def url(self) -> str:
        """What the harness's ``server.url`` is."""
        return f"ws://127.0.0.1:{self.server_address[1]}"

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is a place for another connection."""
        if self._places.acquire(blocking=False):
            return True
        log.warning("refused a connection from %s: as many as allowed are open", client_address)
        return False

    def server_close(self) -> None:
        """Stop listening, and wait a second for those that are being answered.

        Python would otherwise end while their threads compute, which aborts it in torch's code.
        """
        super().server_close()
        until = time.monotonic() + _FAREWELL
        for thread in tuple(self._answering):
            thread.join(max(0.0, until - time.monotonic()))

    def answer(self, sock: socket.socket, peer: str) -> None:
        """Serve one connection until it ends."""
        connection: Connection | None = None
        self._answering.add(threading.current_thread())
        try:
            connection = accept(sock, peer, self.limits, _PAGES)
            if connection is not None:
                log.info("%s connected", peer)
                _Session(connection, self.served, self.layout).run()
        except ClosedError:
            log.info("%s left", peer)
        except UserError as error:
            log.warning("%s", error)
        finally:
            if connection is not None:
                connection.close()
            self._places.release()
            self._answering.discard(threading.current_thread())


class _Handler(socketserver.BaseRequestHandler):
    server: PolicyServer

    def handle(self) -> None:
        self.server.answer(self.request, f"{self.client_address[0]}:{self.client_address[1]}")


class _Session:
    """The messages of one benchmark, in order."""

    def __init__(self, connection: Connection, served: ServedPolicy, layout: Layout) -> None:
        self.connection, self.served, self.layout = connection, served, layout
        self.episode: Episode | None = None

    def run(self) -> None:
        """Answer until the connection ends; raises DisconnectedError then, or when it is refused."""
        while True:
            data = self.connection.receive()
            try:
                message = unpack(data)
                self._handle(message)
            except ContractError as error:
                self._send(Kind.ERROR, {"error": str(error)}, 0)
                self.connection.close(CloseCode.INVALID_DATA, "malformed message")
                raise DisconnectedError(f"{self.connection.peer} was refused: {error}") from error

    def _handle(self, message: Message) -> None:
        """Answer one message; raises ContractError for one that this protocol has no place for."""
        if message.kind is Kind.HELLO:
            check_hello(message.payload)
            self._send(Kind.HELLO, hello(**introduction(self.served)), message.seq)
        elif message.kind is Kind.EPISODE_START:
            task = message.payload.get("task", {})
            self.episode = self.served.begin(task if isinstance(task, dict) else {})
        elif message.kind is Kind.OBSERVATION:
            self._act(message)
        elif message.kind is Kind.EPISODE_END:
            self.episode = None
        elif message.kind is Kind.ERROR:
            log.warning("%s reports: %.300s", self.connection.peer, message.payload)
        else:
            raise ContractError(f"a benchmark sent {message.kind.value!r}, so it is refused; only servers act.")

    def _act(self, message: Message) -> None:
        """Answer with an action, or with what is wrong with this observation; the connection goes on in either case."""
        try:
            if self.episode is None:
                raise ContractError("an observation came outside an episode, so nothing was chosen; start one first.")
            action = self.episode.act(self.layout(message.payload))
        except UserError as error:
            log.warning("%s: %s", self.connection.peer, error)
            self._send(Kind.ERROR, {"error": str(error)}, message.seq)
        except Exception as error:  # of a policy or layout of the user's own: the benchmark counts a failed episode
            log.exception("%s: no action", self.connection.peer)
            self._send(Kind.ERROR, {"error": f"the policy failed ({type(error).__name__}: {error})"}, message.seq)
        else:
            self._send(Kind.ACTION, {"actions": action}, message.seq)

    def _send(self, kind: Kind, payload: Mapping[str, Any], seq: int) -> None:
        self.connection.send(pack(Message(kind, payload, seq)))


def introduction(served: ServedPolicy) -> dict[str, Any]:
    """What the server's HELLO says of the policy: its class, what it has to be shown, and what it answers with."""
    spec = served.spec
    return {
        "model_server": type(served.policy).__name__,
        "capabilities": {},
        "observation_params": _benchmark_parameters(spec),
        "observation_spec": {
            **{name: {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"} for name in spec.images},
            "state": {"name": "state", "dims": spec.state.shape[0], "format": "raw"},
            "language": {"name": "language", "dims": 0, "format": "language"},
        },
        "action_spec": {"actions": {"name": "actions", "dims": spec.action_dim, "format": "raw"}},
    }


def _benchmark_parameters(spec: EnvSpec) -> dict[str, Any]:
    """Arguments that the harness gives a benchmark that has them: proprioception, and a second camera."""
    return {"send_state": True, **({"send_wrist_image": True} if len(spec.images) > 1 else {})}
