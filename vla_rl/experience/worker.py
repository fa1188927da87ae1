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
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.child import Child, ChildError, error_answer, error_of, serve_owner
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.contract.wire import write_message

COMMAND = (sys.executable, "-m", "vla_rl.experience.worker")

Report = Callable[..., None]


class LostWorkerError(UserError):
    """The process of a worker has ended by itself or was killed."""


class Worker:
    """Another Python process.

    It is started at once, and waited for with the first request.  Requests of several threads wait for each other.  An
    exception in the process is raised here as UserError (or as its own class, if it is one of ours), and the end of the
    process as LostWorkerError.
    """

    def __init__(self, command: Sequence[str] = COMMAND, environment: Mapping[str, str] | None = None) -> None:
        """``command`` and ``environment`` are those of ``Child``."""
        self._child = Child(command, environment, name="learner")
        self._lock, self._answering = threading.Lock(), False
        self._targets: list[str] = []

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""
        return not self._answering and self._child.running

    @property
    def lost(self) -> bool:
        """Whether the process has ended, so that it must be replaced."""
        return not self._child.running

    def make(self, target: str, shown: str = "", /, **arguments: Any) -> int:
        """Call ``target`` ("module:function") with ``arguments`` there; returns the number of the object it made.

        Error messages name it ``shown``, if given.
        """
        self._targets.append(shown or target)
        return int(self._request({"do": "make", "target": target, "arguments": arguments}, shown or target, "starting"))

    def call(self, number: int, method: str, report: Report | None = None, **arguments: Any) -> Any:
        """What ``method`` of the object ``number`` returns.

        With ``report``, the method gets an argument of this name; whatever it is called with, ``report`` is, too.
        """
        called = {"number": number, "method": method, "arguments": arguments, "reports": report is not None}
        return self._request({"do": "call", **called}, self._targets[number], method, report or (lambda *_: None))

    def close(self) -> None:
        """End the process, at once if it is at work; safe to call twice and after its death."""
        if self._answering:
            self._child.kill()
        with self._lock:  # another thread that is reading sees the end of its stream first
            self._child.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, request: dict[str, Any], target: str, method: str, report: Report = lambda *_: None) -> Any:
        with self._lock:  # one request at a time
            if self._child.closed or self._answering:
                raise UserError(
                    f"the acting process of {target!r} was {'interrupted' if self._answering else 'closed'}, so it "
                    f"has no {method!r}; make a new one."
                )
            self._answering = True  # for good, if an exception comes between request and answer
            answer = self._exchange(request, target, method, report)
            self._answering = False
        if "error" in answer:
            raise error_of(answer)
        return _tensors(answer["value"])

    def _exchange(self, request: dict[str, Any], target: str, method: str, report: Report) -> dict[str, Any]:
        """The answer to ``request``; raises UserError when the process has died."""
        try:
            self._child.send(_arrays(request))
            while "report" in (answer := self._child.receive()):
                report(*answer["report"])
            return dict(answer)
        except ChildError as error:
            self._answering = False
            raise LostWorkerError(
                f"the acting process {self.pid} of {target!r} {error} during {method!r}, so what it had "
                "collected is lost; its own messages are above, start it again."
            ) from error
        except ContractError:
            self._answering = False
            raise


# -- the other process -------------------------------------------------------------------------------------------------


class _Server:
    """Makes objects and calls their methods."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.writer: IO[bytes]

    def answer(self, request: dict[str, Any], writer: IO[bytes]) -> dict[str, Any]:
        """What ``request`` asks for, or the error that came up."""
        self.writer = writer
        try:
            return {"value": _arrays(self._do(request))}
        except BrokenPipeError:
            raise
        except Exception as error:
            return error_answer(error, "the acting process")

    def _do(self, request: dict[str, Any]) -> Any:
        requests: dict[str, Callable[..., Any]] = {"make": self.make, "call": self.call}
        what = str(request.pop("do"))
        if what not in requests:
            raise ContractError(
                f"the acting process cannot do {what!r}, so nothing was done; {did_you_mean(what, requests)}"
            )
        return requests[what](**_tensors(request))

    def make(self, target: str, arguments: dict[str, Any]) -> int:
        self.objects.append(load(target)(**arguments))
        return len(self.objects) - 1

    def call(self, number: int, method: str, arguments: dict[str, Any], reports: bool) -> Any:
        called = self.objects[number]
        known = [name for name in dir(called) if not name.startswith("_")]
        if method not in known:
            raise ContractError(
                f"{type(called).__name__} has no {method!r}, so nothing was done; {did_you_mean(method, known)}"
            )
        return getattr(called, method)(**arguments, **({"report": self.report} if reports else {}))

    def report(self, *values: Any) -> None:
        write_message(self.writer, {"report": _arrays(list(values))})


def main() -> None:
    """Serve one owner over the standard input and output until it closes them."""
    serve_owner("actor", _Server().answer)


def _arrays(value: Any) -> Any:
    """Tensors as numpy arrays, also inside mappings and sequences."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, list | tuple):
        return [_arrays(item) for item in value]
    return {name: _arrays(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, list):
        return [_tensors(item) for item in value]
    return {name: _tensors(item) for name, item in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
