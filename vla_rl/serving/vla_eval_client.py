"""A client of the vla-eval harness's model servers: one connection per environment, as the server keeps its chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.serving.api_key import ApiKey
from vla_rl.serving.arrays import shown
from vla_rl.serving.observation import Request, chunk_of
from vla_rl.serving.vla_eval import Kind, Message, check_hello, hello, observation_payload, pack, unpack
from vla_rl.serving.websocket import Connection, Limits, connect


class VlaEvalClient:
    """Asks a model server for an action per environment and step; all environments are asked before one is awaited.

    Connections that were not used for longest are closed when there are more than 16, and more than two for each of the
    environments that are played side by side; an episode that was left so goes on with a new connection and chunk.
    """

    default_layout = staticmethod(observation_payload)

    def __init__(self, url: str, answer_s: float, limits: Limits, key: ApiKey | None = None) -> None:
        self.url, self.answer_s, self.limits, self._key = url, answer_s, limits, key
        self._sessions: OrderedDict[int, _Session] = OrderedDict()  # the last used at the end
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
            session.ask(request.payload)
        return [session.answer() for session in sessions]

    def close(self) -> None:
        """End all connections; safe to call twice."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _session(self, number: int) -> _Session:
        if number not in self._sessions:
            while len(self._sessions) >= self._most:
                self._sessions.popitem(last=False)[1].close()
            self._sessions[number] = _Session(self.url, self.answer_s, self.limits, self._key)
        self._sessions.move_to_end(number)
        return self._sessions[number]


class _Session:
    """One connection: one environment's episodes."""

    def __init__(self, url: str, answer_s: float, limits: Limits, key: ApiKey | None) -> None:
        self.url, self.answer_s = url, answer_s
        self._connection: Connection = connect(url, limits, key)
        self._seq, self.in_episode = 0, False
        try:
            self._send(Kind.HELLO, hello())
            check_hello(self._receive(Kind.HELLO).payload)
        except UserError:
            self.close()
            raise

    def start_episode(self, task: Mapping[str, Any]) -> None:
        if self.in_episode:
            self._send(Kind.EPISODE_END, {})
        self._send(Kind.EPISODE_START, {"task": dict(task)})
        self.in_episode = True

    def ask(self, payload: Mapping[str, Any]) -> None:
        self._send(Kind.OBSERVATION, payload)

    def answer(self) -> np.ndarray:
        return chunk_of(self._receive(Kind.ACTION).payload, f"the model server {self.url}")

    def close(self) -> None:
        self._connection.close()

    def _send(self, kind: Kind, payload: Mapping[str, Any]) -> None:
        self._seq += 1
        self._connection.send(pack(Message(kind, payload, self._seq)))

    def _receive(self, wanted: Kind) -> Message:
        """The answer to the last message; raises UserError when the server reports an error or answers another one."""
        message = unpack(self._connection.receive(self.answer_s))
        if message.kind is Kind.ERROR:
            said = message.payload.get("error", message.payload)
            text = repr(said) if isinstance(said, str) else shown(said)
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
