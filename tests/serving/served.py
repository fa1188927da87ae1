"""Policies with known actions, a server of ours in a thread, and a benchmark's side of the harness's messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sims.toy import counting, point_mass
from tests.patience import PATIENCE
from vla_rl.contract.env import Observation
from vla_rl.contract.policy import ActionOut
from vla_rl.policies.function import BlackBoxPolicy, FunctionPolicy
from vla_rl.policies.noise import normal
from vla_rl.serving import vla_eval
from vla_rl.serving.openpi import OpenpiServer
from vla_rl.serving.served import ServedPolicy, SessionPolicy
from vla_rl.serving.vla_eval import Kind, Message, PolicyServer
from vla_rl.serving.websocket import Connection, Limits, Listener, connect

CHUNK = 3
PATIENT = Limits(opening_s=PATIENCE, message_s=PATIENCE, idle_s=PATIENCE)


def echoing(obs: Observation) -> np.ndarray:
    """[E,3,2]: (the time of each action, the seed), as the counting environment wants it echoed."""
    steps = obs.time[:, None] + np.arange(CHUNK)
    return np.stack([steps, np.repeat(obs.state[:, :1], CHUNK, 1)], -1)


def homewards(obs: Observation) -> np.ndarray:
    """[E,1,2]: the best action of the point mass."""
    return point_mass.optimal_action(obs)[:, None]


def echo_policy() -> FunctionPolicy:
    return FunctionPolicy(counting.spec(), echoing, "tests.serving.served:echoing")


class NoisyPolicy(BlackBoxPolicy):
    """One action of pure noise, so whatever an episode draws is visible."""

    def act(self, features: Any, state: Any, mode: Any, generator: Any) -> tuple[ActionOut, Any]:
        noise = normal((len(features["time"]), 1, 2), generator, like=torch.zeros(1))
        return self.action_out(0.05 * noise, len(noise)), state


@contextmanager
def serving(policy: Any, limits: Limits | None = None, seed: int = 1, **options: Any) -> Iterator[PolicyServer]:
    """``policy`` served to the harness at any port, in a thread."""
    with PolicyServer(ServedPolicy(policy, seed), 0, limits=limits or PATIENT, **options) as server, _running(server):
        yield server


@contextmanager
def serving_openpi(policy: Any, limits: Limits | None = None, seed: int = 1, **options: Any) -> Iterator[OpenpiServer]:
    """``policy`` served to openpi's clients at any port, in a thread."""
    served = SessionPolicy(policy, seed)
    with OpenpiServer(served, 0, limits=limits or PATIENT, **options) as server, _running(server):
        yield server


@contextmanager
def _running(server: Listener) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(PATIENCE)


class Benchmark:
    """Sends messages and reads answers; says HELLO at once."""

    def __init__(self, url: str) -> None:
        self.connection: Connection = connect(url, PATIENT)
        self.seq = 0
        self.hello = self.ask(Kind.HELLO, {"harness_version": "0.8.0", "protocol_version": 1})

    def tell(self, kind: Kind, payload: Mapping[str, Any]) -> None:
        self.seq += 1
        self.connection.send(vla_eval.pack(Message(kind, payload, self.seq)))

    def ask(self, kind: Kind, payload: Mapping[str, Any]) -> Message:
        self.tell(kind, payload)
        return vla_eval.unpack(self.connection.receive(PATIENCE))

    def start(self, **task: Any) -> None:
        self.tell(Kind.EPISODE_START, {"task": {"name": "count", **task}})

    def act(self, payload: Mapping[str, Any]) -> np.ndarray:
        answer = self.ask(Kind.OBSERVATION, payload)
        assert answer.kind is Kind.ACTION and answer.seq == self.seq, answer
        return answer.payload["actions"]

    def fail(self, payload: Mapping[str, Any]) -> str:
        answer = self.ask(Kind.OBSERVATION, payload)
        assert answer.kind is Kind.ERROR and answer.seq == self.seq, answer
        return str(answer.payload["error"])

    def __enter__(self) -> Benchmark:
        return self

    def __exit__(self, *ended: object) -> None:
        self.connection.close()


def counted(seed: int = 5, steps: int = 0, **changes: Any) -> dict[str, Any]:
    """What the harness would send of the counting environment."""
    spec = counting.spec()
    state = np.array([seed, steps, 9, 0], np.float32)
    image = np.zeros(spec.images["audit"].shape, np.uint8)
    payload = {"images": {"audit": image}, "states": state, "task_description": spec.tasks[seed % 2]}
    return {name: item for name, item in {**payload, **changes}.items() if item is not None}
