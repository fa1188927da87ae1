"""Simulated robots as processes, each started by the command that starts it on a computer of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from vla_rl.contract.errors import UserError

_NICE = 10  # the learner and the server come first
_PATIENCE_S = 10.0  # at the end
_SEEDS, _STRIDE = 100, 7  # of training runs: robots that practise in different scenes; without a common divisor


class RobotProcesses:
    """One process per robot, ``vla-rl robot run simulated --server ADDRESS`` with a scripted person beside it.

    Each has what it keeps in ``folder``: its spool and its policies in ``runs``, and its log.  ``certificates`` is the
    fleet's folder of them; ``episodes`` is how many each is to play.  Raises UserError when one ends with an error.
    """

    def __init__(self, folder: Path, address: str, certificates: Path, episodes: Mapping[str, int], seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = {name: folder / f"{name}.log" for name in episodes}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.paused = False
        for number, (name, count) in enumerate(episodes.items()):
            credentials = (certificates / "robots" / name).resolve()
            given = {
                "server": address,
                "credentials": str(credentials),
                "episodes": str(count),
                "speed": "1",
                "seed": str((seed + _STRIDE * number) % _SEEDS),
            }
            options = [f"--{option}={value}" for option, value in given.items()]
            command = [sys.executable, "-m", "vla_rl.cli", "robot", "run", "simulated", "--person", *options]
            self._processes[name] = _started(command, folder, self._logs[name])

    @property
    def running(self) -> bool:
        """Whether any of them still plays."""
        ended = {name: process.poll() for name, process in self._processes.items()}
        for name, code in ended.items():
            if code:
                raise UserError(
                    f"robot {name} ended with exit code {code}, so its part is missing; the end of its log "
                    f"{self._logs[name]}: {self._last(name)}"
                )
        return None in ended.values()

    def pause(self, paused: bool) -> None:
        """Let them stand still, or go on; their time is virtual, so that they notice nothing but a late server."""
        if paused != self.paused:
            self.paused = paused
            for process in self._processes.values():
                process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def close(self) -> None:
        """End those that still play; what they have not sent is on their disks.  Safe to call twice."""
        for process in self._processes.values():
            process.terminate()
        self.pause(False)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE_S)
            process.kill()
            process.wait()

    def _last(self, name: str) -> str:
        lines = self._logs[name].read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it is empty")


def _started(command: list[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    with log.open("ab") as out:
        # Ctrl-C is for whoever started them, who then ends them.  In sessions of their own, nice does not count.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            process_group=0,
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    return process
