"""A process that makes objects from strings and JSON and calls their methods, with wire messages over its pipes.

    with Worker() as worker:
        counter = worker.make("package.module:Counter", start=3)
        worker.call(counter, "count", by=2)

Tensors and arrays arrive as tensors on either side.  The process belongs to the one that started it and ends with it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.child import Child, ChildError, error_answer, error_of, serve_owner
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.contract.trust import accept, accepted
from vla_rl.contract.wire import write_message

COMMAND = (sys.executable, "-m", "vla_rl.experience.worker")

Report = Callable[..., None]


class LostWorkerError(UserError):
    """The process of a worker has ended by itself or was killed."""


class Link(Protocol):
    """A process and the way to it."""

    @property
    def name(self) -> str:
        """What error messages call it."""

    @property
    def pid(self) -> int:
        """Process id on its machine."""

    @property
    def running(self) -> bool:
        """Whether the process is neither closed nor known to have ended."""

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""

    def exchange(self, request: dict[str, Any], report: Report) -> dict[str, Any]:
        """The answer to ``request``; what is reported before it is given to ``report``.

        Raises ChildError when the process has ended.
        """

    def kill(self) -> None:
        """End the process at once."""

    def close(self) -> None:
        """End the process; safe to call twice."""


class Pipes(Child):
    """The link to a process of this machine, by its standard input and output."""

    def __init__(self, command: Sequence[str] = COMMAND, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(command, environment, name="learner")
        self.name = f"process {self.pid}"

    def exchange(self, request: dict[str, Any], report: Report) -> dict[str, Any]:
        self.send(request)
        while "report" in (answer := self.receive()):
            report(*answer["report"])
        return dict(answer)


class Worker:
    """Another Python process.

    It is started at once, and waited for with the first request.  Requests of several threads wait for each other.  An
    exception in the process is raised here as UserError (or as its own class, if it is one of ours), and the end of the
    process as LostWorkerError.
    """

    def __init__(self, link: Link | None = None) -> None:
        """``link`` to the process (None: a new one of this machine)."""
        self._link = link or Pipes()
        self._lock, self._answering = threading.Lock(), False
        self._targets: list[str] = []

    @property
    def pid(self) -> int:
        return self._link.pid

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""
        return not self._answering and self._link.running

    @property
    def lost(self) -> bool:
        """Whether the process has ended, so that it must be replaced."""
        return not self._link.running

    def make(self, target: str, shown: str = "", /, **arguments: Any) -> int:
        """Call ``target`` ("module:function") with ``arguments`` there; returns the number of the object it made.

        Error messages name it ``shown``, if given.
        """
        self._targets.append(shown or target)
        request = {"do": "make", "target": target, "arguments": arguments, "accepted": accepted()}
        return int(self._request(request, shown or target, "starting"))

    def call(self, number: int, method: str, report: Report | None = None, **arguments: Any) -> Any:
        """What ``method`` of the object ``number`` returns.

        With ``report``, the method gets an argument of this name; whatever it is called with, ``report`` is, too.
        """
        called = {"number": number, "method": method, "arguments": arguments, "reports": report is not None}
        return self._request({"do": "call", **called}, self._targets[number], method, report or (lambda *_: None))

    def close(self) -> None:
        """End the process, at once if it is at work; safe to call twice and after its death."""
        if self._answering:
            self._link.kill()
        with self._lock:  # another thread that is reading sees the end of its stream first
            self._link.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _request(self, request: dict[str, Any], target: str, method: str, report: Report = lambda *_: None) -> Any:
        with self._lock:  # one request at a time
            if self._link.closed or self._answering:
                raise UserError(
                    f"the acting process of {target!r} was {'interrupted' if self._answering else 'closed'}, so it "
                    f"has no {method!r}; make a new one."
                )
            self._answering = True  # for good, if an exception comes between request and answer
            answer = self._exchange(request, target, method, report)
            self._answering = False
        if "error" in answer:
            raise error_of(answer)
        return as_tensors(answer["value"])

    def _exchange(self, request: dict[str, Any], target: str, method: str, report: Report) -> dict[str, Any]:
        """The answer to ``request``; raises UserError when the process has died."""
        try:
            return self._link.exchange(as_arrays(request), report)
        except ChildError as error:
            self._answering = False
            raise LostWorkerError(
                f"the acting {self._link.name} of {target!r} {error} during {method!r}, so what it had "
                "collected is lost; its own messages are above, start it again."
            ) from error
        except ContractError:
            self._answering = False
            raise


# -- the other process -------------------------------------------------------------------------------------------------


class Server:
    """Makes objects and calls their methods."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def answer(self, request: dict[str, Any], report: Report) -> dict[str, Any]:
        """What ``request`` asks for, or the error that came up; what methods report goes to ``report``."""
        try:
            return {"value": as_arrays(self._do(request, report))}
        except BrokenPipeError:
            raise
        except Exception as error:
            return error_answer(error, "the acting process")

    def _do(self, request: dict[str, Any], report: Report) -> Any:
        requests: dict[str, Callable[..., Any]] = {"make": self.make, "call": partial(self.call, report)}
        return requests[request.pop("do")](**as_tensors(request))

    def make(self, target: str, arguments: dict[str, Any], accepted: list[str]) -> int:
        accept(accepted)  # what the owner wrote and accepted, see contract/trust.py
        self.objects.append(load(target)(**arguments))
        return len(self.objects) - 1

    def call(self, report: Report, number: int, method: str, arguments: dict[str, Any], reports: bool) -> Any:
        called = self.objects[number]
        known = [name for name in dir(called) if not name.startswith("_")]
        if method not in known:
            raise ContractError(
                f"{type(called).__name__} has no {method!r}, so nothing was done; {did_you_mean(method, known)}"
            )
        reporting = {"report": lambda *values: report(*as_arrays(list(values)))} if reports else {}
        return getattr(called, method)(**arguments, **reporting)


def main() -> None:
    """Serve one owner over the standard input and output until it closes them."""
    server = Server()

    def answer(request: dict[str, Any], writer: IO[bytes]) -> dict[str, Any]:
        return server.answer(request, lambda *values: write_message(writer, {"report": list(values)}))

    serve_owner("actor", answer)


def as_arrays(value: Any) -> Any:
    """Tensors as numpy arrays, also inside mappings and sequences."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, list | tuple):
        return [as_arrays(item) for item in value]
    return {name: as_arrays(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def as_tensors(value: Any) -> Any:
    """Numpy arrays as tensors that share their memory, also inside dicts and lists."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, list):
        return [as_tensors(item) for item in value]
    return {name: as_tensors(item) for name, item in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
