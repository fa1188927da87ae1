"""The simulated robot's process seen from elsewhere: its driver, its cameras, and how it is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from robot_drivers.cameras.camera import CameraError, CameraSpec, Frame
from robot_drivers.driver import DriverError, Measurement, RobotSpec
from robot_drivers.simulated_hardware import SO101, Simulated, env_spec_of, robot_spec
from robot_drivers.simulated_process import read_config
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.streams import SocketStream
from vla_rl.contract.trust import mark
from vla_rl.contract.wire import handshake, read_message, write_message

_PATIENCE = 2.0  # seconds for an answer


class _Line:
    """A connection to the process at ``address``."""

    def __init__(self, address: str, name: str) -> None:
        """Raises OSError when nobody listens there."""
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(address)
        self._stream = SocketStream(connected)
        self._stream.deadline = time.monotonic() + _PATIENCE
        handshake(self._stream, self._stream, name)

    def ask(self, what: str, **entries: Any) -> dict[str, Any]:
        """The answer; raises DriverError for silence, and ContractError for a request that was refused."""
        self._stream.deadline = time.monotonic() + _PATIENCE
        try:
            write_message(self._stream, {"ask": what, **entries})
            answer: dict[str, Any] = read_message(self._stream)
        except (OSError, EOFError) as error:
            raise DriverError(f"asked the simulated robot to {what} and got no answer ({error}).") from error
        if "silent" in answer:
            raise DriverError(answer["silent"])
        if "refused" in answer:
            raise ContractError(answer["refused"])
        return answer

    def close(self) -> None:
        self._stream.close()


class SimulatedArm:
    """The arm of a simulated robot's process (``RobotDriver``, ``Resets``, ``Judged``)."""

    def __init__(
        self, address: str, env: str = SO101, options: Mapping[str, Any] | None = None, **motors: float
    ) -> None:
        """``address`` of the process; the rest says what it simulates, as for ``SimulatedRobot``."""
        simulated = Simulated(env, options or {}, **motors)
        self._address, self._spec = address, robot_spec(simulated, env_spec_of(simulated))
        self._line: _Line | None = None

    @property
    def spec(self) -> RobotSpec:
        return self._spec

    @property
    def is_connected(self) -> bool:
        return self._line is not None

    def connect(self) -> None:
        """Raises UserError when the process does not answer."""
        if self._line is None:
            try:
                self._line = _Line(self._address, "driver")
            except (OSError, EOFError) as error:
                raise UserError(
                    f"no simulated robot answers at {self._address} ({error}), so there is no arm; start one with "
                    "'python -m robot_drivers.simulated robot.json'."
                ) from error

    def observe(self) -> Measurement:
        answer = self._connected.ask("observe")
        return Measurement(answer["position"], None, answer["captured"])

    def command(self, position: np.ndarray) -> np.ndarray:
        """Send a target [D]; returns it within the joints' limits.  The arm holds it until the next one."""
        sent: np.ndarray = self._connected.ask("command", position=np.asarray(position, np.float64))["sent"]
        return sent

    def reset(self, seed: int) -> None:
        """Start the episode of ``seed``."""
        self._connected.ask("reset", seed=int(seed))

    @property
    def outcome(self) -> str:
        """The cause of the episode's end, "" while it runs."""
        return str(self._connected.ask("outcome")["outcome"])

    def disconnect(self) -> None:
        """The arm holds its last target; safe to call twice."""
        if self._line is not None:
            self._line.close()
            self._line = None

    @property
    def _connected(self) -> _Line:
        if self._line is None:
            raise DriverError(f"{self.spec.name} is not connected, so it cannot be used; call connect() first.")
        return self._line


class SimulatedCamera:
    """A camera of a simulated robot's process (``FrameSource``), over a connection of its own."""

    def __init__(
        self, address: str, camera: str = "front", env: str = SO101, options: Mapping[str, Any] | None = None
    ) -> None:
        """Raises UserError for a camera that the environment does not have."""
        spec = env_spec_of(Simulated(env, options or {}))
        if camera not in spec.images:
            raise UserError(
                f"the simulated robot has no camera {camera!r}, so nothing is seen; {did_you_mean(camera, spec.images)}"
            )
        height, width, _ = spec.images[camera].shape
        self._address, self._camera = address, camera
        self.spec = CameraSpec(height, width, 1.0 / spec.control_dt)
        self._line: _Line | None = None
        self._last = -1.0

    def open(self) -> None:
        """Raises CameraError when the process does not answer."""
        try:
            self._line = _Line(self._address, f"camera {self._camera}")
        except (OSError, EOFError) as error:
            raise CameraError(f"no simulated robot answers at {self._address} ({error})") from error

    def grab(self) -> Frame:
        """Wait for the next picture; raises CameraError when the process is gone."""
        if self._line is None:
            raise CameraError(f"the camera {self._camera!r} is not open")
        while True:
            try:
                answer = self._line.ask("pictures")
            except DriverError as error:
                raise CameraError(str(error)) from error
            if answer["captured"] > self._last:
                self._last = answer["captured"]
                return Frame(answer["images"][self._camera], answer["captured"])
            time.sleep(0.25 / self.spec.fps)

    def close(self) -> None:
        """Safe to call twice."""
        if self._line is not None:
            self._line.close()
            self._line = None


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
