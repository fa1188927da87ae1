"""openpi's protocol: a client sends an observation, the server answers with a chunk of actions.

Source: github.com/Physical-Intelligence/openpi, ``packages/openpi-client`` (``msgpack_numpy.py``,
``websocket_client_policy.py``) and ``src/openpi/serving/websocket_policy_server.py``.  The server speaks first, with
its metadata.  Every message is one msgpack map; an array is the map ``{b"__ndarray__": True, b"data", b"dtype",
b"shape"}``, a numpy scalar ``{b"__npgeneric__": True, b"data", b"dtype"}``.  A text instead of bytes is the server's
traceback.  openpi's server keeps no state between requests, so one connection serves all environments, and it draws its
own noise: answers to equal observations differ.

Our server too speaks first, answers GET /healthz, and says how long it took.  Unlike openpi's own it computes the
requests of several clients together, answers pings meanwhile, and refuses what :class:`Listener` refuses, in one
sentence and not by a traceback.  It reads the keys of openpi's LIBERO policies, pictures of any size
(``src/openpi/policies/libero_policy.py``; ``openpi-client``'s ``image_tools.py``: scaling without distortion).

A request may have keys of ours besides, which openpi's client sends on as they are:

    session  a text: one of several robots or environments on this connection, each of which has the policy's state of
             its own; without it the connection is one
    reset    true: an episode begins, so the session's state does, as with its first request
    prefix   float [n,D]: the rest of the session's last chunk, which is executed while the next is computed
    delay    how many of its actions are (real-time chunking; LeRobot's ``prev_chunk_left_over``, ``inference_delay``)
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import numpy as np
from PIL import Image
from websockets.frames import CloseCode

from vla_rl import __version__
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import State
from vla_rl.serving import arrays
from vla_rl.serving.access import Access, ApiKey
from vla_rl.serving.observation import Request, SingleObservation, chunk_of
from vla_rl.serving.served import Asked, Batcher, Batching, Decision, SessionPolicy
from vla_rl.serving.websocket import LIMITS, Connection, DisconnectedError, Limits, Listener, connect, log

CAMERAS = ("observation/image", "observation/wrist_image")
Layout = Callable[[Mapping[str, Any]], SingleObservation]
_PINGS_S = 0.1  # how long a ping may wait while the policy computes
_FAREWELL = 1.0  # seconds that a running computation has when the server is closed
_MOST_SESSIONS = 4096  # of one connection whose state is kept: those that asked last
_LONGEST_NAME = 100
_OVERSHOOT = 0.5  # beyond 0 and 1, of a picture that was scaled; others are in 0 to 255 or -1 to 1


def pack(message: Mapping[str, Any]) -> bytes:
    """One message as bytes; raises ContractError for what the other side could not read."""
    return arrays.pack(message, _encode)


def unpack(data: bytes) -> dict[str, Any]:
    """The message in ``data``; raises ContractError for anything but a map with text keys."""
    message = arrays.unpack(data, _decode)
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise ContractError(
            "a message is no map with text keys, so it is refused; check that the server speaks openpi's protocol."
        )
    return message


def libero_request(obs: SingleObservation) -> dict[str, Any]:
    """``obs`` in the keys of openpi's LIBERO policies: one or two cameras, the scene first and then the wrist.

    Raises UserError for another number of cameras: servers of other robots have other keys, which a function of the
    user's own writes (``layout=module:function`` in the address).
    """
    if not 1 <= len(obs.images) <= len(CAMERAS):
        raise UserError(
            f"the environment has {len(obs.images)} cameras, but openpi's LIBERO policies have one or two, so the "
            "server would not understand; add ?layout=module:function to its address."
        )
    cameras = dict(zip(CAMERAS, obs.images.values(), strict=False))
    return {**cameras, "observation/state": obs.state, "prompt": obs.instruction}


class OpenpiClient:
    """Asks one server for the chunks of all environments, one after the other."""

    default_layout = staticmethod(libero_request)

    def __init__(self, url: str, answer_s: float, limits: Limits, key: ApiKey | None = None) -> None:
        self.url, self.answer_s = url, answer_s
        self._connection = connect(url, limits, key)
        self.metadata = self._metadata()
        self._sessions = 0

    def new_sessions(self, count: int) -> list[int]:
        """One for each environment; servers of others, which keep no state, are not told."""
        self._sessions += count
        return list(range(self._sessions - count, self._sessions))

    def act(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """The chunk float32 [H,D] for every one of ``requests``."""
        return [self._ask({**request.payload, **self._ours(request)}) for request in requests]

    def close(self) -> None:
        self._connection.close()

    def _ours(self, request: Request) -> dict[str, Any]:
        """What a server of ours is told besides, as far as its policy needs it."""
        said: dict[str, Any] = {}
        if self.metadata.get("sessions"):
            said |= {"session": str(request.session), "reset": request.first}
        if self.metadata.get("real_time") and len(request.rest):
            said |= {"prefix": request.rest, "delay": request.delay}
        return said

    def _ask(self, request: Mapping[str, Any]) -> np.ndarray:
        self._connection.send(pack(request))
        answer = unpack(self._bytes("actions"))
        return chunk_of(answer, self.url)

    def _metadata(self) -> dict[str, Any]:
        """What the server says first; raises UserError when that is nothing, or no message of this protocol."""
        try:
            return unpack(self._bytes("its metadata"))
        except (DisconnectedError, ContractError) as error:
            self.close()
            raise UserError(
                f"{self.url} did not introduce itself as openpi's servers do ({error}), so it is not asked to act; "
                f"for a model server of the vla-eval harness, write vla-eval+{self.url}."
            ) from error

    def _bytes(self, what: str) -> bytes:
        message = self._connection.receive(self.answer_s)
        if isinstance(message, bytes):
            return message
        self.close()
        last = message.strip().splitlines()[-1:] or ["an empty text"]
        raise UserError(
            f"the policy server {self.url} failed instead of sending {what} ({last[0]:.200}), so no action was chosen; "
            "look at its own messages."
        )


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        dtype, shape, data = arrays.plain(value)
        return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": arrays.plain(np.asarray(value))[0]}
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode(item: dict[Any, Any]) -> Any:
    if b"__ndarray__" in item:
        return arrays.read_array(item.get(b"dtype"), item.get(b"shape"), item.get(b"data"))
    if b"__npgeneric__" in item:
        value = item.get(b"data")
        if not isinstance(value, bool | int | float):
            raise ContractError(f"a message holds a {type(value).__name__} as a number, so it is refused; send one.")
        return value
    return item


class OpenpiServer(Listener):
    """Answers every request with a chunk, by itself; ``layout`` reads requests.

    Without one they have the keys of openpi's LIBERO policies.  Pictures are fitted to the policy's sizes either way.
    The rest is as :class:`Listener` has it.
    """

    pages: ClassVar = {"/healthz": "OK\n"}

    def __init__(
        self,
        served: SessionPolicy,
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
        self.batcher = Batcher(served, batching or Batching())

    def server_close(self) -> None:
        """As every listener; what has not been computed is not."""
        self.batcher.close(_FAREWELL)
        super().server_close()

    def serve_connection(self, connection: Connection) -> None:
        """The metadata, then the requests of one client."""
        with self.batcher.client():  # before it may ask: a batch waits for those who are connected
            connection.send(pack(self.metadata))
            previous: dict[str, float] = {}
            sessions: OrderedDict[str, State] = OrderedDict()  # the last used at the end
            while True:
                data, started = connection.receive(), time.monotonic()
                self._answer(connection, data, sessions, previous)
                previous = {"prev_total_ms": _ms_since(started)}

    def _answer(
        self, connection: Connection, data: bytes | str, sessions: OrderedDict[str, State], timing: Mapping[str, float]
    ) -> None:
        """Answer one message with a chunk, or with a text that says what is wrong with this observation.

        ``sessions`` of this connection: the state of that one is the next only if it got its chunk.
        """
        request, started = _request(connection, data), time.monotonic()
        try:
            seen = fitted(self.layout(request), self.served.spec).checked(self.served.spec)
            session = _session(request)
            decision = _wait(connection, self.batcher.ask(Asked(seen, self._state(request, sessions.get(session)))))
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
            sessions[session] = decision.state
            sessions.move_to_end(session)
            if len(sessions) > _MOST_SESSIONS:
                sessions.popitem(last=False)
            policy = {"infer_ms": decision.infer_ms, "batch_size": decision.batch_size}
            server = {"infer_ms": _ms_since(started), **timing}
            connection.send(pack({"actions": decision.chunk, "server_timing": server, "policy_timing": policy}))

    def _state(self, request: Mapping[str, Any], last: State | None) -> State:
        """The state to decide ``request`` with, ``last`` being the session's; raises ContractError for odd entries."""
        reset, prefix, delay = request.get("reset", False), request.get("prefix"), request.get("delay", 0)
        if not isinstance(reset, bool):
            raise ContractError(f"the request's 'reset' is {reset!r:.100}, so it is refused; send true or false.")
        state = self.served.begin() if reset or last is None else last
        if prefix is None:
            return state
        if not isinstance(prefix, np.ndarray) or prefix.ndim != 2 or prefix.dtype.kind not in "fiu":
            raise ContractError("the request's 'prefix' is no array [n,D] of numbers, so it is refused; send one.")
        if not np.isfinite(prefix).all() or isinstance(delay, bool) or not isinstance(delay, int):
            raise ContractError(
                f"the request's 'prefix' is not finite, or its 'delay' {delay!r:.100} no whole number, so no action is "
                "chosen; look at the program that sends them."
            )
        return self.served.continued(state, prefix, delay)


