"""The worker processes of a run: collectors and evaluations use the same ones, so each is started once."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import LifoQueue
from typing import Any

from vla_rl.experience.worker import COMMAND, Report, Worker
from vla_rl.training.threads import ALONE

JOBS = "vla_rl.recipes.jobs:Jobs"
_LEAST_PRIORITY = 19  # nice


class WorkerPool:
    """Processes that compute with one thread each.  Those of the same program are found by :func:`workers`."""

    def __init__(self, run: str = "") -> None:
        """``run`` is the run folder, whose own config file may define what the processes need."""
        self.run = run
        self.all: list[Worker] = []
        self._idle: LifoQueue[Worker] = LifoQueue()  # the first ones, which collect, are taken last
        self._jobs: dict[Worker, int] = {}
        self._threads = ThreadPoolExecutor(64, "worker")
        self._background: Worker | None = None
        self._in_turn = ThreadPoolExecutor(1, "background")

    def grow(self, count: int) -> None:
        """Start processes until there are ``count``; nobody waits for them yet."""
        while len(self.all) < count:
            self.all.append(self._new())
            self._idle.put(self.all[-1])

    def submit(self, job: str, report: Report | None = None, **arguments: Any) -> Future[Any]:
        """Call the method ``job`` of ``Jobs`` in the next idle process; ``report`` as for ``Worker.call``."""
        return self._threads.submit(self._run, job, report, arguments)

    def submit_background(self, job: str, report: Report | None = None, **arguments: Any) -> Future[Any]:
        """As :meth:`submit`, in a process that computes when a core is idle; its jobs are done in turn."""
        return self._in_turn.submit(self._run_background, job, report, arguments)

    def map(self, job: str, arguments: Sequence[dict[str, Any]], reports: Sequence[Report | None]) -> list[Any]:
        """What ``job`` returns for each of ``arguments``, in their order; raises the first exception of one."""
        futures = [self.submit(job, report, **given) for given, report in zip(arguments, reports, strict=True)]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the processes; safe to call twice."""
        for worker in (*self.all, *([self._background] if self._background else [])):
            worker.close()
        for threads in (self._threads, self._in_turn):
            threads.shutdown(cancel_futures=True)

    def _run(self, job: str, report: Report | None, arguments: dict[str, Any]) -> Any:
        worker = self._idle.get()
        try:
            return self._call(worker, job, report, arguments)
        finally:
            self._idle.put(worker)

    def _run_background(self, job: str, report: Report | None, arguments: dict[str, Any]) -> Any:
        if self._background is None:
            self._background = self._new()
            os.setpriority(os.PRIO_PROCESS, self._background.pid, _LEAST_PRIORITY)
        return self._call(self._background, job, report, arguments)

    def _call(self, worker: Worker, job: str, report: Report | None, arguments: dict[str, Any]) -> Any:
        if worker not in self._jobs:
            self._jobs[worker] = worker.make(JOBS, run=self.run)
        return worker.call(self._jobs[worker], job, report, **arguments)

    @staticmethod
    def _new() -> Worker:
        return Worker(COMMAND, {**os.environ, "OMP_NUM_THREADS": "1", ALONE: "1"})


_pools: list[WorkerPool] = []  # the one of the run that is on, if it has asked for processes
_run = [""]


@contextmanager
def worker_processes(run: str) -> Iterator[None]:
    """End the processes that the run in the folder ``run`` asks for within the block."""
    _run.append(run)
    try:
        yield
    finally:
        _run.pop()
        close_workers()


def workers(count: int) -> WorkerPool:
    """The processes of this program, at least ``count``; they are started once."""
    if not _pools:
        _pools.append(WorkerPool(_run[-1]))
    _pools[0].grow(count)
    return _pools[0]


def close_workers() -> None:
    """End all processes; those that are at work are stopped."""
    while _pools:
        _pools.pop().close()


atexit.register(close_workers)
