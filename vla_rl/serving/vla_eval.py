"""The messages of the vla-eval harness: benchmarks on one side, model servers on the other.

Source: the package ``vla-eval`` 0.8.0 (github.com/allenai/vla-evaluation-harness), ``protocol/messages.py``,
``protocol/numpy_codec.py``, ``protocol/image_codec.py``, ``types.py``, ``connection.py``.  A message is a msgpack map
``{type, payload, seq, timestamp}``.  Arrays are the map ``{"__ndarray__": True, data, dtype, shape}`` with bool,
integer and float dtypes only, pictures ``{"__image__": True, format, data, shape}`` as PNG (the default), JPEG or raw.

The benchmark says HELLO and gets HELLO; EPISODE_START and EPISODE_END have no answer; every OBSERVATION gets one ACTION
or ERROR with its ``seq``.  A server answers with one action, and keeps the rest of a chunk for the next observations.
Like the harness's own model servers, ours answers GET /health.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
from websockets.frames import CloseCode

from vla_rl import __version__
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.serving import arrays
from vla_rl.serving.access import Access, ApiKey
from vla_rl.serving.observation import Request, SingleObservation, chunk_of
from vla_rl.serving.served import Episode, ServedPolicy
from vla_rl.serving.websocket import LIMITS, Connection, DisconnectedError, Limits, Listener, connect, log

PROTOCOL_VERSION = 1
Layout = Callable[[Mapping[str, Any]], SingleObservation]


class Kind(StrEnum):
    """What a message is."""

    HELLO = "hello"
    OBSERVATION = "observation"
    ACTION = "action"
    EPISODE_START = "episode_start"
    EPISODE_END = "episode_end"
    ERROR = "error"


@dataclass(frozen=True)
class Message:
    """One message; an answer has the ``seq`` of the message that it answers."""

    kind: Kind
    payload: Mapping[str, Any]
    seq: int


def pack(message: Message) -> bytes:
    """One message as bytes; raises ContractError for what the other side could not read."""
    fields = {"type": message.kind.value, "payload": message.payload, "seq": message.seq, "timestamp": time.time()}
    return arrays.pack(fields, _encode)


def unpack(data: bytes | str) -> Message:
    """The message in ``data``; raises ContractError for everything else."""
    if isinstance(data, str):
        raise ContractError("a message is a text, so it is refused; the harness's messages are binary.")
    fields = arrays.unpack(data, _decode)
    if not isinstance(fields, dict) or not {"type", "payload", "seq", "timestamp"} <= fields.keys():
        raise ContractError(
            "a message lacks type, payload, seq or timestamp, so it is refused; check that the other side speaks the "
            "vla-eval harness's protocol."
        )
    kind, payload, seq, sent = (fields[name] for name in ("type", "payload", "seq", "timestamp"))
    kinds = [item.value for item in Kind]
    if not isinstance(kind, str) or kind not in kinds:
        raise ContractError(
            f"a message has the type {arrays.shown(kind)}, so it is refused; {did_you_mean(arrays.shown(kind), kinds)}"
        )
    if not isinstance(payload, dict) or not all(isinstance(key, str) for key in payload):
        raise ContractError(f"the payload of {kind!r} is no map with text keys, so it is refused; send a map.")
    if type(seq) is not int or not 0 <= seq < 1 << 63:
        raise ContractError(
            f"the seq of {kind!r} is {arrays.shown(seq)}, so no answer could name it; send a number from 0."
        )
    if type(sent) not in (int, float):
        raise ContractError(f"the timestamp of {kind!r} is {arrays.shown(sent)}, so it is refused; send seconds.")
    return Message(Kind(kind), payload, seq)


def hello(**extra: Any) -> dict[str, Any]:
    """The payload with which either side introduces itself."""
    return {"harness_version": f"vla-rl {__version__}", "protocol_version": PROTOCOL_VERSION, **extra}


def check_hello(payload: Mapping[str, Any]) -> None:
    """Raise ContractError when the other side speaks another version of the protocol."""
    version = payload.get("protocol_version")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ContractError(
            f"the other side speaks version {arrays.shown(version)} of the vla-eval protocol but this "
            f"is {PROTOCOL_VERSION}, so data would be misread; use a vla-eval that speaks version {PROTOCOL_VERSION}."
        )


def observation_payload(obs: SingleObservation) -> dict[str, Any]:
    """``obs`` in the keys of the harness's benchmarks, which write "states" where its documentation has "state"."""
    state = {"states": obs.state, "state": obs.state}
    return {"images": dict(obs.images), "task_description": obs.instruction, **state}


def read_observation(payload: Mapping[str, Any]) -> SingleObservation:
    """The observation in those keys, with "states" or "state"; raises ContractError for other types."""
    images, state = payload.get("images", {}), payload.get("states", payload.get("state"))
    words = payload.get("task_description")
    if not isinstance(images, dict) or not isinstance(words, str) or not isinstance(state, np.ndarray):
        found = ", ".join(f"{key}: {type(item).__name__}" for key, item in payload.items())
        raise ContractError(
            f"an observation holds {found:.200}, so the policy cannot act; send images (a map of arrays), states (an "
            "array; most benchmarks have a parameter send_state) and task_description (a text)."
        )
    return SingleObservation(images, state, words)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        dtype, shape, data = arrays.plain(value)
        return {"__ndarray__": True, "data": data, "dtype": dtype, "shape": shape}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode(item: dict[Any, Any]) -> Any:
    if "__image__" in item and item.get("format") != "raw":
        return arrays.read_image(item.get("data"), item.get("shape"))
    if "__image__" in item or "__ndarray__" in item:
        return arrays.read_array(item.get("dtype"), item.get("shape"), item.get("data"))
    return item


