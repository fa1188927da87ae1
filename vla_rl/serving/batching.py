"""Requests of several clients, computed together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from vla_rl.contract.config import check_limits

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Batching:
    """How many requests are computed together, and how long the first of them waits for others."""

    size: int = 32
    wait_ms: float = 2.0  # only while other clients are connected that have not asked yet

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        check_limits(self, size=(1, 4096), wait_ms=(0.0, 60_000.0))


class Batcher(Generic[Asked, Answer]):
    """Collects what clients ask and gives it to ``compute``, which runs in one thread of its own.

    ``compute`` returns an answer or an exception for each request.  When it raises, each request is computed alone, so
    that one that it cannot take spoils no other.
    """

    def __init__(self, compute: Callable[[Sequence[Asked]], Sequence[Answer | Exception]], batching: Batching) -> None:
        self._compute, self._batching = compute, batching
        self._waiting: deque[tuple[Asked, Future[Answer]]] = deque()
        self._changed = threading.Condition()
        self._clients, self._closed = 0, False
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)
        self._thread.start()

    @contextmanager
    def client(self) -> Iterator[None]:
        """Somebody may ask meanwhile, one request at a time."""
        with self._changed:
            self._clients += 1
        try:
            yield
        finally:
            with self._changed:
                self._clients -= 1
                self._changed.notify()

    def ask(self, request: Asked) -> Future[Answer]:
        """The answer, when there is one; cancelled when the batcher is closed before."""
        answer: Future[Answer] = Future()
        with self._changed:
            if self._closed:
                _cancel(answer)
            else:
                self._waiting.append((request, answer))
                self._changed.notify()
        return answer

    def close(self, wait_s: float) -> None:
        """Cancel what waits, and give a running computation ``wait_s`` seconds to end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            for _, answer in self._waiting:
                _cancel(answer)
            self._waiting.clear()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while batch := self._next():
            self._answer(batch)

    def _next(self) -> list[tuple[Asked, Future[Answer]]]:
        """The next batch; empty when the batcher is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._changed.wait_for(self._full, self._batching.wait_ms / 1000)
                count = min(len(self._waiting), self._batching.size)
                taken = [self._waiting.popleft() for _ in range(count)]
                closed = self._closed
            batch = [item for item in taken if item[1].set_running_or_notify_cancel()]
            if batch or closed:
                return batch

    def _full(self) -> bool:
        """Whether nobody could join the next batch."""
        return len(self._waiting) >= min(self._batching.size, self._clients) or self._closed

    def _answer(self, batch: Sequence[tuple[Asked, Future[Answer]]]) -> None:
        try:
            answers = list(zip(batch, self._compute([request for request, _ in batch]), strict=True))
        except Exception as error:  # of a policy of the user's own: its clients are told
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            else:
                for item in batch:
                    self._answer([item])
            return
        for (_, future), answer in answers:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _cancel(answer: Future[Answer]) -> None:
    """Cancel what nobody computes, and wake whoever waits for it: that is the part of who would have computed it."""
    answer.cancel()
    answer.set_running_or_notify_cancel()
