"""A child process that exchanges wire messages with its owner over its standard input and output.

The owner starts it by a command, with :class:`Child`; the process takes its end by :func:`take_pipes`.  It belongs to
its owner and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, ClassVar

from vla_rl.contract.errors import ContractError, NonFiniteError, UserError, did_you_mean
from vla_rl.contract.wire import (
    MOST_OF_GREETING,
    Arrays,
    PipeStream,
    SharedMemory,
    arrays_in,
    greeted,
    greeting,
    handshake,
    memory_file,
    read_message,
    widen,
    write_message,
)

_GRACE = 5.0  # seconds for a process to end by itself
_TAIL = 1 << 14  # bytes of its last messages that are kept
_LINES = 20  # of them that are shown in an error


_ERRORS = {kind.__name__: kind for kind in (UserError, ContractError, NonFiniteError)}


class ChildError(Exception):
    """The child process is of no more use; the text says what became of it ("was killed by SIGSEGV")."""


class Child:
    """Another process, started at once; the first message waits for it.

    It has a process group of its own, so a terminal's Ctrl-C reaches the owner alone, also while the process is still
    starting.  What it prints to standard error is shown on the owner's, and the last of it is kept.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        name: str = "owner",
        descriptors: Sequence[int] = (),
    ) -> None:
        """``command`` starts the process, for instance with the Python of another virtual environment.

        ``environment`` are its environment variables (None: those of this process), ``name`` introduces the owner, and
        ``descriptors`` are open files that the process inherits under the same numbers.  Raises UserError when the
        command cannot be started.
        """
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, process_group=0, pass_fds=descriptors
            )
        except OSError as error:
            raise UserError(
                f"{command[0]!r} cannot be started ({error}), so its process does nothing; give another Python."
            ) from error
        self.pid = self._process.pid
        assert self._process.stdin and self._process.stdout and self._process.stderr
        ends = [os.dup(end.fileno()) for end in (self._process.stdout, self._process.stdin)]
        self._process.stdout.close()
        self._process.stdin.close()
        self._stream, self._name = PipeStream(*ends), name
        self._greeted, self._introduced = False, False
        self._tail = _Tail(self._process.stderr)

    def fileno(self) -> int:
        """The descriptor that messages arrive on, for those who wait for several things."""
        return self._stream.fileno()

    @property
    def closed(self) -> bool:
        return self._stream.closed

    @property
    def running(self) -> bool:
        return not self.closed and self._ending() is None

    def send(self, message: Any, deadline: float | None = None) -> None:
        """Send ``message`` before ``deadline`` (``time.monotonic``); raises ChildError when that is impossible."""
        with self._until(deadline):
            if not self._introduced:
                write_message(self._stream, greeting(self._name))
                self._introduced = True
            write_message(self._stream, message)

    def receive(self, deadline: float | None = None) -> Any:
        """The next message of the process.

        Raises ChildError when it has ended or is silent until ``deadline``, and ContractError for a process that is no
        vla-rl of this version or mixes other output with its messages.
        """
        with self._until(deadline):
            if not self._greeted:
                greeted(read_message(self._stream, MOST_OF_GREETING), self._name)
                self._greeted = True
            return read_message(self._stream)

    def last_words(self) -> str:
        """The last lines that the process printed to standard error."""
        return self._tail.text()

    def kill(self) -> None:
        """End the process and all that it started at once; safe to call twice, and after ``close``."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes, give the process a moment to end by itself, and end it; safe to call twice."""
        if self.closed:
            return
        self._stream.close()
        self._ending(_GRACE)
        self.kill()  # also what it has started
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel; Python reaps it when it ends
            self._process.wait(_GRACE)
        self._tail.close()

    def _ending(self, patience: float = 0.0) -> os.waitid_result | None:
        """How the process ended, or None if it runs on for ``patience`` seconds.

        It is not reaped, so its number, which is that of its group, is given to no other process before ``close``.
        """
        end = time.monotonic() + patience
        while True:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None or time.monotonic() >= end:
                return ended
            time.sleep(0.002)

    @contextlib.contextmanager
    def _until(self, deadline: float | None) -> Iterator[None]:
        if self.closed:
            raise ChildError("was closed")
        self._stream.deadline = deadline
        try:
            yield
        except TimeoutError as error:
            raise ChildError("did not answer in time") from error
        except (EOFError, OSError) as error:
            raise ChildError(self._fate()) from error

    def _fate(self) -> str:
        ended = self._ending(_GRACE)
        if ended is None:
            return "stopped answering"
        self._tail.wait()
        code = ended.si_status
        return f"ended with exit code {code}" if ended.si_code == os.CLD_EXITED else f"was killed by {_signal(code)}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


