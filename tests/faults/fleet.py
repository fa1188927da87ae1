"""A server, its learner and robots as processes, with a link between each robot and the server that can fail."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.faults import learner
from tests.faults.audit import Learnt, Versions
from tests.faults.board import SLOTS, Board
from tests.faults.sides import KINDS
from tests.fleet.proxy import Proxy
from vla_rl.fleet.identity import Authority

# Before processes are forked: what they run, and what an optimizer and a dataset import when they are made.
_IMPORTED = ["tests.faults.sides", "torch._dynamo", "vla_rl.experience.lerobot.reader"]
START_S = 30.0  # for a process to begin or end, on a busy machine


class Stuck(Exception):
    """The fleet did not get somewhere; the sentence says where the logs are."""


class Process:
    """One side: killed, it is started again on the same folder."""

    def __init__(self, kind: str, folder: Path, certificates: Path) -> None:
        self.kind, self.folder, self.certificates = kind, folder, certificates
        board_at = folder.with_suffix(".board")
        self._board_at, self.board = board_at, Board(board_at)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED)
        self._process: multiprocessing.process.BaseProcess | None = None
        self.port = 0  # of the server, as this side sees it

    def start(self, point: str = "", skip: int = 0) -> None:
        for name in ("stop", "armed", "failing", "port", "failures", "began", "taken"):
            self.board[name] = 0
        if point:
            self.board.arm(point, skip)
        given = (self.folder, self._board_at, self.certificates, self.port)
        self._process = self._context.Process(target=KINDS[self.kind].program, args=given, daemon=True)
        self._process.start()

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, after ``seconds`` at most."""
        assert self._process is not None
        self._process.join(seconds)
        return self._process.exitcode is not None

    @property
    def was_killed(self) -> bool:
        return self._process is not None and self._process.exitcode == -signal.SIGKILL

    @property
    def ended_well(self) -> bool:
        """Whether it ended because it should, was killed, or had a disk that failed."""
        assert self._process is not None
        return self._process.exitcode in (0, -signal.SIGKILL) or bool(self.board["failures"])

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """End it in good order."""
        self.board["stop"] = 1
        if self._process is not None and not self.ended(START_S):
            self.kill()
            raise Stuck(f"the {self.kind} does not end; see {self.folder.with_suffix('.log')}.")


class Robot(Process):
    """A robot's process behind a link of its own; ``gone``: it was replaced by another one."""

    def __init__(self, name: str, life: int, folder: Path, certificates: Path, proxy: Proxy) -> None:
        super().__init__("robot", folder / f"{name}-{life}", certificates / "robots" / name)
        self.name, self.life, self.proxy, self.port, self.gone = name, life, proxy, proxy.port, False

    @property
    def behind(self) -> int:
        """Records that are on their way."""
        return self.board["appended"] - self.board["acknowledged"]


class Fleet:
    """Certificates, a server, its learner and ``count`` robots below ``folder``; ``learnt`` is what was found amiss."""

    def __init__(self, folder: Path, count: int = 3, learnt: Learnt | None = None) -> None:
        self.learnt = learnt or Learnt()
        self.folder, self.draw, self._ending = folder, random.Random(0), ExitStack()
        folder.mkdir(parents=True)
        authority = Authority.create(folder / "certificates")
        learner.found(folder)
        self.server = Process("server", folder / "server", authority.folder)
        self.learner = Process("learner", folder / "learner", authority.folder)
        self.versions = Versions(folder, self.learnt)
        self.lives: list[Robot] = []  # all there ever were
        for i in range(count):
            authority.robot(f"arm-{i}")
            self._join(f"arm-{i}", 0, self._ending.enter_context(Proxy(0)))

    @property
    def processes(self) -> tuple[Process, ...]:
        """All that should run; the learner ends with its server."""
        return self.server, *self.robots, self.learner

    @property
    def acknowledged(self) -> int:
        """Records, by what robots heard."""
        return sum(one.board["acknowledged"] for one in self.robots)

    @property
    def robots(self) -> list[Robot]:
        return [one for one in self.lives if not one.gone]

    def _join(self, name: str, life: int, proxy: Proxy) -> Robot:
        self.lives.append(Robot(name, life, self.folder, self.folder / "certificates", proxy))
        return self.lives[-1]

    def start(self) -> None:
        self.start_server()
        for one in (*self.robots, self.learner):
            one.start()
        self.until(lambda: self.learner.board["saves"], "the learner has published", 4 * START_S)

    def mend(self) -> list[Process]:
        """Start again who has ended by itself; returns those whose disk failed."""
        ended = [one for one in self.processes if one.ended()]
        failed = [one for one in ended if one is not self.learner or one.board["failures"]]
        for one in ended:
            if not one.ended_well and one is self.learner:
                self.learnt.wrong.append(f"the learner ended by itself; see {one.folder.with_suffix('.log')}")
            self.begin(one)
        return failed

    def begin(self, process: Process, point: str = "") -> None:
        """Start ``process``, to die at ``point``."""
        if process is self.server:
            self.start_server(point)
        else:
            process.start(point)

    def start_server(self, point: str = "", skip: int = 0) -> bool:
        """Whether the server began, or died at ``point`` before."""
        self.server.start(point, skip)
        self.until(lambda: self.server.board["port"] or self.server.ended(), "the server begins")
        for one in self.robots:
            one.proxy.to = self.server.board["port"] or one.proxy.to
        return not self.server.ended()

    def replace(self, robot: Robot) -> Robot:
        """Another robot of the same name, with a spool of its own, in place of ``robot``."""
        robot.kill()
        robot.gone = True
        new = self._join(robot.name, robot.life + 1, robot.proxy)
        new.start()
        return new

    def until(self, reached: Callable[[], object], what: str, seconds: float = START_S) -> None:
        """Wait for ``reached``; raises Stuck when it never is."""
        end = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > end:
                state = {one.folder.name: {name: one.board[name] for name in SLOTS} for one in self.processes}
                raise Stuck(f"after {seconds:g} s it is not so that {what}; see the logs in {self.folder}: {state}")
            time.sleep(0.002)

    def drain(self) -> None:
        """Everything that robots have made is acknowledged and at the learner, then all processes end."""
        for one in self.robots:
            one.board["quiet"] = 1
            one.proxy.calm()
        self.until(lambda: all(one.behind == 0 for one in self.robots), "all records are acknowledged")
        self.until(self._learnt_all, "the learner has all episodes", 4 * START_S)
        self.learner.board["stop"] = 1  # it ends with the server
        for process in (*self.robots, self.server, self.learner):
            process.stop()
        self.versions.look(last=True)

    def _learnt_all(self) -> bool:
        self.mend()
        return 0 < self.server.board["position"] == self.learner.board["taken"] and not self.learner.ended()

    def close(self) -> None:
        """Leave no process behind."""
        for process in self.processes:
            if process._process is not None:
                process.kill()
        self._ending.close()