def _session(request: Mapping[str, Any]) -> str:
    """The name of the session that ``request`` belongs to; raises ContractError for what is none."""
    name = request.get("session", "")
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise ContractError(
            f"the request's 'session' is {name!r:.100}, so it is refused; send a text of at most {_LONGEST_NAME} "
            "letters."
        )
    return name


def introduction(served: SessionPolicy, layout: Layout) -> dict[str, Any]:
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
        "sessions": bool(served.begin()),
        "real_time": served.continues,
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


def _wait(connection: Connection, asked: Future[Decision]) -> Decision:
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


class LiberoLayout:
    """Reads the keys ``observation/image``, ``observation/wrist_image``, ``observation/state`` and ``prompt``.

    The policy's cameras are taken in the spec's order, the scene first and then the wrist; other keys are ignored.
    Without a prompt, a policy that knows one instruction follows that.  Raises UserError for more than two cameras.
    """

    def __init__(self, spec: EnvSpec) -> None:
        if len(spec.images) > len(CAMERAS):
            raise UserError(
                f"the policy sees {len(spec.images)} cameras, but openpi's LIBERO keys have two, so requests could not "
                "be read; write a function and give --layout module:function."
            )
        self.keys = dict(zip(CAMERAS, spec.images, strict=False))
        self._only = spec.tasks[0] if len(spec.tasks) == 1 else None

    def __call__(self, request: Mapping[str, Any]) -> SingleObservation:
        """The observation in ``request``; raises ContractError where a key lacks or holds something else."""
        images = {camera: picture_of(_array(request, key)) for key, camera in self.keys.items()}
        words = request.get("prompt", self._only)
        if not isinstance(words, str):
            raise ContractError("the request has no text 'prompt', so the policy does not know what to do; send one.")
        return SingleObservation(images, _array(request, "observation/state"), words)


