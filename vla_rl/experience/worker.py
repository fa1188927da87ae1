"""A process that makes objects from strings and JSON and calls their methods, with wire messages over its pipes.

    with Worker() as worker:
        counter = worker.make("package.module:Counter", start=3)
        worker.call(counter, "count", by=2)

Tensors and arrays arrive as tensors on either side.  The process belongs to the one that started it and ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.errors import ContractError, NonFiniteError, UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.contract.wire import handshake, read_message, write_message

COMMAND = (sys.executable, "-m", "vla_rl.experience.worker")
_ERRORS = {kind.__name__: kind for kind in (UserError, ContractError, NonFiniteError)}
_GRACE = 5.0  # seconds for a process to end by itself

Report = Callable[..., None]


class Worker:
    """Another Python process.

    It is started at once, and waited for with the first request.  Requests of several threads wait for each other.  An
    exception in the process is raised here as UserError (or as its own class, if it is one of ours), and so is the end
    of the process.
    """

    def __init__(self, command: Sequence[str] = COMMAND, environment: Mapping[str, str] | None = None) -> None:
        """``command`` starts the process, for instance with the Python of another virtual environment.

        ``environment`` are its environment variables (None: those of this process).  It has a process group of its own,
        so a terminal's Ctrl-C reaches the owner alone, also while the process is still starting.
        """
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
            )
        except OSError as error:
            raise UserError(
                f"{command[0]!r} cannot be started ({error}), so no policy acts; give another Python."
            ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._writer, self._reader = self._process.stdin, self._process.stdout
        for stream in (self._writer, self._reader):
            widen(stream)
        self._lock, self._greeted, self._answering = threading.Lock(), False, False
        self._targets: list[str] = []

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether requests can be made."""
        return not self._writer.closed and not self._answering and self._process.poll() is None

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
            self._process.kill()
        with self._lock:  # another thread that is reading sees the end of its stream first
            for stream in (self._writer, self._reader):
                with contextlib.suppress(OSError):  # unflushed bytes have no reader any more
                    stream.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, request: dict[str, Any], target: str, method: str, report: Report = lambda *_: None) -> Any:
        with self._lock:  # one request at a time
            if self._writer.closed or self._answering:
                raise UserError(
                    f"the acting process of {target!r} was {'interrupted' if self._answering else 'closed'}, so it "
                    f"has no {method!r}; make a new one."
                )
            self._answering = True  # for good, if an exception comes between request and answer
            answer = self._exchange(request, target, method, report)
            self._answering = False
        if "error" in answer:
            raise _ERRORS.get(answer["kind"], UserError)(answer["error"])
        return _tensors(answer["value"])

    def _exchange(self, request: dict[str, Any], target: str, method: str, report: Report) -> dict[str, Any]:
        """The answer to ``request``; raises UserError when a stream breaks because the process died."""
        try:
            if not self._greeted:
                handshake(self._reader, self._writer, "learner")
                self._greeted = True
            write_message(self._writer, _arrays(request))
            while "report" in (answer := read_message(self._reader)):
                report(*answer["report"])
            return dict(answer)
        except (EOFError, OSError) as error:
            fate, self._answering = self._fate(), False
            raise UserError(
                f"the acting process {self.pid} of {target!r} {fate} during {method!r}, so what it had "
                "collected is lost; its own messages are above, start it again."
            ) from error
        except ContractError:
            self._answering = False
            raise

    def _fate(self) -> str:
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def widen(stream: IO[bytes]) -> None:
    """Let a pipe hold a megabyte, where the system can, so that weights pass with few switches between processes."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # the user's pipes may hold no more
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, 1 << 20)


# -- the other process -------------------------------------------------------------------------------------------------


class _Server:
    """Makes objects and calls their methods."""

    def __init__(self, writer: IO[bytes]) -> None:
        self.writer = writer
        self.objects: list[Any] = []

    def answer(self, request: dict[str, Any]) -> Any:
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
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever signals all processes of a job; the owner decides
        signal.signal(number, signal.SIG_IGN)
    reader, writer = _take_pipes()
    server = _Server(writer)
    try:
        handshake(reader, writer, "actor")
        while True:
            write_message(writer, _attempt(server, read_message(reader)))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the owner is gone: nobody waits for what libraries still want to say
    except ContractError as error:
        sys.exit(str(error))


def _attempt(server: _Server, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": _arrays(server.answer(request))}
    except BrokenPipeError:
        raise
    except UserError as error:
        kind = next((name for name, item in reversed(_ERRORS.items()) if isinstance(error, item)), "")
        return {"error": str(error), "kind": kind}
    except Exception as error:
        traceback.print_exc()
        last = traceback.format_exception_only(error)[-1].strip()
        return {"error": f"the acting process failed: {last}; the whole traceback is above.", "kind": ""}


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Take stdin and stdout for messages: other code prints to stderr and reads an empty stdin."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return reader, writer


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
