"""Commands of whole runs: started on this machine, or on those of a cluster that share its disk."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Protocol

from vla_rl.contract import trust
from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError
from vla_rl.experience.worker import Link, LostWorkerError, Worker
from vla_rl.training.device import ALONE

_MACHINE = "vla_rl.recipes.launchers:Machine"
ONE_THREAD = {"OMP_NUM_THREADS": "1", ALONE: "1"}


class Launcher(Protocol):
    """Starts commands of ``vla-rl`` and waits for them; any number of threads may ask it at once."""

    def launch(self, arguments: Sequence[str], log: Path) -> int:
        """Exit status of ``vla-rl`` with ``arguments``, whose output goes to the end of ``log``.

        Raises LostWorkerError when the process that it belongs to has died, and it with that.
        """

    def close(self) -> None:
        """Start no more commands, and end those that would not hear of a Ctrl-C by themselves."""


class LocalLauncher:
    """Commands are processes of this machine, which a terminal's Ctrl-C reaches: each saves its state and ends."""

    def launch(self, arguments: Sequence[str], log: Path) -> int:
        return run_command(arguments, log)

    def close(self) -> None:
        """Nothing: they end by themselves, or with this process."""


class ClusterLauncher:
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
        """End the workers, and with them their commands; safe to call twice."""
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
        """See :func:`enter`."""
        enter(folder, mark, token)

    def run(self, arguments: list[str], log: str) -> int:
        """See ``run_command``."""
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
        """Makes ``folder`` if there is none."""
        self._mark, self._token = folder.resolve() / f".seen-{secrets.token_hex(4)}", secrets.token_hex(8)
        folder.mkdir(parents=True, exist_ok=True)
        self._mark.write_text(self._token, encoding="utf-8")

    def given(self) -> JsonObject:
        """What :func:`enter` takes on another machine."""
        return {"folder": os.getcwd(), "mark": str(self._mark), "token": self._token}

    def close(self) -> None:
        """Remove the mark; safe to call twice."""
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
