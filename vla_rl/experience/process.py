"""A rollout source in another process: started from strings and JSON, with wire messages over its pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.contract.policy import ScheduledPolicy
from vla_rl.contract.wire import handshake, read_message, write_message

COMMAND = (sys.executable, "-m", "vla_rl.experience.process")
_ERRORS = {kind.__name__: kind for kind in (UserError, ContractError, NonFiniteError)}
_GRACE = 5.0  # seconds for a process to end by itself


class ProcessSource:
    """An ``ExperienceSource`` and a ``PolicyStore`` whose environment and acting policy live in another process.

    The process calls ``make`` ("module:function") with ``arguments``; it returns an object with ``next() -> Rollout``
    and the acting ``policy``.  Queue depth is 0: :meth:`next` acts with the weights of the last :meth:`publish`, so a
    rollout equals, bit for bit, that of the same source in this process.  An exception in the other process is raised
    here as UserError (or as its own class, if it is one of ours), and so is the end of the process.
    """

    def __init__(self, make: str, arguments: Mapping[str, Any], command: Sequence[str] = COMMAND) -> None:
        """``command`` starts the process, for instance with the Python of another virtual environment."""
        self.make = make
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise UserError(
                f"{command[0]!r} cannot be started ({error}), so no policy acts; give another Python."
            ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._writer, self._reader = self._process.stdin, self._process.stdout
        try:
            self._with_fate("starting", lambda: handshake(self._reader, self._writer, "learner"))
            self._request("make", make=make, arguments=dict(arguments))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def next(self) -> Rollout:
        """One rollout as torch tensors; ``version`` is that of the weights that acted."""
        return Rollout(**_tensors(self._request("next")))

    def publish(self, weights: Mapping[str, Tensor], progress: float = 0.0) -> int:
        """Copy ``weights`` (any of the policy's, by name) into the acting policy."""
        return int(self._request("publish", weights=_arrays(weights), progress=progress))

    def latest(self) -> tuple[int, Mapping[str, Tensor]]:
        """Version and weights of the next rollout."""
        answer = self._request("latest")
        return int(answer["version"]), _tensors(answer["weights"])

    def close(self) -> None:
        """End the process; safe to call twice and after its death."""
        for stream in (self._writer, self._reader):
            with contextlib.suppress(OSError):  # unflushed bytes have no reader any more
                stream.close()
        for stop in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_GRACE)
                return
            except subprocess.TimeoutExpired:
                stop()
        self._process.wait()

    def __enter__(self) -> ProcessSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, what: str, **arguments: Any) -> Any:
        if self._writer.closed:
            raise UserError(
                f"the acting process of {self.make!r} was closed, so it has no {what!r}; make a new source."
            )

        def exchange() -> Any:
            write_message(self._writer, {"do": what, **arguments})
            return read_message(self._reader)

        answer = self._with_fate(what, exchange)
        if "error" in answer:
            raise _ERRORS.get(answer["kind"], UserError)(answer["error"])
        return answer["value"]

    def _with_fate(self, what: str, exchange: Callable[[], Any]) -> Any:
        """Run ``exchange``; when a stream breaks because the process died, raise UserError that says so."""
        try:
            return exchange()
        except (EOFError, OSError) as error:
            raise UserError(
                f"the acting process {self.pid} of {self.make!r} {self._fate()} during {what!r}, so what it had "
                "collected is lost; its own messages are above, start it again."
            ) from error

    def _fate(self) -> str:
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# -- the acting process ------------------------------------------------------------------------------------------------


class _Actor:
    """Answers requests: "make" first, then "next", "publish" and "latest"."""

    def __init__(self) -> None:
        self.source: Any = None

    def answer(self, request: dict[str, Any]) -> Any:
        what = str(request.pop("do"))
        requests = (self.make, self.next, self.publish, self.latest)
        known: dict[str, Callable[..., Any]] = {method.__name__: method for method in requests}
        if what not in known:
            raise ContractError(
                f"the acting process cannot do {what!r}, so nothing was done; {did_you_mean(what, known)}"
            )
        return known[what](**request)

    def make(self, make: str, arguments: dict[str, Any]) -> None:
        self.source = load(make)(**arguments)

    def next(self) -> dict[str, Any]:
        rollout: Rollout = self.source.next()
        return {field.name: _arrays(getattr(rollout, field.name)) for field in fields(rollout)}

    @torch.no_grad()
    def publish(self, weights: dict[str, np.ndarray], progress: float) -> int:
        own = self.source.policy.state_dict()
        for name, array in weights.items():
            if name not in own or own[name].shape != array.shape:
                raise ContractError(
                    f"the acting policy has no weight {name!r} of shape {list(array.shape)}, so nothing was published; "
                    "make both policies from the same checkpoint or config."
                )
        for name, array in weights.items():
            own[name].copy_(torch.from_numpy(array))
        if isinstance(self.source.policy, ScheduledPolicy):
            self.source.policy.set_progress(progress)
        self.source.policy.version += 1
        return int(self.source.policy.version)

    def latest(self) -> dict[str, Any]:
        return {"version": self.source.policy.version, "weights": _arrays(self.source.policy.state_dict())}


def main() -> None:
    """Serve one learner over the standard input and output until it closes them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the learner decides what it means
    reader, writer = _take_pipes()
    actor = _Actor()
    try:
        handshake(reader, writer, "actor")
        while True:
            write_message(writer, _attempt(actor, read_message(reader)))
    except (EOFError, BrokenPipeError):
        return
    except ContractError as error:
        sys.exit(str(error))


def _attempt(actor: _Actor, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": actor.answer(request)}
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
    """Tensors as numpy arrays, also inside mappings."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return {name: _arrays(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return {name: _tensors(item) for name, item in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
