"""The simulated robot as a process of its own, which keeps real time whoever else lives or dies.

    python -m robot_drivers.simulated robot.json

It holds its last target when nobody commands it and goes on simulating.  Any number of clients connect to its Unix
socket: one that drives the arm (:class:`SimulatedArm`), others that look through its cameras.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

import numpy as np

from robot_drivers.cameras.camera import CameraError, CameraSpec, Frame
from robot_drivers.driver import DriverError, Measurement
from robot_drivers.simulated import SO101, Hardware, Imperfections, Simulated, env_spec_of, robot_spec
from vla_rl.contract.child import end_with_owner
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.trust import OPTION, parse_json, read_bytes, require_own, trust_all
from vla_rl.contract.wire import SocketStream, handshake, read_message, write_message

NAME = "simulated robot"
_MAX_BYTES = 1 << 20  # of a request


@dataclass(frozen=True)
class ProcessConfig:
    """What its file says.

    address  path of the Unix socket, which is made
    record   file for what the hardware saw, one JSON object a line; none if empty: every command with the time of its
             arrival and what was sent on, every control step with its time, target and true position
    """

    address: str
    robot: Simulated = field(default_factory=Simulated)
    imperfections: Imperfections = field(default_factory=Imperfections)
    record: str = ""


class Server:
    """One simulated robot and its clients; each client has a thread, so none waits for another."""

    def __init__(self, config: ProcessConfig) -> None:
        self._hardware = Hardware(config.robot, config.imperfections)
        self._lock = threading.Lock()
        # OpenGL belongs to one thread, which begins the episodes that clients ask for.
        self._resets: SimpleQueue[tuple[int, Future[None]]] = SimpleQueue()
        self._record: TextIO | None = open(config.record, "a", buffering=1) if config.record else None  # noqa: SIM115
        self._listener = socket.socket(socket.AF_UNIX)
        place = Path(config.address)
        if place.is_socket():  # of one that was killed
            place.unlink()
        self._listener.bind(config.address)
        self._listener.listen()

    def run(self) -> None:
        """Simulate until the process ends."""
        due = time.monotonic()
        self._hardware.reset(0, due)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        while True:
            with self._lock:
                while not self._resets.empty():
                    self._begin(*self._resets.get(), due)
                self._hardware.tick(due)
                position = self._hardware.truth().state[0]
                self._note(time=due, target=self._hardware.target, position=position, outcome=self._hardware.outcome)
            due = max(due + self._hardware.dt, time.monotonic() - self._hardware.dt)  # a stall is not caught up with
            time.sleep(max(0.0, due - time.monotonic()))

    def _begin(self, seed: int, begun: Future[None], now: float) -> None:
        try:
            self._hardware.reset(seed, now)
            begun.set_result(None)
        except UserError as error:
            begun.set_exception(error)

    def _accept(self) -> None:
        while True:
            connected, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(SocketStream(connected),), daemon=True).start()

    def _serve(self, stream: SocketStream) -> None:
        """Answer one client until it leaves; what it sends cannot harm the others."""
        with contextlib.closing(stream), contextlib.suppress(OSError, EOFError, ContractError):
            handshake(stream, stream, NAME)
            while True:
                write_message(stream, self._answer(read_message(stream, _MAX_BYTES)))

    def _answer(self, request: Any) -> dict[str, Any]:
        now = time.monotonic()
        try:
            match request:
                case {"ask": "reset", "seed": int(seed)}:
                    begun: Future[None] = Future()
                    self._resets.put((seed, begun))
                    begun.result()
                    return {}
            with self._lock:
                return self._do(request, now)
        except DriverError as error:
            return {"silent": str(error)}
        except UserError as error:
            return {"refused": str(error)}

    def _do(self, request: Any, now: float) -> dict[str, Any]:
        hardware = self._hardware
        match request:
            case {"ask": "command", "position": position}:
                sent = hardware.command(np.asarray(position), now)
                self._note(time=now, command=np.asarray(position), sent=sent)
                return {"sent": sent}
            case {"ask": "observe"}:
                measured, captured = hardware.measured(now)
                return {"position": measured, "captured": captured}
            case {"ask": "pictures"}:
                images, captured = hardware.pictures(now)
                return {"images": images, "captured": captured}
            case {"ask": "outcome"}:
                return {"outcome": hardware.outcome}
        raise ContractError(
            f"the simulated robot cannot do {str(request)[:80]!r}, so nothing was done; ask for command, observe, "
            "pictures, reset or outcome."
        )

    def _note(self, **entries: Any) -> None:
        if self._record is not None:
            plain = {name: np.asarray(value).tolist() for name, value in entries.items()}
            self._record.write(json.dumps(plain) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Run the robot of the file ``arguments[0]``; with ``--owned`` only until standard input is closed.

    ``--trust``: also that of a file which somebody else wrote, and which names an environment or a file.
    """
    if not arguments:
        sys.exit("Usage: python -m robot_drivers.simulated robot.json")
    if OPTION in arguments:
        trust_all()
    try:
        config = read_own(Path(arguments[0]))
    except UserError as error:
        sys.exit(f"simulated robot: {error}")
    server = Server(config)
    if "--owned" in arguments:
        end_with_owner()
    print(json.dumps({"address": config.address}), flush=True)
    server.run()
    return 0


