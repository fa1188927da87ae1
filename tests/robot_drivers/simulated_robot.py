"""The simulated robot's process, for the time of a test."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from robot_drivers.simulated_process import read_config
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import mark


class SimulatedProcess:
    """Starts the process and ends it with the ``with`` block, or with this process."""

    def __init__(self, **config: Any) -> None:
        """``config``: the file's entries, ``ProcessConfig``; without ``address`` the socket is in a temporary folder.

        Raises UserError for entries that nobody knows, and when the robot cannot be started.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="simulated-robot-")
        self.address = str(config.setdefault("address", str(Path(self._folder.name) / "robot.sock")))
        read_config(config)
        file = Path(self._folder.name) / "robot.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        mark(file.read_bytes())
        command = [sys.executable, "-m", "robot_drivers.simulated", str(file), "--owned"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0)
        assert self._process.stdout
        if not self._process.stdout.readline():
            self.close()
            raise UserError("the simulated robot could not be started, so there is no arm; its error is above.")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it; safe to call twice."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.wait()
            if self._process.stdout:
                self._process.stdout.close()
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
