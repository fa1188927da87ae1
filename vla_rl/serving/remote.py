"""A policy that lives in somebody else's server: it is asked for every chunk and has no weights here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from vla_rl.contract.env import Array, EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import load, name_of
from vla_rl.contract.policy import ActionOut, Features, Mode, State
from vla_rl.policies.function import BlackBoxPolicy
from vla_rl.policies.normalization import check_same_env
from vla_rl.policies.pretrained import read_config
from vla_rl.pretrained import save_folder
from vla_rl.serving.address import Address, ApiKey, find_api_key
from vla_rl.serving.arrays import shown
from vla_rl.serving.observation import Request, SingleObservation, chunk_of
from vla_rl.serving.openpi import OpenpiClient
from vla_rl.serving.vla_eval import Kind, Message, check_hello, hello, observation_payload, pack, unpack
from vla_rl.serving.websocket import Connection, Limits, connect

Layout = Callable[[SingleObservation], Mapping[str, Any]]


class Client(Protocol):
    """Asks a server; opens its connections when they are needed."""

    @property
    def default_layout(self) -> Layout:
        """The protocol's usual keys."""

    def new_sessions(self, count: int) -> list[int]:
        """The numbers of ``count`` sessions for environments side by side; connections are opened by ``act``."""

    def act(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """The chunk float32 [H,D] for every one of ``requests``."""

    def close(self) -> None:
        """End all connections; safe to call twice."""


class RemotePolicy(BlackBoxPolicy):
    """The policy behind ``address`` (``vla_rl/serving/address.py``), for environments like ``spec``.

    Its actions are taken to be in the units of ``spec.action`` and are clipped to its bounds.  Mode and generator do
    not reach the server: what it draws is its own, so an evaluation repeats only if the server's policy does.  Raises
    UserError when nobody answers, or too late.
    """

    def __init__(self, spec: EnvSpec, address: str) -> None:
        super().__init__(spec, f"the policy server {address}")
        self.address, self._written = Address.parse(address), address
        makers: dict[str, Callable[[str, float, Limits, ApiKey | None], Client]] = {
            "openpi": OpenpiClient,
            "vla-eval": VlaEvalClient,
        }
        make, key = makers[self.address.protocol], find_api_key(self.address.key_file)
        self._client = make(self.address.url, self.address.answer_s, Limits(), key)
        self._layout: Layout = load(self.address.layout) if self.address.layout else self._client.default_layout

    def initial_state(self, num_envs: int) -> State:
        """``first`` bool [E]: an episode begins with the next decision; ``session`` int64 [E]: who asks for it."""
        sessions = torch.tensor(self._client.new_sessions(num_envs), dtype=torch.int64)
        return {"first": torch.ones(num_envs, dtype=torch.bool), "session": sessions}

    def reset_state(self, state: State, env_ids: Array) -> State:
        first = state["first"].clone()
        first[torch.as_tensor(env_ids)] = True
        return {**state, "first": first}

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        obs = self.observation(features)
        requests = [
            Request(session, bool(state["first"][row]), self._layout(SingleObservation.of(obs, row, self.spec)))
            for row, session in enumerate(state["session"].tolist())
        ]
        chunks = self._client.act(requests)
        horizon = min(self._horizon(chunk) for chunk in chunks)
        chosen = np.stack([chunk[:horizon] for chunk in chunks])
        return self.action_out(chosen, len(chunks)), {**state, "first": torch.zeros_like(state["first"])}

    def close(self) -> None:
        """End all connections; safe to call twice."""
        self._client.close()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` with the address, under which the policy is asked again."""
        kind = name_of(type(self))
        save_folder(Path(folder), {"policy": kind, "address": self._written, "spec": self.spec.to_json()}, {})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> RemotePolicy:
        """The policy in ``folder``, connected again; ``spec`` must fit the recorded one."""
        saved = read_config(Path(folder))
        trained = EnvSpec.from_json(saved["spec"])
        check_same_env(trained, spec or trained)
        return cls(spec or trained, saved["address"])

    def _horizon(self, chunk: np.ndarray) -> int:
        """How many actions of ``chunk`` [H,D] are executed before the server is asked again."""
        if chunk.shape[1] != self.spec.action_dim or len(chunk) < self.address.replan_steps:
            raise ContractError(
                f"{self.name} chose actions of shape {list(chunk.shape)}, but the environment takes "
                f"[H,{self.spec.action_dim}] with H of at least {max(1, self.address.replan_steps)}, so nothing was "
                "executed; check that the server's policy is for this robot."
            )
        return min(self.address.replan_steps or len(chunk), self.spec.max_chunk)


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