def read_own(file: Path) -> ProcessConfig:
    """The config in ``file``.

    Raises UserError where it has no address or what nobody knows, and where it names code or a record of somebody else.
    """
    kinds = {"robot": Simulated, "imperfections": Imperfections}
    try:
        data = read_bytes(file)
        given = parse_json(data)
        parts = {name: kind(**given[name]) for name, kind in kinds.items() if name in given}
        config = ProcessConfig(**{**given, **parts})
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"the simulated robot's file {str(file)!r} cannot be read ({error}), so nothing was started; correct it: "
            "it has address, and may have robot, imperfections and record."
        ) from error
    if config.record or config.robot != Simulated():
        require_own(data, f"{str(file)!r} names an environment or a file")
    return config


_PATIENCE = 2.0  # seconds for an answer


class _Line:
    """A connection to the process at ``address``."""

    def __init__(self, address: str, name: str) -> None:
        """Raises DriverError when nobody listens there."""
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(address)
            self._stream = SocketStream(connected)
            self._stream.deadline = time.monotonic() + _PATIENCE
            handshake(self._stream, self._stream, name)
        except (OSError, EOFError) as error:
            raise DriverError(f"no simulated robot answers at {address} ({error})") from error

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
    """The arm of a simulated robot's process (``RobotDriver``, ``Resets``)."""

    def __init__(
        self, address: str, env: str = SO101, options: Mapping[str, Any] | None = None, **motors: float
    ) -> None:
        """``address`` of the process; the rest says what it simulates, as for ``SimulatedRobot``."""
        simulated = Simulated(env, options or {}, **motors)
        self._address, self.spec = address, robot_spec(simulated, env_spec_of(simulated))
        self._line: _Line | None = None

    @property
    def is_connected(self) -> bool:
        return self._line is not None

    def connect(self) -> None:
        """Raises UserError when the process does not answer."""
        if self._line is None:
            try:
                self._line = _Line(self._address, "driver")
            except DriverError as error:
                raise UserError(
                    f"{error}, so there is no arm; start one with 'python -m robot_drivers.simulated robot.json'."
                ) from error

    def observe(self) -> Measurement:
        answer = self._connected.ask("observe")
        return Measurement(answer["position"], None, answer["captured"])

    def command(self, position: np.ndarray) -> np.ndarray:
        """Send a target [D]; returns it within the joints' limits.  The arm holds it until the next one."""
        return self._connected.ask("command", position=np.asarray(position, np.float64))["sent"]

    def reset(self, seed: int) -> None:
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
        except DriverError as error:
            raise CameraError(str(error)) from error

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
        if self._line is not None:
            self._line.close()
            self._line = None