class VlaEvalClient:
    """Asks a model server for an action per environment and step; all environments are asked before one is awaited.

    Connections that were not used for longest are closed when there are more than 16, and more than two for each of the
    environments that are played side by side; an episode that was left so goes on with a new connection and chunk.
    """

    default_layout = staticmethod(observation_payload)

    def __init__(self, url: str, answer_s: float, limits: Limits, key: ApiKey | None = None) -> None:
        self.url, self.answer_s, self.limits, self._key = url, answer_s, limits, key
        self._sessions: OrderedDict[int, _ClientSession] = OrderedDict()  # the last used at the end
        self._next, self._most = 0, 16

    def new_sessions(self, count: int) -> list[int]:
        """The numbers of ``count`` sessions; each has a connection of its own."""
        self._next, self._most = self._next + count, max(self._most, 2 * count)
        return list(range(self._next - count, self._next))

    def act(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """The chunk float32 [H,D] for every one of ``requests``; the server is told when an episode begins."""
        self._most = max(self._most, 2 * len(requests))
        sessions = [self._session(request.session) for request in requests]
        for session, request in zip(sessions, requests, strict=True):
            if request.first or not session.in_episode:
                session.start_episode({"name": str(request.payload.get("task_description", ""))})
            session.send(Kind.OBSERVATION, request.payload)
        return [session.answer() for session in sessions]

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _session(self, number: int) -> _ClientSession:
        if number not in self._sessions:
            while len(self._sessions) >= self._most:
                self._sessions.popitem(last=False)[1].close()
            self._sessions[number] = _ClientSession(self.url, self.answer_s, self.limits, self._key)
        self._sessions.move_to_end(number)
        return self._sessions[number]


class _ClientSession:
    """One connection: one environment's episodes."""

    def __init__(self, url: str, answer_s: float, limits: Limits, key: ApiKey | None) -> None:
        self.url, self.answer_s = url, answer_s
        self._connection: Connection = connect(url, limits, key)
        self._seq, self.in_episode = 0, False
        try:
            self.send(Kind.HELLO, hello())
            check_hello(self._receive(Kind.HELLO).payload)
        except UserError:
            self.close()
            raise

    def start_episode(self, task: Mapping[str, Any]) -> None:
        if self.in_episode:
            self.send(Kind.EPISODE_END, {})
        self.send(Kind.EPISODE_START, {"task": dict(task)})
        self.in_episode = True

    def answer(self) -> np.ndarray:
        return chunk_of(self._receive(Kind.ACTION).payload, f"the model server {self.url}")

    def close(self) -> None:
        self._connection.close()

    def send(self, kind: Kind, payload: Mapping[str, Any]) -> None:
        self._seq += 1
        self._connection.send(pack(Message(kind, payload, self._seq)))

    def _receive(self, wanted: Kind) -> Message:
        """The answer to the last message; raises UserError when the server reports an error or answers another one."""
        message = unpack(self._connection.receive(self.answer_s))
        if message.kind is Kind.ERROR:
            said = message.payload.get("error", message.payload)
            text = repr(said) if isinstance(said, str) else arrays.shown(said)
            raise UserError(
                f"the model server {self.url} failed ({text:.300}), so no action was chosen; look at its messages."
            )
        if message.kind is not wanted or message.seq != self._seq:
            self.close()
            raise UserError(
                f"the model server {self.url} answered message {self._seq} with {message.kind.value} {message.seq} "
                f"instead of {wanted.value}, so its answers cannot be told apart; serve it in the sync mode."
            )
        return message


class PolicyServer(Listener):
    """Answers every observation with an action; ``layout`` turns the harness's observation into ours.

    The rest is as :class:`Listener` has it.
    """

    pages: ClassVar = {"/health": '{"status": "ok"}\n'}

    def __init__(
        self,
        served: ServedPolicy,
        port: int,
        layout: Layout = read_observation,
        limits: Limits = LIMITS,
        max_connections: int = 256,
        access: Access | None = None,
    ) -> None:
        self.served, self.layout = served, layout
        super().__init__(port, limits, max_connections, access)

    def serve_connection(self, connection: Connection) -> None:
        _Benchmark(connection, self.served, self.layout).run()


class _Benchmark:
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
            if not isinstance(task, dict):
                raise ContractError(f"an episode's task is {arrays.shown(task)}, so it is not started; send a map.")
            self.episode = self.served.begin(task)
        elif message.kind is Kind.OBSERVATION:
            self._act(message)
        elif message.kind is Kind.EPISODE_END:
            self.episode = None
        elif message.kind is Kind.ERROR:
            log.warning("%s reports: %s", self.connection.peer, arrays.shown(message.payload.get("error")))
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
    wrist = {"send_wrist_image": True} if len(spec.images) > 1 else {}
    return {
        "model_server": type(served.policy).__name__,
        "capabilities": {},
        "observation_params": {"send_state": True, **wrist},  # given to a benchmark that has such parameters
        "observation_spec": {
            **{name: {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"} for name in spec.images},
            "state": {"name": "state", "dims": spec.state.shape[0], "format": "raw"},
            "language": {"name": "language", "dims": 0, "format": "language"},
        },
        "action_spec": {"actions": {"name": "actions", "dims": spec.action_dim, "format": "raw"}},
    }
