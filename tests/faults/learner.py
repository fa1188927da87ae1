"""The learner's process: ``vla_rl.recipes.fleet.learning`` with points at which it dies.

Its method is an auditing one (``auditing_learner.py``); everything else is what runs behind ``vla-rl serve --learn``.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.faults import auditing_learner
from tests.faults.board import REPLACING, Board, CrashDisk, quiet
from vla_rl.fleet.disk import File
from vla_rl.fleet.record import FleetRecord
from vla_rl.fleet.registry import Registry
from vla_rl.recipes.fleet import learning
from vla_rl.recipes.fleet.learners import prepare
from vla_rl.recipes.fleet.learning import Learning, Releasing
from vla_rl.recipes.fleet.publishing import publish_first
from vla_rl.recipes.fleet.serving import key_file, signing_key
from vla_rl.training import checkpoint

PIPES = "pipes"  # the socket at which a server's stand-in waits, in the fleet's folder


def found(fleet: Path) -> None:
    """Have in the folder ``fleet`` what a learner begins with: a policy, demonstrations, a key, a first version."""
    made = auditing_learner.config(fleet)
    prepare(made, fleet, None)
    publish_first(Registry(fleet / "registry", made.canary), signing_key(fleet, ""), made.policy)


def learner(folder: Path, board_at: Path, certificates: Path, port: int) -> None:
    """Learn from what a server sends, and from what the next one does, until it ends."""
    quiet(folder)
    board, fleet = Board(board_at), folder.parent
    with_points(board)
    if (pipes := _pipes(fleet / PIPES, board)) is None:
        return
    connection, incoming, outgoing = pipes
    sys.stdin, sys.stdout = open(incoming, encoding="utf-8"), open(outgoing, "w", encoding="utf-8")  # noqa: SIM115
    with connection:
        sys.exit(learning.main([str(fleet), str(key_file(fleet, ""))]))


def _pipes(path: Path, board: Board) -> tuple[socket.socket, int, int] | None:
    """The pipes of the server that runs, whenever one does; None when it shall end."""
    while not board["stop"]:
        connection = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            connection.connect(str(path))
            _, files, _, _ = socket.recv_fds(connection, 16, 2)
            if len(files) == 2:
                return connection, *files
        connection.close()
        time.sleep(0.01)
    return None


def with_points(board: Board) -> None:
    """Let this process die where ``board`` says."""
    torch.set_num_threads(1)
    auditing_learner.reach = board.reach
    swapped: dict[str, Callable[..., Any]] = {
        "Registry": lambda folder, rule: _Registry(board, folder, rule),
        "Releasing": partial(_Releasing, board),
        "Learning": partial(_Learning, board),
    }
    for name, made in swapped.items():
        setattr(learning, name, made)
    for name, within in _saving(board).items():
        setattr(checkpoint, name, within)


class _Learning(Learning):
    def __init__(self, board: Board, *given: Any) -> None:
        self._board = board
        super().__init__(*given)
        board["began"] = 1

    def take(self, position: int, record: FleetRecord) -> None:
        if record.kind == "episode_end" and position > self.position:
            with self._board.step("episode"):
                super().take(position, record)
        else:
            super().take(position, record)
        self._board["taken"] = position

    def publish(self) -> None:
        self._board.reach("before checkpoint")
        super().publish()

    def save(self) -> None:
        with self._board.step("state"):
            super().save()
            self._board["saved"] = self.position
            self._board["saves"] += 1


class _Releasing(Releasing):
    def __init__(self, board: Board, *given: Any) -> None:
        self._board = board
        super().__init__(*given)

    def release(self, checkpoint: Path, robots: Iterable[str], why: str) -> int:
        self._board.reach("after checkpoint")
        return super().release(checkpoint, robots, why)


class _Registry(Registry):
    def __init__(self, board: Board, folder: Path, rule: Any) -> None:
        self._board = board
        super().__init__(folder, rule, _RegistryDisk(board))

    def publish(self, *given: Any) -> int:
        version = super().publish(*given)
        self._board.reach("after publication")
        return version

    def try_on(self, *given: Any) -> tuple[str, ...]:
        chosen = super().try_on(*given)
        self._board.reach("after trial")
        return chosen

    def remove_old(self, *given: Any) -> int:
        freed = super().remove_old(*given)
        self._board.reach("after removing old versions")
        return freed


class _RegistryDisk(CrashDisk):
    """A manifest gets its name, and a line is added to the history, at points of their own."""

    def rename(self, path: Path, target: Path) -> None:
        if target.parent.name != "manifests":
            return super().rename(path, target)
        with self.step("manifest"):
            super().rename(path, target)

    def open(self, path: Path) -> File:
        file = super().open(path)
        return _History(self.board, file) if path.name == "history" else file


class _History(File):
    def __init__(self, board: Board, file: File) -> None:
        self._board, self._file = board, file
        self.truncate, self.sync, self.close = file.truncate, file.sync, file.close

    def write(self, data: bytes, /) -> int:
        with self._board.step("line of history"):
            return self._file.write(data)


def _saving(board: Board) -> dict[str, Any]:
    """What ``save_state`` calls, with points around and within it."""
    save_file = checkpoint.save_file

    def tensors_saved(*given: Any) -> None:
        save_file(*given)
        board.reach("within state")

    def replace(path: Path, target: Path) -> None:
        if path.name.endswith(".writing"):
            board.reach(REPLACING if target.with_name(target.name + ".old").exists() else "before naming a state")
        os.replace(path, target)

    def rmtree(path: Path, ignore_errors: bool) -> None:
        if path.name.removesuffix(".old").isdigit() and path.is_dir():
            for inside in sorted(path.iterdir())[:1]:
                inside.unlink()
            board.reach("within removing a state")
        shutil.rmtree(path, ignore_errors=ignore_errors)

    calls = SimpleNamespace(**{**vars(os), "replace": replace})
    return {"save_file": tensors_saved, "os": calls, "shutil": SimpleNamespace(rmtree=rmtree)}
