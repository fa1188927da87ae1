"""Workers as actors of a Ray cluster: the processes of this machine, or those of many on a private network.

What crosses is what crosses the pipes of this machine, wire messages of arrays and JSON; Ray carries them as bytes and
keeps large ones in its object store.  Ray's own protocol has neither passwords nor encryption that hold off an
attacker: whoever reaches the cluster runs programs on it, so its network must be private.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from vla_rl.contract.child import ChildError
from vla_rl.contract.errors import UserError
from vla_rl.contract.wire import pack, unpack
from vla_rl.experience.worker import Report, Server

OLDEST = (2, 40)  # Ray whose actors stream what they yield
_PATIENCE = 5.0  # seconds for a head node to answer

_Ask = tuple[dict[str, Any], Callable[[dict[str, Any] | None], None]]


class RayCluster:
    """A connection to a cluster; one that is started here ends with it."""

    def __init__(self, address: str = "", cpus: float = 1.0, gpus: float = 0.0) -> None:
        """``address`` is HOST:PORT of a head node, "auto" for one of this machine; "": RAY_ADDRESS, or a new cluster.

        A worker is placed where ``cpus`` and ``gpus`` are free.  Raises UserError when Ray is missing or too old, and
        when there is no cluster at ``address`` or one of another version.
        """
        self._ray, self.cpus, self.gpus = _imported(), cpus, gpus
        self.address = address or os.environ.get("RAY_ADDRESS", "")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the private network
        where = {"address": self.address} if self.address else {"include_dashboard": False}
        try:
            _require_reachable(self.address)
            self._ray.init(**where, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"no Ray cluster can be used at {self.address or 'this machine'!r} ({reason}), so no worker was "
                "started; start one of this Ray and Python with 'ray start --head' there, or use --engine local."
            ) from error

    def require(self, workers: int) -> None:
        """Raise UserError when the cluster cannot hold so many workers at once."""
        resources = self._ray.cluster_resources()
        for name, each in (("CPU", self.cpus), ("GPU", self.gpus)):
            if workers * each > resources.get(name, 0.0):
                raise UserError(
                    f"the Ray cluster has {resources.get(name, 0.0):g} {name} and {workers} workers of {each:g} need "
                    f"{workers * each:g}, so some would wait for ever; start fewer, or add machines with 'ray start "
                    "--address'."
                )

    def link(self, environment: dict[str, str]) -> RayLink:
        """A new worker; ``environment`` are variables of its process."""
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "runtime_env": {"env_vars": environment}}
        return RayLink(self._ray, self._ray.remote(Served).options(**options).remote())

    def close(self) -> None:
        """Disconnect, which ends this connection's workers."""
        self._ray.shutdown()


class RayLink:
    """The link to an actor (see ``Link``)."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._lost = self.closed = False

    @property
    def name(self) -> str:
        return f"Ray actor {self._actor._actor_id.hex()[:8]}"

    @property
    def pid(self) -> int:
        """Process id on the machine that the actor is on; raises ChildError when it has died."""
        return int(self._asked(lambda: self._ray.get(self._actor.pid.remote())))

    @property
    def running(self) -> bool:
        """Whether it is neither closed nor known to have died: that shows with a request."""
        return not (self._lost or self.closed)

    def exchange(self, request: dict[str, Any], report: Report) -> dict[str, Any]:
        packed = pack(request)
        if not request.get("reports"):
            return dict(unpack(self._asked(lambda: self._ray.get(self._actor.answer.remote(packed)))))
        messages = self._actor.stream.options(num_returns="streaming").remote(packed)
        while "report" in (answer := dict(unpack(self._asked(lambda: self._ray.get(next(messages)))))):
            report(*answer["report"])
        return answer

    def kill(self) -> None:
        self.closed = True
        self._ray.kill(self._actor)

    def close(self) -> None:
        """End the actor; safe to call twice, and after its death or that of the connection."""
        if not self.closed and self._ray.is_initialized():
            self.kill()
        self.closed = True

    def _asked(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except self._ray.exceptions.RayError as error:
            self._lost = True
            raise ChildError(f"died ({' '.join(str(error).split())[:160]})") from error


class Served:
    """A ``Server`` in an actor.  One thread answers all requests, since an OpenGL context belongs to one."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[_Ask] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def answer(self, request: bytes) -> bytes:
        return list(self.stream(request))[-1]

    def stream(self, request: bytes) -> Iterator[bytes]:
        """What is reported while ``request`` is answered, then the answer."""
        messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._requests.put((unpack(request), messages.put))
        while (message := messages.get()) is not None:
            yield pack(message)

    def _serve(self) -> None:
        server = Server()
        while True:
            request, tell = self._requests.get()
            tell(server.answer(request, lambda *values: tell({"report": list(values)})))  # noqa: B023  # asked in turn
            tell(None)


def _require_reachable(address: str) -> None:
    """Raise OSError when nobody listens at HOST:PORT, which Ray itself would try to reach for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()


def _imported() -> Any:
    """Ray; raises UserError when it is missing or too old."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError(
            "--engine ray needs the package ray, which is not installed, so no worker was started; "
            "pip install 'vla-rl[ray]', or use --engine local."
        ) from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST:
        raise UserError(
            f"Ray {ray.__version__} is older than {'.'.join(map(str, OLDEST))}, whose actors stream their progress, so "
            "no worker was started; pip install --upgrade ray on all machines, or use --engine local."
        )
    return ray