def picture_of(array: np.ndarray) -> np.ndarray:
    """uint8 [h,w,c] of a picture that may be float within [0, 1] or [c,h,w]; raises ContractError for others."""
    if array.ndim != 3 or not array.size:
        raise ContractError(f"the request has a picture of shape {list(array.shape)}, so it is refused; send [h,w,c].")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise ContractError("the request has a picture that is not finite, so it is refused; look at the camera.")
        low, high = float(array.min()), float(array.max())
        if not -_OVERSHOOT <= low <= high <= 1.0 + _OVERSHOOT:
            raise ContractError(
                f"the request has a picture of floats from {low:.3g} to {high:.3g}, so it is refused; send 0 to 1, or "
                "uint8."
            )
        array = (255 * np.clip(array, 0.0, 1.0)).astype(np.uint8)
    return np.moveaxis(array, 0, -1) if array.shape[0] == 3 != array.shape[-1] else array


def fitted(seen: SingleObservation, spec: EnvSpec) -> SingleObservation:
    """``seen`` with its RGB pictures in the sizes of ``spec``: scaled bilinearly, padded with black, undistorted.

    Pictures that have their size, and those that the spec does not know or that are no RGB, stay as they are.
    """
    images = {
        name: _fit(image, *spec.images[name].shape[:2]) if name in spec.images else image
        for name, image in seen.images.items()
    }
    return replace(seen, images=images)


def _fit(image: np.ndarray, height: int, width: int) -> np.ndarray:
    rgb = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3
    if not rgb or image.shape[:2] == (height, width) or not image.size:
        return image
    share = max(image.shape[0] / height, image.shape[1] / width)
    size = max(1, int(image.shape[0] / share)), max(1, int(image.shape[1] / share))
    scaled = Image.fromarray(np.ascontiguousarray(image)).resize(size[::-1], Image.Resampling.BILINEAR)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    padded = np.zeros((height, width, 3), np.uint8)
    padded[top : top + size[0], left : left + size[1]] = np.asarray(scaled)
    return padded


def _array(request: Mapping[str, Any], key: str) -> np.ndarray:
    found = request.get(key)
    if not isinstance(found, np.ndarray):
        raise ContractError(
            f"the request has no array {key!r} but {', '.join(map(repr, request)):.200}, so the policy cannot act; "
            "send it, or start the server with --layout module:function."
        )
    return found
