"""The worker processes of a run: collectors and evaluations use the same ones, so each is started once."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Protocol

import numpy as np
import torch

from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.experience.ray_cluster import RayCluster
from vla_rl.experience.worker import COMMAND, Link, LostWorkerError, Pipes, Report, Worker
from vla_rl.recipes.launchers import ONE_THREAD, ClusterLauncher, Launcher, LocalLauncher

_FOLDER = "vla_rl.recipes.workers:Folder"


class Engine(Protocol):
    """Starts worker processes, each of which computes with one thread.

    ``away`` says whether they may be on other machines, where the process that asks is none of them.
    """

    away: bool

    def require(self, workers: int) -> None:
        """Raise UserError when there is no room for so many at once."""

    def link(self) -> Link:
        """A new process."""

    @contextmanager
    def placed(self, worker: Worker, folder: str) -> Iterator[str]:
        """The path under which ``worker`` finds what is in ``folder``; "" stays ""."""

    def launcher(self, count: int, folder: Path) -> Launcher:
        """What starts the commands of whole runs that write into ``folder``, ``count`` at once.

        Raises UserError when there is no room for so many, and for machines that do not see ``folder``.
        """

    def close(self) -> None:
        """End what was started besides processes."""


class LocalEngine:
    """Processes of this machine."""

    away = False

    def require(self, workers: int) -> None:
        """More processes than cores are slow, and work."""

    def link(self) -> Link:
        return Pipes(COMMAND, {**os.environ, **ONE_THREAD})

    @contextmanager
    def placed(self, worker: Worker, folder: str) -> Iterator[str]:
        yield folder

    def launcher(self, count: int, folder: Path) -> Launcher:
        return LocalLauncher()

    def close(self) -> None:
        """Nothing: processes are the pool's."""


class RayEngine:
    """Actors of a Ray cluster, which get files sent: they may be on machines without this one's disk.

    Whole runs leave too many files for that: their machines must share it.
    """

    away = True

    def __init__(self, address: str, gpus: float = 0.0) -> None:
        """``address`` as for ``RayCluster``, whose errors come with the first process; each takes ``gpus``."""
        self._address, self._gpus = address, gpus
        self._connected: RayCluster | None = None

    @property
    def _cluster(self) -> RayCluster:
        if self._connected is None:
            self._connected = RayCluster(self._address, gpus=self._gpus)
        return self._connected

    def require(self, workers: int) -> None:
        self._cluster.require(workers)

    def link(self) -> Link:
        path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        return self._cluster.link({**ONE_THREAD, **path})

    @contextmanager
    def placed(self, worker: Worker, folder: str) -> Iterator[str]:
        if not folder:
            yield ""
            return
        number = worker.make(_FOLDER, files=read_folder(Path(folder)))
        yield str(worker.call(number, "path"))
        if not worker.lost:
            worker.call(number, "remove")

    def launcher(self, count: int, folder: Path) -> Launcher:
        self.require(count)
        return ClusterLauncher(self.link, count, folder)

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()


class Folder:
    """Files that were sent, in a folder of this machine."""

    def __init__(self, files: Mapping[str, torch.Tensor]) -> None:
        """``files`` {relative path: uint8 [bytes]}; raises UserError for a path that leaves the folder."""
        self._folder = TemporaryDirectory(prefix="vla-rl-")
        home = Path(self._folder.name)
        for name, content in files.items():
            path = home / name
            if not path.resolve().is_relative_to(home.resolve()):
                raise UserError(f"{name!r} would be written outside of the folder that was sent, so nothing was kept.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().tobytes())

    def path(self) -> str:
        """The folder."""
        return self._folder.name

    def remove(self) -> None:
        """Delete it."""
        self._folder.cleanup()


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """The files in ``folder`` {relative path: uint8 [bytes]}, without those of a run that a worker does not read."""
    left_out = ("state", "demonstrations", "checkpoints") if (folder / "config_files").exists() else ()
    return {
        path.relative_to(folder).as_posix(): np.fromfile(path, np.uint8)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in left_out
    }


_ENGINES = ("local", "ray")


def new_engine(name: str, address: str = "", gpus: float = 0.0) -> Engine:
    """The engine called ``name``, where each process or run takes ``gpus`` of a machine.

    Raises UserError for an unknown one, for an address or GPUs that it has no use for, and for half GPUs above one.
    """
    if name not in _ENGINES:
        raise UserError(f"there is no engine {name!r}, so nothing was started; {did_you_mean(name, _ENGINES)}")
    if name == "ray":
        if not (0 <= gpus <= 1 or (gpus > 1 and gpus.is_integer())):
            raise UserError(f"Ray cannot give {gpus:g} GPUs, so nothing was started; choose 0 to 1, or a whole number.")
        return RayEngine(address, gpus)
    for option, given in (("--address", address), ("--gpus", f"{gpus:g}" if gpus else "")):
        if given:
            raise UserError(
                f"the engine 'local' starts processes of this machine, so {option} {given} would change nothing; leave "
                "it out, or add --engine ray."
            )
    return LocalEngine()


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
