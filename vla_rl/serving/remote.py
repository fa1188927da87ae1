"""A policy that lives in somebody else's server: it is asked for every chunk and has no weights here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.contract.env import Array, EnvSpec
from vla_rl.contract.errors import ContractError
from vla_rl.contract.load import load, name_of
from vla_rl.contract.policy import ActionOut, Features, Mode, State
from vla_rl.policies.function import BlackBoxPolicy
from vla_rl.policies.normalization import check_same_env
from vla_rl.policies.pretrained import read_config
from vla_rl.pretrained import save_folder
from vla_rl.serving.access import Address, find_api_key
from vla_rl.serving.observation import Request, SingleObservation
from vla_rl.serving.openpi import OpenpiClient
from vla_rl.serving.vla_eval import VlaEvalClient
from vla_rl.serving.websocket import Limits

Layout = Callable[[SingleObservation], Mapping[str, Any]]


class RemotePolicy(BlackBoxPolicy):
    """The policy behind ``address`` (``vla_rl/serving/access.py``), for environments like ``spec``.

    Its actions are taken to be in the units of ``spec.action`` and are clipped to its bounds.  Mode and generator do
    not reach the server: what it draws is its own, so an evaluation repeats only if the server's policy does.  Raises
    UserError when nobody answers, or too late.
    """

    def __init__(self, spec: EnvSpec, address: str) -> None:
        super().__init__(spec, f"the policy server {address}")
        self.address, self._written = Address.parse(address), address
        make: type[OpenpiClient | VlaEvalClient] = OpenpiClient if self.address.protocol == "openpi" else VlaEvalClient
        key = find_api_key(self.address.key_file)
        self._client = make(self.address.url, self.address.answer_s, Limits(), key)
        self._layout: Layout = load(self.address.layout) if self.address.layout else self._client.default_layout

    def initial_state(self, num_envs: int) -> State:
        """What the server is told, and the last chunk.

        first        bool [E]     an episode begins with the next decision
        session      int64 [E]    who asks for it
        chunk        [E,max_chunk,D], ``length`` int64 [E]: the last one, as the server sent it
        used, delay  int64 [E]    what :meth:`continue_chunk` said; ``used`` is ``length`` where nothing continues it
        """
        sessions = torch.tensor(self._client.new_sessions(num_envs), dtype=torch.int64)
        chunk = torch.zeros(num_envs, self.spec.max_chunk, self.spec.action_dim)
        counts = {name: torch.zeros(num_envs, dtype=torch.int64) for name in ("length", "used", "delay")}
        return {"first": torch.ones(num_envs, dtype=torch.bool), "session": sessions, "chunk": chunk, **counts}

    def reset_state(self, state: State, env_ids: Array) -> State:
        rows = torch.as_tensor(env_ids)
        first, used = state["first"].clone(), state["used"].clone()
        first[rows], used[rows] = True, state["length"][rows]
        return {**state, "first": first, "used": used}

    def continue_chunk(self, state: State, env_ids: Array, consumed: Array, delay: Array) -> State:
        """See ``vla_rl/contract/policy.py``; a server that does not continue chunks is not told."""
        rows, used, late = torch.as_tensor(env_ids), state["used"].clone(), state["delay"].clone()
        used[rows], late[rows] = torch.as_tensor(consumed), torch.as_tensor(delay)
        return {**state, "used": used, "delay": late}

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        obs = self.observation(features)
        requests = [
            self._request(state, row, self._layout(SingleObservation.of(obs, row, self.spec)))
            for row in range(len(state["session"]))
        ]
        chunks = self._client.act(requests)
        horizon = min(self._horizon(chunk) for chunk in chunks)
        chosen = np.stack([chunk[:horizon] for chunk in chunks])
        return self.action_out(chosen, len(chunks)), self._after(state, chunks)

    def _request(self, state: State, row: int, payload: Mapping[str, Any]) -> Request:
        used, length, delay = (int(state[name][row]) for name in ("used", "length", "delay"))
        rest = state["chunk"][row, used:length].numpy()
        return Request(int(state["session"][row]), bool(state["first"][row]), payload, rest, min(delay, len(rest)))

    def _after(self, state: State, chunks: Sequence[np.ndarray]) -> State:
        """``state`` once ``chunks`` have come."""
        last = state["chunk"].clone()
        length = torch.tensor([min(len(chunk), last.shape[1]) for chunk in chunks])
        for row, chunk in enumerate(chunks):
            last[row, : length[row]] = torch.from_numpy(chunk[: length[row]])
        nothing = torch.zeros_like(state["first"])
        return {**state, "first": nothing, "chunk": last, "length": length, "used": length.clone()}

    def close(self) -> None:
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
