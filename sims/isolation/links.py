"""A connection to one worker: requests go out, answers come back in time or the worker counts as failed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from sims.isolation.channel import Arrays, SharedMemory, memory_file
from vla_rl.contract.child import Child, ChildError
from vla_rl.contract.errors import ContractError


class Link(Protocol):
    """One worker, as its owner sees it.  Its methods raise ChildError when the worker is of no more use."""

    @property
    def name(self) -> str:
        """Which worker it is, for messages."""

    def send(self, request: Mapping[str, Any], arrays: Mapping[str, np.ndarray], deadline: float) -> None:
        """Send a request before ``deadline`` (``time.monotonic``)."""

    def receive(self, deadline: float) -> tuple[dict[str, Any], Arrays]:
        """The answer and its arrays, which the answer after the next one overwrites."""

    def last_words(self) -> str:
        """The last lines that the worker printed."""

    def kill(self) -> None:
        """End the worker at once, whatever it does."""

    def close(self) -> None:
        """Free everything; safe to call twice."""


Start: TypeAlias = Callable[[], Link]
"""Starts a worker without waiting for it."""


class LocalWorker:
    """A process of this machine, with arrays in shared memory."""

    def __init__(self, python: str = "", variables: Mapping[str, str] | None = None) -> None:
        """``python`` runs it ("": this one), with ``variables`` on top of this process's environment variables."""
        request, *answers = files = [memory_file() for _ in range(3)]
        environment = {**os.environ, **(variables or {})}
        command = (python or sys.executable, "-m", "sims.isolation.worker")
        try:
            self._child = Child(command, environment, "environment", files)
        except BaseException:
            for file in files:
                os.close(file)
            raise
        self._memory = SharedMemory([request], answers)
        self._files: dict[str, Any] | None = {"inbox": [request], "outbox": answers}

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._child.running

    def fileno(self) -> int:
        """The descriptor that answers arrive on."""
        return self._child.fileno()

    @property
    def name(self) -> str:
        return f"worker process {self.pid}"

    def send(self, request: Mapping[str, Any], arrays: Mapping[str, np.ndarray], deadline: float) -> None:
        files, self._files = {"memory": self._files} if self._files else {}, None
        self._child.send({**request, **files, **({"arrays": self._memory.put(arrays)} if arrays else {})}, deadline)

    def receive(self, deadline: float) -> tuple[dict[str, Any], Arrays]:
        answer = self._child.receive(deadline)
        return read_answer(answer, self._memory.get)

    def last_words(self) -> str:
        return self._child.last_words()

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._child.close()
        self._memory.close()


def read_answer(answer: Any, get: Callable[[Any], Arrays]) -> tuple[dict[str, Any], Arrays]:
    """The fields and arrays of a worker's ``answer``; raises ChildError for one that makes no sense."""
    if not isinstance(answer, dict):
        raise ChildError(f"answered with a {type(answer).__name__}")
    try:
        return answer, get(answer.pop("arrays")) if "arrays" in answer else {}
    except ContractError as error:
        raise ChildError(f"answered with arrays that cannot be read ({error})") from error
