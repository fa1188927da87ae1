"""Where the worker processes of a run are: on this machine, or in a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
import torch

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.experience.ray_cluster import RayCluster
from vla_rl.experience.worker import COMMAND, Link, Pipes, Worker
from vla_rl.recipes.launchers import ONE_THREAD, ClusterLauncher, Launcher, LocalLauncher

_FOLDER = "vla_rl.recipes.engines:Folder"


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
