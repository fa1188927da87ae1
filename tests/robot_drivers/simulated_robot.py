"""The simulated robot's process, for the time of a test."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from robot_drivers.simulated_process import read_own
from vla_rl.contract.trust import mark


class SimulatedProcess:
    """Starts the process and ends it with the ``with`` block, or with this process."""

    def __init__(self, **config: Any) -> None:
        """``config``: the file's entries, ``ProcessConfig``; without ``address`` the socket is in a temporary folder.

        Raises UserError for entries that nobody knows.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="simulated-robot-")
        self.address = str(config.setdefault("address", str(Path(self._folder.name) / "robot.sock")))
        file = Path(self._folder.name) / "robot.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        mark(file.read_bytes())
        read_own(file)
        command = [sys.executable, "-m", "robot_drivers.simulated", str(file), "--owned"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)

    def __enter__(self) -> Self:
        assert self.process.stdout and self.process.stdout.readline(), "it could not be started; its error is above"
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()
        self._folder.cleanup()
