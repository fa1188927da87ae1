"""The worker processes of a run: collectors and evaluations use the same ones, so each is started once."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import LifoQueue
from threading import Lock

from vla_rl.contract.config import JsonObject
from vla_rl.experience.worker import LostWorkerError, Report, Worker
from vla_rl.recipes.engines import Engine, LocalEngine, new_engine

JOBS = "vla_rl.recipes.jobs:Jobs"
_HERE = LocalEngine()
FOLDER = "policy"  # the argument of a job that names a folder of this machine


class WorkerPool:
    """Processes that compute with one thread each.  Those of the same program are found by :func:`workers`."""

    def __init__(self, run: str = "", engine: Engine | None = None) -> None:
        """``run`` is the run folder, whose own config file may define what the processes need.

        ``engine`` starts them (None: on this machine).
        """
        self.run, self.engine = run, engine or LocalEngine()
        self.all: list[Worker] = []
        self._idle: LifoQueue[int] = LifoQueue()  # the first ones, which collect, are taken last
        self._jobs: dict[Worker, int] = {}
        self._replacing = Lock()
        self._threads = ThreadPoolExecutor(64, "worker")

    def grow(self, count: int) -> None:
        """Start processes until there are ``count``; nobody waits for them yet."""
        if count > len(self.all):
            self.engine.require(count)
        while len(self.all) < count:
            self.all.append(Worker(self.engine.link()))
            self._idle.put(len(self.all) - 1)

    def replaced(self, number: int) -> Worker:
        """Process ``number``, or a new one in its place if it has died."""
        with self._replacing:
            if self.all[number].lost:
                self.all[number].close()
                self.all[number] = Worker(self.engine.link())
            return self.all[number]

    def submit(self, job: str, report: Report | None = None, **arguments: object) -> Future[JsonObject]:
        """Call the method ``job`` of ``Jobs`` in the next idle process; ``report`` as for ``Worker.call``."""
        return self._threads.submit(self._run, job, report, arguments)

    def map(self, job: str, arguments: Sequence[JsonObject], reports: Sequence[Report | None]) -> list[JsonObject]:
        """What ``job`` returns for each of ``arguments``, in their order; raises the first exception of one."""
        futures = [self.submit(job, report, **given) for given, report in zip(arguments, reports, strict=True)]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the processes; safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self.all:
            worker.close()

    def _run(self, job: str, report: Report | None, arguments: Mapping[str, object]) -> JsonObject:
        number = self._idle.get()
        try:
            return self._call(self.replaced(number), job, report, arguments)
        except LostWorkerError:  # a job changes nothing until it has ended
            return self._call(self.replaced(number), job, report, arguments)
        finally:
            self._idle.put(number)

    def _call(self, worker: Worker, job: str, report: Report | None, arguments: Mapping[str, object]) -> JsonObject:
        if worker not in self._jobs:
            with self.engine.placed(worker, self.run) as run:
                self._jobs[worker] = worker.make(JOBS, run=run)
        with self.engine.placed(worker, str(arguments.get(FOLDER, ""))) as folder:
            given = {**arguments, **({FOLDER: folder} if FOLDER in arguments else {})}
            found: JsonObject = worker.call(self._jobs[worker], job, report, **given)
        return found


_pools: list[WorkerPool] = []  # the one of the run that is on, if it has asked for processes
_run = [""]
_engine: list[Engine] = []  # the one that was chosen, if one was


@contextmanager
def worker_processes(run: str) -> Iterator[None]:
    """End the processes that the run in the folder ``run`` asks for within the block."""
    _run.append(run)
    try:
        yield
    finally:
        _run.pop()
        close_workers()


@contextmanager
def on_engine(engine: Engine) -> Iterator[None]:
    """Start the processes of the block by ``engine``, and close it afterwards."""
    _engine.append(engine)
    try:
        yield
    finally:
        close_workers()
        _engine.pop().close()


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of every command whose runs or processes may be on other machines."""

    engine: str = "local"  # where they are: "local", this machine, or "ray", a cluster whose machines share a disk
    address: str = ""  # HOST:PORT of the cluster's head node; without: RAY_ADDRESS, or a new one on this machine
    gpus: float = 0.0  # that each of them takes in the cluster; 0.5: two share one

    def on_engine(self) -> AbstractContextManager[None]:
        """Start the cells of the block there; raises UserError as ``new_engine``."""
        return on_engine(new_engine(self.engine, self.address, self.gpus))


def chosen_engine() -> Engine:
    """The engine of the block, or that of this machine."""
    return _engine[-1] if _engine else _HERE


def workers(count: int) -> WorkerPool:
    """The processes of this program, at least ``count``; they are started once."""
    if not _pools:
        _pools.append(WorkerPool(_run[-1], chosen_engine()))
    _pools[0].grow(count)
    return _pools[0]


def close_workers() -> None:
    """End all processes; those that are at work are stopped."""
    while _pools:
        _pools.pop().close()


atexit.register(close_workers)
