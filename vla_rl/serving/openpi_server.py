"""Serves a policy to openpi's clients: pictures, state and prompt come in, a chunk of actions goes out.

The protocol is in ``openpi.py``.  Like openpi's own server it speaks first, answers GET /healthz, and says how long it
took.  Unlike that one it computes the requests of several clients together, answers pings meanwhile, and refuses what
:class:`Listener` refuses, in one sentence and not by a traceback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from websockets.frames import CloseCode

from vla_rl import __version__
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.spec import ArraySpec
from vla_rl.serving.access import Access
from vla_rl.serving.batching import Batcher, Batching
from vla_rl.serving.listener import LIMITS, Listener, log
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.openpi import pack, unpack
from vla_rl.serving.openpi_layout import LiberoLayout, fitted
from vla_rl.serving.stateless import StatelessPolicy
from vla_rl.serving.websocket import Connection, DisconnectedError, Limits

Layout = Callable[[Mapping[str, Any]], SingleObservation]
_PINGS_S = 0.1  # how long a ping may wait while the policy computes
_FAREWELL = 1.0  # seconds that a running computation has when the server is closed


@dataclass(frozen=True)
class _Decision:
    """A chunk float32 [H,D], and what the forward pass took that chose it."""

    chunk: np.ndarray
    infer_ms: float
    batch_size: int


class OpenpiServer(Listener):
    """Answers every request with a chunk, by itself; ``layout`` reads requests.

    Without one they have the keys of openpi's LIBERO policies.  Pictures are fitted to the policy's sizes either way.
    The rest is as :class:`Listener` has it.
    """

    pages: ClassVar = {"/healthz": "OK\n"}

    def __init__(
        self,
        served: StatelessPolicy,
        port: int,
        layout: Layout | None = None,
        limits: Limits = LIMITS,
        max_connections: int = 256,
        access: Access | None = None,
        batching: Batching | None = None,
    ) -> None:
        self.served, self.layout = served, layout or LiberoLayout(served.spec)
        self.metadata = introduction(served, self.layout)
        super().__init__(port, limits, max_connections, access)
        self.batcher = Batcher(self._decide, batching or Batching())

    def server_close(self) -> None:
        """As every listener; what has not been computed is not."""
        self.batcher.close(_FAREWELL)
        super().server_close()

    def serve_connection(self, connection: Connection) -> None:
        """The metadata, then the requests of one client."""
        with self.batcher.client():  # before it may ask: a batch waits for those who are connected
            connection.send(pack(self.metadata))
            previous: dict[str, float] = {}
            while True:
                data, started = connection.receive(), time.monotonic()
                self._answer(connection, data, previous)
                previous = {"prev_total_ms": _ms_since(started)}

    def _answer(self, connection: Connection, data: bytes | str, timing: Mapping[str, float]) -> None:
        """Answer one message with a chunk, or with a text that says what is wrong with this observation."""
        request, started = _request(connection, data), time.monotonic()
        try:
            seen = fitted(self.layout(request), self.served.spec).checked(self.served.spec)
            decision = _wait(connection, self.batcher.ask(seen))
        except DisconnectedError:
            raise
        except UserError as error:
            log.warning("%s: %s", connection.peer, error)
            connection.send(str(error))
        except CancelledError:
            _refuse(connection, CloseCode.GOING_AWAY, "the server stops, so no action was chosen; start it again.")
        except Exception as error:  # of a policy or layout of the user's own: the client is told
            log.exception("%s: no action", connection.peer)
            connection.send(
                f"the policy failed ({type(error).__name__}: {error!s:.300}); look at the server's messages."
            )
        else:
            policy = {"infer_ms": decision.infer_ms, "batch_size": decision.batch_size}
            server = {"infer_ms": _ms_since(started), **timing}
            connection.send(pack({"actions": decision.chunk, "server_timing": server, "policy_timing": policy}))

    def _decide(self, seen: Sequence[SingleObservation]) -> list[_Decision | Exception]:
        started = time.monotonic()
        chunks = self.served.decide(seen)
        took = _ms_since(started)
        return [one if isinstance(one, Exception) else _Decision(one, took, len(seen)) for one in chunks]


def introduction(served: StatelessPolicy, layout: Layout) -> dict[str, Any]:
    """The metadata, with which the server begins: what a request has to hold, and what is answered."""
    spec = served.spec
    return {
        "server": f"vla-rl {__version__}",
        "policy": type(served.policy).__name__,
        "layout": _name_of(layout),
        **({"keys": [*layout.keys, "observation/state", "prompt"]} if isinstance(layout, LiberoLayout) else {}),
        "images": {name: list(item.shape) for name, item in spec.images.items()},
        "resize": "bilinear, padded with black",
        "state": _entries(spec.state),
        "actions": {**_entries(spec.action), "max_chunk": spec.max_chunk},
        "control_dt": spec.control_dt,
        "prompts": list(spec.tasks),
    }


def _name_of(layout: Layout) -> str:
    """ "libero", or the function that the user named."""
    if isinstance(layout, LiberoLayout):
        return "libero"
    return f"{layout.__module__}:{getattr(layout, '__qualname__', type(layout).__qualname__)}"


def _entries(spec: ArraySpec) -> dict[str, Any]:
    return {"size": spec.shape[-1], "names": list(spec.names), "unit": spec.unit}


def _request(connection: Connection, data: bytes | str) -> dict[str, Any]:
    """The request in ``data``; whoever sends something else is refused by a code, because what follows is no better."""
    if isinstance(data, str):
        _refuse(connection, CloseCode.UNSUPPORTED_DATA, "a request is a text, so it is refused; send msgpack.")
    try:
        return unpack(data)
    except ContractError as error:
        _refuse(connection, CloseCode.INVALID_DATA, str(error))


def _refuse(connection: Connection, code: CloseCode, why: str) -> NoReturn:
    connection.send(why)
    connection.close(code, why)
    raise DisconnectedError(f"{connection.peer} was refused: {why}")


def _wait(connection: Connection, asked: Future[_Decision]) -> _Decision:
    """The answer; pings are answered meanwhile, and nothing more is computed for a client that leaves."""
    try:
        while not wait([asked], _PINGS_S).done:
            connection.attend()
    except DisconnectedError:
        asked.cancel()
        raise
    return asked.result()


def _ms_since(started: float) -> float:
    return 1000 * (time.monotonic() - started)
