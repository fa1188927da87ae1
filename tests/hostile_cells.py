"""``python -m tests.hostile_cells``: run commands on hostile folders, in forks, and tell what each did.

Reads one JSON object a line, ``{"place": folder, "cells": [{"folder": name, "command": [...]}, ...]}``, and answers
with a list: ``status``, ``said`` (its output), ``seconds``, ``peak`` (bytes, of all) and ``did`` (what it must not:
touched files outside, programs, addresses).  Every folder lies in ``theirs``; what it may lead to is in ``outside``
beside it, which the kernel watches, so that no library and no child process can touch it unseen.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import math
import os
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.hostile import CHECKPOINTS, RUNS, Make
from tests.hostile_data import CERTIFICATES, DATASETS, FILLED, FLEETS, PUBLIC, ROBOTS, SIZES, TRACES, honest_dataset
from vla_rl.contract import trust

KINDS: dict[str, dict[str, Make]] = {
    "checkpoint": CHECKPOINTS,
    "run": RUNS,
    "dataset": DATASETS,
    "robot": ROBOTS,
    "fleet": FLEETS,
    "public": PUBLIC,
    "trace": TRACES,
    "size": SIZES,
    "certificates": CERTIFICATES,
    "filled": FILLED,
}
SECONDS = 60  # of CPU
TICK_S, AGAIN_S = 0.2, 4.0
SERVES = b"Ctrl-C ends it"  # said by what would serve for ever
_WATCHED = 0x20 | 0x02 | 0x100 | 0x200 | 0x40 | 0x80  # IN_OPEN, MODIFY, CREATE, DELETE, MOVED
_MODULES = (  # imported before the first fork
    *(f"vla_rl.cli.{name}" for name in ["eval", "inspect", "train", "robot", "fleet", "imagine", "serve_policy"]),
    *(
        f"vla_rl.recipes.{name}"
        for name in ["imitate_dataset", "improve", "robots.drive", "fleet.publishing", "fleet.export"]
    ),
    "vla_rl.experience.lerobot.reader",
    "vla_rl.policies.smolvla.policy",
    "robot_drivers.setup",
    "robot_drivers.check",
)


def folder_name(kind: str, name: str) -> str:
    """How a cell names a folder."""
    return f"{kind}: {name}"


def run_cells(cells: list[dict[str, Any]], place: Path) -> list[dict[str, Any]]:
    """Make all folders in one process, run the commands in another, one after the other."""
    places = [place / str(number) for number in range(len(cells))]
    for one in places:
        for name in ("work", "outside", "state", "maker"):
            (one / name).mkdir(parents=True)
        for name in ("canary.secret", "secret.parquet", "secret.mp4", "secret.json", "secret.lock"):
            (one / "outside" / name).write_text("{}")
    failed, _ = _forked([partial(_make, cell["folder"], one) for cell, one in zip(cells, places, strict=True)], places)
    assert not any(status for status, _ in failed), [(one / "said").read_text() for one in places]
    with _Watch([one / "outside" for one in places]) as watch:
        ended, peak = _forked([partial(_command, cell, one) for cell, one in zip(cells, places, strict=True)], places)
        touched = watch.seen()
    results = []
    for one, (status, seconds), names in zip(places, ended, touched, strict=True):
        said = (one / "said").read_text(errors="replace")
        did = [line.removeprefix("AUDIT ") for line in said.splitlines() if line.startswith("AUDIT ")]
        did += [f"touched outside/{name}" for name in names]
        results.append({"status": status, "said": said, "seconds": seconds, "peak": peak, "did": did})
    return results


def _forked(work: list[Callable[[], None]], places: list[Path]) -> tuple[list[tuple[int, float]], int]:
    """Statuses and seconds, and the peak memory of all ``work`` in a fork, whose children end with it.

    Output is in the file "said".
    """
    child = os.fork()
    if not child:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for do, place in zip(work, places, strict=True):
            began = time.monotonic()
            status = _status_of(do, place)
            (place / "status").write_text(json.dumps([status, time.monotonic() - began]))
        os._exit(0)
    _, ended, used = os.wait4(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    whole = os.waitstatus_to_exitcode(ended)
    found = [one / "status" for one in places]
    results = [tuple(json.loads(one.read_text())) if one.exists() else (whole or 70, 0.0) for one in found]
    for one in found:
        one.unlink(missing_ok=True)
    return results, 1024 * used.ru_maxrss


def _status_of(do: Callable[[], None], place: Path) -> int:
    with (place / "said").open("wb") as output:
        os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
    os.chdir(place / "work")
    trust._accepted.clear(), trust._all.clear()
    path, known = list(sys.path), set(sys.modules)
    try:
        do()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException:
        traceback.print_exc()
        status = 70
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.flush(), sys.stderr.flush()
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if name.startswith(("theirs", "vla_rl_config_")):
            del sys.modules[name]
    return status


def _theirs(folder: str, place: Path) -> Path:
    return place / ("theirs.json" if folder.startswith("robot") else "theirs")


def _make(folder: str, place: Path) -> None:
    os.environ["XDG_STATE_HOME"] = os.environ["TMPDIR"] = str(place / "maker")
    kind, _, name = folder.partition(": ")
    KINDS[kind][name](_theirs(folder, place), place / "outside" / "canary")


def _command(cell: dict[str, Any], place: Path) -> None:
    os.environ["XDG_STATE_HOME"] = os.environ["TMPDIR"] = str(place / "state")
    command = [word.replace("FOLDER", str(_theirs(cell["folder"], place))) for word in cell["command"]]
    used = math.ceil(time.process_time()) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (used, resource.RLIM_INFINITY))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 30), resource.RLIM_INFINITY))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
    signal.signal(signal.SIGALRM, partial(_tick, place / "said", time.monotonic() + 2 * SECONDS))
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    if not _watched:
        sys.addaudithook(_audit(place.parent))
        _watched.append(True)
    from vla_rl.cli import main

    main(command)


def _tick(said: Path, end: float, *_: object) -> None:
    """Ctrl-C for what serves and says nothing new, and what takes too long; again, since one may be swallowed."""
    now, quiet = time.monotonic(), time.time() - said.stat().st_mtime
    if now > end + SECONDS:
        os._exit(70)
    if now > end or (quiet > 2 * TICK_S and SERVES in said.read_bytes()[-4096:]):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
        signal.raise_signal(signal.SIGINT)


_watched: list[bool] = []


def _audit(place: Path) -> Any:
    """Says which programs are started, which addresses connected to, what is written elsewhere than in ``place``."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        what = ""
        if event in ("subprocess.Popen", "os.exec", "os.posix_spawn") and str(args[0]) not in _PROGRAMS:
            what = f"started {args[0]!r}"
        elif event == "os.system":
            what = f"ran {args[0]!r}"
        elif event == "socket.connect" and not _here(args[1]):
            what = f"connected to {args[1]!r}"
        elif event == "open" and isinstance(args[0], str) and _writes(args) and not _allowed(args[0], place):
            what = f"wrote {args[0]!r}"
        if what:
            os.write(2, f"AUDIT {what}\n".encode())

    return hook


