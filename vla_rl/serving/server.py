"""Serves a policy to benchmarks of the vla-eval harness.

Like the harness's own model servers it answers GET /health.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from websockets.frames import CloseCode

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.serving.access import Access
from vla_rl.serving.arrays import shown
from vla_rl.serving.episode import Episode, ServedPolicy
from vla_rl.serving.listener import LIMITS, Listener, log
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.vla_eval import Kind, Message, check_hello, hello, pack, read_observation, unpack
from vla_rl.serving.websocket import Connection, DisconnectedError, Limits

Layout = Callable[[Mapping[str, Any]], SingleObservation]


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
        """The messages of one benchmark."""
        _Session(connection, self.served, self.layout).run()


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
            if not isinstance(task, dict):
                raise ContractError(f"an episode's task is {shown(task)}, so it is not started; send a map.")
            self.episode = self.served.begin(task)
        elif message.kind is Kind.OBSERVATION:
            self._act(message)
        elif message.kind is Kind.EPISODE_END:
            self.episode = None
        elif message.kind is Kind.ERROR:
            log.warning("%s reports: %s", self.connection.peer, shown(message.payload.get("error")))
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
