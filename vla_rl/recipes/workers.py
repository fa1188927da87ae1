"""The worker processes of a run: collectors and evaluations use the same ones, so each is started once."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, LifoQueue, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock

import numpy as np
import torch

from vla_rl.contract import trust
from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.experience.ray_cluster import RayCluster
from vla_rl.experience.worker import COMMAND, Link, LostWorkerError, Pipes, Report, Worker
from vla_rl.training.device import ALONE

_FOLDER = "vla_rl.recipes.workers:Folder"


class Engine:
    """Starts worker processes, each of which computes with one thread: here, of this machine."""

    away = False  # whether they may be on other machines, where the process that asks is none of them

    def require(self, workers: int) -> None:
        """Raise UserError when there is no room for so many at once; here, more than cores are slow, and work."""

    def link(self) -> Link:
        return Pipes(COMMAND, {**os.environ, **ONE_THREAD})

    @contextmanager
    def placed(self, worker: Worker, folder: str) -> Iterator[str]:
        """The path under which ``worker`` finds what is in ``folder``; "" stays ""."""
        yield folder

    def launcher(self, count: int, folder: Path) -> Launcher:
        """What starts the commands of whole runs that write into ``folder``, ``count`` at once.

        Raises UserError when there is no room for so many, and for machines that do not see ``folder``.
        """
        return Launcher()

    def close(self) -> None:
        """End what was started besides processes."""


class RayEngine(Engine):
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
        return self._folder.name

    def remove(self) -> None:
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
    return Engine()


JOBS = "vla_rl.recipes.evaluators:Jobs"
_HERE = Engine()
FOLDER = "policy"  # the argument of a job that names a folder of this machine


class WorkerPool:
    """Processes that compute with one thread each.  Those of the same program are found by :func:`workers`."""

    def __init__(self, run: str = "", engine: Engine | None = None) -> None:
        """``run`` is the run folder, whose own config file may define what the processes need.

        ``engine`` starts them (None: on this machine).
        """
        self.run, self.engine = run, engine or Engine()
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


_MACHINE = "vla_rl.recipes.workers:Machine"
ONE_THREAD = {"OMP_NUM_THREADS": "1", ALONE: "1"}


class Launcher:
    """Starts commands of ``vla-rl`` and waits for them; any number of threads may ask it at once.

    Here, they are processes of this machine, which a terminal's Ctrl-C reaches: each saves its state and ends.
    """

    def launch(self, arguments: Sequence[str], log: Path) -> int:
        """Exit status of ``vla-rl`` with ``arguments``, whose output goes to the end of ``log``.

        Raises LostWorkerError when the process that it belongs to has died, and it with that.
        """
        return run_command(arguments, log)

    def close(self) -> None:
        """Start no more commands, and end those that would not hear of a Ctrl-C by themselves."""


class ClusterLauncher(Launcher):
    """Every command belongs to a worker of its own, on any machine that sees this one's working folder and ``folder``.

    When a worker dies, so does its command.
    """

    def __init__(self, link: Callable[[], Link], count: int, folder: Path) -> None:
        """``link`` starts a worker; those of the first ``count`` commands are started now.

        Raises UserError when one of them is on a machine that does not see ``folder``.
        """
        self._link, self._closed, self._lock = link, False, Lock()
        self._working: set[Worker] = set()
        self._disk = SharedDisk(folder)
        self._ready: SimpleQueue[tuple[Worker, int]] = SimpleQueue()
        try:
            for worker in [self._worker() for _ in range(count)]:  # they start beside each other
                self._ready.put((worker, self._machine(worker)))
        except BaseException:
            self.close()
            raise

    def launch(self, arguments: Sequence[str], log: Path) -> int:
        """See ``Launcher``; raises UserError where a worker's machine does not see the folder."""
        worker, machine = self._next()
        try:
            return int(worker.call(machine, "run", arguments=list(arguments), log=str(log.resolve())))
        except LostWorkerError as error:
            if self._closed:  # that is why it was lost: nobody should try again
                raise UserError(
                    f"{log.stem} was stopped, so it is not finished; run the same command again."
                ) from error
            raise
        finally:
            self._end(worker)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            working, self._working = self._working, set()
        for worker in working:
            worker.close()
        self._disk.close()

    def _next(self) -> tuple[Worker, int]:
        try:
            return self._ready.get_nowait()
        except Empty:
            worker = self._worker()
        try:
            return worker, self._machine(worker)
        except BaseException:
            self._end(worker)
            raise

    def _worker(self) -> Worker:
        with self._lock:
            if self._closed:
                raise UserError("the sweep was stopped, so nothing more is started; run the same command again.")
            worker = Worker(self._link())
            self._working.add(worker)
            return worker

    def _machine(self, worker: Worker) -> int:
        return worker.make(_MACHINE, "a run", **self._disk.given())

    def _end(self, worker: Worker) -> None:
        with self._lock:
            self._working.discard(worker)
        worker.close()


class Machine:
    """Runs commands in a folder, on a disk that the one who asks shares."""

    def __init__(self, folder: str, mark: str, token: str) -> None:
        enter(folder, mark, token)

    def run(self, arguments: list[str], log: str) -> int:
        return run_command(arguments, Path(log))


def run_command(arguments: Sequence[str], log: Path) -> int:
    """Exit status of ``vla-rl`` with ``arguments`` as a process that ends with this one; its output ends ``log``."""
    command = [sys.executable, "-m", "vla_rl.cli", "--owned", *arguments, *trust.options()]
    environment = {**os.environ, **ONE_THREAD, "TERM": "dumb"}
    with (
        log.open("a") as file,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment) as process,
    ):
        return process.wait()


class SharedDisk:
    """A mark in ``folder``, by which other machines are known to see it until :meth:`close`."""

    def __init__(self, folder: Path) -> None:
        self._mark, self._token = folder.resolve() / f".seen-{secrets.token_hex(4)}", secrets.token_hex(8)
        folder.mkdir(parents=True, exist_ok=True)
        self._mark.write_text(self._token, encoding="utf-8")

    def given(self) -> JsonObject:
        """What :func:`enter` takes on another machine."""
        return {"folder": os.getcwd(), "mark": str(self._mark), "token": self._token}

    def close(self) -> None:
        self._mark.unlink(missing_ok=True)


def enter(folder: str, mark: str, token: str) -> None:
    """Make ``folder`` the working folder of this process.

    Raises UserError when there is none, and unless the file ``mark`` holds ``token``.
    """
    out = Path(mark)
    if not out.is_file() or out.read_text(encoding="utf-8") != token:
        raise _not_shared(str(out.parent))
    if not Path(folder).is_dir():
        raise _not_shared(folder)
    os.chdir(folder)


def _not_shared(folder: str) -> UserError:
    return UserError(
        f"the machine {socket.gethostname()!r} does not see {folder!r} of the one that asks, so nothing was started "
        "there; give the command in a folder, and an --out, on a disk that all machines of the cluster share under one "
        "path, or use --engine local."
    )