_PROGRAMS = (sys.executable, "/sbin/ldconfig", "ldconfig", "/bin/sh", "uname")


def _here(address: Any) -> bool:
    return isinstance(address, str | bytes) or str(address[0]).startswith("127.") or address[0] in ("localhost", "::1")


def _writes(args: tuple[Any, ...]) -> bool:
    flags = args[2] if len(args) > 2 and isinstance(args[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


def _allowed(path: str, place: Path) -> bool:
    found = os.path.realpath(path)
    return found.startswith((str(place.resolve()), "/dev/", "/proc/")) or "__pycache__" in found


class _Watch:
    """The kernel's word on who touches what in ``folders`` (``inotify``)."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._numbers: dict[int, int] = {}  # of watches -> of folders

    def __enter__(self) -> _Watch:
        libc = ctypes.CDLL(None, use_errno=True)
        self._end = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._end >= 0
        for number, folder in enumerate(self._folders):
            for path in (folder, *(one for one in folder.rglob("*") if one.is_dir())):
                watch = libc.inotify_add_watch(self._end, os.fsencode(path), _WATCHED)
                assert watch >= 0
                self._numbers[watch] = number
        return self

    def seen(self) -> list[list[str]]:
        """Names that were touched, of each folder."""
        names: list[set[str]] = [set() for _ in self._folders]
        try:
            data = os.read(self._end, 1 << 20)
        except BlockingIOError:
            data = b""
        while data:
            watch, mask, _, length = struct.unpack("iIII", data[:16])
            if watch in self._numbers:
                name = data[16 : 16 + length].rstrip(bytes(1)).decode()
                names[self._numbers[watch]].add(f"{name} ({mask:#x})")
            data = data[16 + length :]
        return [sorted(one) for one in names]

    def __exit__(self, *_: object) -> None:
        os.close(self._end)


def main() -> None:
    """Answer cells until standard input ends."""
    for name in _MODULES:
        importlib.import_module(name)
    honest_dataset()
    gc.freeze()  # memory stays shared with the forks
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run_cells(request["cells"], Path(request["place"]))), flush=True)


if __name__ == "__main__":
    main()
