"""A worker that is replaced when it fails: it dies, misses a deadline, raises, or returns what breaks its own spec."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from sims.isolation.messages import OBS
from vla_rl.contract.child import ChildError, SharingChild, error_of
from vla_rl.contract.env import WORKER, EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.wire import Arrays

_GRACE = 5.0  # seconds for a worker to close its environment
LIMIT = 5  # failures without one completed step in between, after which the run is stopped


@dataclass(frozen=True)
class Deadlines:
    """How many seconds a worker has for a reset, step or snapshot, and to start and make its environment."""

    answer: float
    start: float


@dataclass(frozen=True)
class Answer:
    """What a worker answered; its next answer but one overwrites the arrays."""

    fields: Mapping[str, Any]
    arrays: Arrays


@dataclass(frozen=True)
class Request:
    """What a worker is asked to do: its fields and arrays, and what its answer has to hold.

    ``check(answer)`` raises ContractError for an answer that breaks the environment's spec.  ``arguments`` says that a
    ContractError of the environment is about the caller's arguments, and is no failure of the worker.
    """

    do: str
    arrays: Mapping[str, np.ndarray]
    check: Callable[[Answer], None]
    fields: Mapping[str, Any] = field(default_factory=dict)
    arguments: bool = False


class SupervisedWorker:
    """One worker after the other, with the environments ``rows`` (a slice of all of them).

    fresh     no environment of the present worker was ever reset
    latest    the arrays of the last observation that arrived, by name; {} before the first one
    restarts  how often a worker was replaced
    failures  since the last completed step
    """

    def __init__(
        self, start: Start, make: Mapping[str, Any], rows: slice, deadlines: Deadlines, recycle_steps: int = 0
    ) -> None:
        """``start`` starts a worker, ``make`` are the fields of its first request; ``recycle_steps``: see ``worn``."""
        self._recycle_steps, self._executed = recycle_steps, 0
        self.rows, self.fresh, self.restarts = rows, True, 0
        self.latest: Arrays = {}
        self._start, self._make, self._deadlines = start, dict(make), deadlines
        self.failures, self._closed = 0, False
        self._failure = ""  # why the present worker is of no more use
        self._spec: EnvSpec | None = None
        self.link = self._begin()

    @property
    def worn(self) -> float:
        """How many control steps the present worker has executed, as a share of ``recycle_steps``; 0 without those."""
        return self._executed / self._recycle_steps if self._recycle_steps else 0.0

    @property
    def size(self) -> int:
        """How many environments it has."""
        return int(self.rows.stop - self.rows.start)

    def spec(self) -> EnvSpec:
        """The spec of its environment, waiting for the worker to make it.

        Raises UserError when it cannot be made, also by the workers after the first one.
        """
        while self._making:
            try:
                answer, _ = self.link.receive(self._making)
            except (ChildError, ContractError) as error:
                self._replace(str(error), "make")
                continue
            if "error" not in answer:
                self._adopt(EnvSpec.from_json(answer["spec"]))
            elif answer["kind"] or self._spec is None:
                raise error_of(answer)
            else:
                self._replace(f"failed: {answer['error']}", "make")
        assert self._spec is not None
        return self._spec

    def send(self, request: Request) -> None:
        """Send ``request``; :meth:`receive` says whether that failed.  Raises UserError after :meth:`close`."""
        if self._closed:
            raise UserError(
                f"the isolated environment {self._make['env']!r} was closed, so it has no {request.do!r}; make a new "
                "one."
            )
        if self._failure:
            return
        self.spec()
        self._deadline = time.monotonic() + self._deadlines.answer
        try:
            self.link.send({"do": request.do, **request.fields, "arrays": request.arrays}, self._deadline)
        except ChildError as error:
            self._failure = str(error)

    def receive(self, request: Request) -> Answer | None:
        """The answer to ``request``; None when the worker failed; another one was started.

        Raises UserError when that happens again and again, and ContractError about the caller's arguments.
        """
        try:
            answer, arrays = self._answer()
            if "error" in answer:
                error = error_of(answer)
                if request.arguments and isinstance(error, ContractError):
                    raise error
                raise ChildError(f"failed: {error}")
            try:
                request.check(Answer(answer, arrays))
            except ContractError as error:
                raise ChildError(f"broke its own spec: {error}") from error
        except ChildError as error:
            self._replace(str(error), request.do)
            return None
        if request.do != "snapshot":
            self.latest, self.fresh = arrays, False
        else:  # no observation; and the next answer but one overwrites what arrived before
            self.latest = {name: array.copy() for name, array in self.latest.items() if name.startswith(OBS)}
        if request.do == "step":
            self.failures = 0
            self._executed += math.prod(request.arrays["chunk"].shape[:2])
        return Answer(answer, arrays)

    def abandon(self) -> None:
        """End the worker in the middle of an exchange; it is replaced when it is used again."""
        self._failure = "was interrupted"  # its answer may have arrived
        self.link.kill()

    def retire(self) -> None:
        """Start another worker in the place of this one, which is no failure; its environments have to be reset."""
        self._end()
        self.fresh, self.link = True, self._begin()

    def close(self) -> None:
        """End the worker, in order if it can; safe to call twice."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        end = time.monotonic() + _GRACE
        with contextlib.suppress(ChildError, ContractError):
            if not self._making:
                self.link.send({"do": "close", "arrays": {}}, end)
                self.link.receive(end)
        self.link.kill()
        self.link.close()

    def _answer(self) -> tuple[dict[str, Any], Arrays]:
        if self._failure:
            raise ChildError(self._failure)
        try:
            return self.link.receive(self._deadline)
        except ContractError as error:
            raise ChildError(f"sent what is no message ({error})") from error

    def _begin(self) -> Link:
        link, self._failure, self._executed = self._start(), "", 0
        self._making = time.monotonic() + self._deadlines.start
        with contextlib.suppress(ChildError):  # receiving its answer says why
            link.send({"do": "make", **self._make, "arrays": {}}, self._making)
        return link

    def _adopt(self, spec: EnvSpec) -> None:
        if self._spec not in (None, spec):
            raise UserError(
                f"{self.link.name} made {spec.name!r} with another spec than the worker before it, so its episodes "
                "would be misread; do not change the simulator during a run."
            )
        self._spec, self._making = spec, 0.0

    def _replace(self, reason: str, during: str) -> None:
        """Start another worker; raises UserError after too many in a row."""
        what = f"{self.link.name} of {self._make['env']!r} (environments {self.rows.start} to {self.rows.stop - 1})"
        self.link.kill()
        self.link.close()
        words = self.link.last_words()  # all of them, now that it says no more
        self.failures += 1
        last = f" Its last words:\n{words}" if words else " It said nothing."
        if self.failures >= LIMIT:
            raise UserError(
                f"{what} {reason} during {during!r}, the {LIMIT}th failure in a row without a completed step, so the "
                f"run cannot go on; run the environment by itself (vla-rl inspect).{last}"
            )
        warnings.warn(
            f"{what} {reason} during {during!r}, so another one is started and its running episodes are truncated "
            f'(cause "{WORKER}").{last}',
            stacklevel=2,
        )
        self.restarts, self.fresh, self.link = self.restarts + 1, True, self._begin()


class Link(Protocol):
    """One worker, as its owner sees it.  Its methods raise ChildError when the worker is of no more use."""

    @property
    def name(self) -> str:
        """Which worker it is, for messages."""

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Send a request, with its arrays {name: array} as ``arrays``, before ``deadline`` (``time.monotonic``)."""

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


class LocalWorker(SharingChild):
    """A process of this machine, with arrays in shared memory (``Link``)."""

    def __init__(self, python: str = "", variables: Mapping[str, str] | None = None) -> None:
        """``python`` runs it ("": this one), with ``variables`` on top of this process's environment variables."""
        command = (python or sys.executable, "-m", "sims.isolation.worker")
        super().__init__(command, {**os.environ, **(variables or {})}, "environment")

    @property
    def name(self) -> str:
        return f"worker process {self.pid}"
