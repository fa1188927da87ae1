"""The learner of a fleet as the server's child: it gets the ledger's records, and says how it goes.

It is a process of its own, so that its memory, its libraries and its mistakes cannot stop what robots send from being
stored.  Its end is an alarm on the page, and it is started again.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO

from vla_rl.fleet import feed
from vla_rl.fleet.backoff import Backoff, BackoffOptions
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.status import Status

log = logging.getLogger("vla_rl.fleet")
PATIENCE_S = 60.0  # at the end, for the learner to save its state
_STEADY_S = 60.0  # a learner that ran for so long is started again at once
_MAX_LINE = 1 << 16


class LearnerProcess:
    """Keeps ``command`` running until :meth:`close`.

    It reads records from its standard input (``feed.received``) and ends when that ends.  Each line of its standard
    output is JSON: ``{"alarm": sentence}``, or ``{"learner": {name: number}}`` for the page.
    """

    def __init__(self, command: Sequence[str], ledger: Ledger, status: Status) -> None:
        self._command, self._ledger, self._status = command, ledger, status
        self._ending = threading.Event()
        self._backoff = Backoff(BackoffOptions(), random.Random())
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="fleet-learner", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def close(self) -> None:
        """Let the learner save its state and end; safe to call twice."""
        self._ending.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                how = self._run()
            except (OSError, RuntimeError) as error:  # files, memory or threads ran out
                how = str(error)
            if self._ending.is_set():
                return
            if time.monotonic() - began > _STEADY_S:
                self._backoff.reset()
            wait = self._backoff.next()
            sentence = (
                f"the learner ended ({how}) and is started again; nothing is learnt until it says how far it is, and "
                "what robots send is stored meanwhile: the server's log says why it ended."
            )
            log.error("%s", sentence)
            self._status.standing("learner", sentence)
            self._status.alarm(f"the learner ended ({how}) and was started again; the server's log says why.")
            self._ending.wait(wait)

    def _run(self) -> str:
        """One life of the process; returns how it ended."""
        # Ctrl-C is for the server, which then lets the learner save its state.
        pipe = subprocess.PIPE
        with subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
            self._process = process
            assert process.stdin is not None and process.stdout is not None
            over = threading.Event()
            feeding = threading.Thread(target=self._feed, args=(process.stdin, over), name="fleet-feed", daemon=True)
            hearing = threading.Thread(target=self._hear, args=(process.stdout,), name="fleet-hear", daemon=True)
            feeding.start()
            hearing.start()
            while process.poll() is None and not self._ending.wait(0.05):
                pass
            over.set()
            self._end(process)
            feeding.join()
            hearing.join()
            return f"exit code {process.returncode}"

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(PATIENCE_S)  # its input ends
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            log.warning(
                "the learner did not end within %g s and was killed; it goes on from its last state", PATIENCE_S
            )

    def _feed(self, pipe: BinaryIO, over: threading.Event) -> None:
        with suppress(OSError):  # it is gone, which is told by its exit code
            feed.send(self._ledger, pipe, over)
        with suppress(OSError):
            pipe.close()

    def _hear(self, pipe: BinaryIO) -> None:
        while line := pipe.readline(_MAX_LINE):
            try:
                said = json.loads(line)
                if "alarm" in said:
                    log.warning("%s", said["alarm"])  # a page that ends is read no more
                    self._status.alarm(str(said["alarm"]))
                else:
                    self._status.standing("learner", "")
                    self._status.learner({str(name): float(value) for name, value in said["learner"].items()})
            except (ValueError, TypeError, KeyError, AttributeError):
                log.warning("the learner says %r, which is no message", line[:200])