class _Tail:
    """Shows what a process prints, as it comes, and keeps the last of it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._kept = stream, b""
        self._thread = threading.Thread(target=self._copy, name="stderr", daemon=True)
        self._thread.start()

    def text(self) -> str:
        lines = self._kept.decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_LINES:])

    def wait(self) -> None:
        """Until the last word; not for ever, as another process may hold the stream open."""
        self._thread.join(_GRACE)

    def close(self) -> None:
        self.wait()
        if not self._thread.is_alive():
            self._stream.close()

    def _copy(self) -> None:
        while piece := os.read(self._stream.fileno(), _TAIL):
            self._kept = (self._kept + piece)[-_TAIL:]
            with contextlib.suppress(OSError):  # nobody looks at this program any more
                os.write(2, piece)


class SharingChild(Child):
    """A process of this machine that gets requests and answers with arrays in shared memory: :class:`Answering`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, name: str = "owner"
    ) -> None:
        request, *answers = files = [memory_file() for _ in range(3)]
        try:
            super().__init__(command, environment, name, files)
        except BaseException:
            for file in files:
                os.close(file)
            raise
        self._memory = SharedMemory([request], answers)
        self._files: dict[str, Any] | None = {"inbox": [request], "outbox": answers}

    def send(self, message: Mapping[str, Any], deadline: float | None = None) -> None:
        """Send a request, with its arrays {name: array} as ``arrays``."""
        files, self._files = {"memory": self._files} if self._files else {}, None
        arrays = {"arrays": self._memory.put(message["arrays"])} if message["arrays"] else {}
        fields = {name: item for name, item in message.items() if name != "arrays"}
        super().send({**fields, **files, **arrays}, deadline)

    def receive(self, deadline: float | None = None) -> tuple[dict[str, Any], Arrays]:
        """The answer and its arrays, which the answer after the next one overwrites."""
        return read_answer(super().receive(deadline), self._memory.get)

    def close(self) -> None:
        super().close()
        self._memory.close()


def read_answer(answer: Any, get: Callable[[Any], Arrays]) -> tuple[dict[str, Any], Arrays]:
    """The fields and arrays of a process's ``answer``; raises ChildError for one that makes no sense."""
    if not isinstance(answer, dict):
        raise ChildError(f"answered with a {type(answer).__name__}")
    try:
        return answer, get(answer.pop("arrays")) if "arrays" in answer else {}
    except ContractError as error:
        raise ChildError(f"answered with arrays that cannot be read ({error})") from error


# -- the other process -------------------------------------------------------------------------------------------------


class Answering:
    """Answers requests by the methods ``does``; each has a name, JSON fields and arrays, and so has its answer.

    Such a method returns both, its fields and its arrays.  The first request may hold the shared files (``memory``).
    """

    does: ClassVar[tuple[str, ...]]
    who: ClassVar[str]  # for errors that are not ours

    def __init__(self) -> None:
        self.memory: SharedMemory | None = None  # None: arrays travel in messages

    def answer(self, request: dict[str, Any], writer: IO[bytes] | None = None) -> dict[str, Any]:
        """What ``request`` asks for, or the error that came up."""
        try:
            what, arrays, files = str(request.pop("do")), request.pop("arrays", None), request.pop("memory", None)
            if files is not None:
                self.memory = SharedMemory(files["outbox"], files["inbox"])
            if what not in self.does:
                raise ContractError(
                    f"a worker cannot do {what!r}, so nothing was done; {did_you_mean(what, self.does)}"
                )
            given = {} if arrays is None else self.memory.get(arrays) if self.memory else arrays_in(arrays)
            fields, found = getattr(self, what)(**request, **given)
            return {**fields, "arrays": self.memory.put(found) if self.memory else found}
        except Exception as error:
            return error_answer(error, self.who)


def serve_owner(name: str, answer: Callable[[Any, IO[bytes]], Any]) -> None:
    """Answer the owner's messages by ``answer(message, writer)`` until it closes the pipes, and end this process.

    ``name`` introduces this process.  What ``answer`` returns is the answer; it may write other messages before.
    """
    reader, writer = take_pipes()
    try:
        handshake(reader, writer, name)
        while True:
            write_message(writer, answer(read_message(reader), writer))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the owner is gone: nobody waits for what libraries still want to say
    except ContractError as error:
        sys.exit(str(error))


def error_answer(error: Exception, who: str) -> dict[str, str]:
    """The answer that lets the owner raise ``error`` by :func:`error_of`; ``who`` failed, if the error is not ours."""
    kind = next((name for name, item in reversed(_ERRORS.items()) if isinstance(error, item)), "")
    if kind:
        return {"error": str(error), "kind": kind}
    traceback.print_exception(error)
    last = traceback.format_exception_only(error)[-1].strip()
    return {"error": f"{who} failed: {last}; the whole traceback is above.", "kind": ""}


def error_of(answer: Mapping[str, Any]) -> UserError:
    """The error in ``answer``, of its own class if that is one of ours."""
    return _ERRORS.get(answer["kind"], UserError)(answer["error"])


def take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Take stdin and stdout for messages, as :func:`claim_pipes` does, and end this process when the owner is gone.

    It ends then also in the middle of its work.
    """
    reader, writer = (os.fdopen(end, mode) for end, mode in zip(claim_pipes(), ("rb", "wb"), strict=True))
    threading.Thread(target=_end_with, args=(reader.fileno(),), name="owner", daemon=True).start()
    return reader, writer


def claim_pipes() -> tuple[int, int]:
    """What were stdin and stdout, for messages: other code prints to stderr and reads an empty stdin.

    Signals that reach all processes of a job are ignored, since the owner decides.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ends = os.dup(0), os.dup(1)
    for end in ends:
        widen(end)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return ends


def end_with_owner() -> None:
    """End this process, also in the middle of its work, when the other end of its standard input is closed.

    Other code reads an empty standard input.
    """
    owner, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True).start()


def _end_with(pipe: int) -> None:
    """End this process when the other end of ``pipe`` is closed; if it leads a group, also all that it started."""
    poll = select.poll()
    poll.register(pipe, 0)  # hang-ups are always reported
    while not any(event & select.POLLHUP for _, event in poll.poll()):
        pass
    if os.getpgrp() == os.getpid():  # nobody else is left to end them
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
