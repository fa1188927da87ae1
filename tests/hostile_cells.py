"""``python -m tests.hostile_cells``: run commands on hostile folders, each in a fork, and tell what each did.

Reads one JSON object a line, ``{"folder": name, "command": [...], "place": folder}``, and answers with one:
``status``, ``said`` (its output), ``peak`` (bytes) and ``did`` (what it must not: touched files outside, programs,
addresses).  Every folder lies in ``place/theirs``; what it may lead to is in ``place/outside``, which the kernel
watches, so that no library and no child process can touch it unseen.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile import CHECKPOINTS, RUNS, Make
from tests.hostile_data import DATASETS, FLEETS, PUBLIC, ROBOTS, SIZES, TRACES, honest_dataset

KINDS: dict[str, dict[str, Make]] = {
    "checkpoint": CHECKPOINTS,
    "run": RUNS,
    "dataset": DATASETS,
    "robot": ROBOTS,
    "fleet": FLEETS,
    "public": PUBLIC,
    "trace": TRACES,
    "size": SIZES,
}
SECONDS = 60  # of CPU
SERVICE_S = 3.0  # after which what would serve for ever gets Ctrl-C
SERVICES = ("serve", "serve-policy", "play")
_WATCHED = 0x20 | 0x02 | 0x100 | 0x200 | 0x40 | 0x80  # IN_OPEN, MODIFY, CREATE, DELETE, MOVED
_MODULES = (  # imported before the first fork
    *(
        f"vla_rl.cli.{name}"
        for name in ["eval", "inspect", "train", "robot", "fleet", "fleet_policies", "imagine", "serve", "serve_policy"]
    ),
    *(f"vla_rl.cli.{name}" for name in ["collect", "certs", "sims", "compare", "few", "demo"]),
    *(
        f"vla_rl.recipes.{name}"
        for name in ["imitate_dataset", "state_ppo", "robots.drive", "fleet.publishing", "fleet.export"]
    ),
    "vla_rl.experience.lerobot.translate",
    "vla_rl.policies.smolvla.policy",
    "robot_drivers.setup",
    "robot_drivers.check",
)


def folder_name(kind: str, name: str) -> str:
    """How a cell names a folder."""
    return f"{kind}: {name}"


def all_folders() -> Iterator[str]:
    for kind, makes in KINDS.items():
        yield from (folder_name(kind, name) for name in makes)


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Make the folder in one process, run the command in another."""
    place = Path(cell["place"])
    outside = place / "outside"
    for name in ("work", "outside", "state", "maker"):
        (place / name).mkdir(parents=True)
    for name in ("canary.secret", "secret.parquet", "secret.mp4", "secret.json", "secret.lock"):
        (outside / name).write_text("{}")
    kind, _, name = cell["folder"].partition(": ")
    theirs = place / ("theirs.json" if kind == "robot" else "theirs")
    status, said, _ = _forked(place, lambda: KINDS[kind][name](theirs, outside / "canary"), "maker")
    if status:
        return {"status": -1, "said": f"could not be made: {said}", "peak": 0, "did": []}
    command = [str(theirs) if word == "FOLDER" else word for word in cell["command"]]
    with _Watch(outside) as watch:
        status, said, peak = _forked(place, lambda: _command(command, place), "state")
        touched = watch.seen()
    did = [line.removeprefix("AUDIT ") for line in said.splitlines() if line.startswith("AUDIT ")]
    return {"status": status, "said": said, "peak": peak, "did": did + [f"touched outside/{one}" for one in touched]}


def _forked(place: Path, do: Any, state: str) -> tuple[int, str, int]:
    """Status, output and peak memory of ``do`` in a fork, whose children end with it."""
    output = place / f"{state}.txt"
    child = os.fork()
    if not child:
        try:
            os.setsid()
            end = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(end, 1), os.dup2(end, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ["XDG_STATE_HOME"] = os.environ["TMPDIR"] = str(place / state)
            os.chdir(place / "work")
            do()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 70
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    _, ended, used = os.wait4(child, 0)
    for _ in range(2):
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            break
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended), output.read_text(errors="replace"), 1024 * used.ru_maxrss


def _command(command: list[str], place: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 30), size + (6 << 30)))
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, SERVICE_S if set(SERVICES) & set(command) else 2 * SECONDS)
    sys.addaudithook(_audit(place))
    from vla_rl.cli.main import main

    main(command)


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
    """The kernel's word on who touches a folder (``inotify``)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> _Watch:
        libc = ctypes.CDLL(None, use_errno=True)
        self._end = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._end >= 0
        for path in (self._folder, *(one for one in self._folder.rglob("*") if one.is_dir())):
            assert libc.inotify_add_watch(self._end, os.fsencode(path), _WATCHED) >= 0
        return self

    def seen(self) -> list[str]:
        """Names that were touched."""
        names = set()
        try:
            data = os.read(self._end, 1 << 16)
        except BlockingIOError:
            return []
        while data:
            _, mask, _, length = struct.unpack("iIII", data[:16])
            names.add(f"{data[16 : 16 + length].rstrip(bytes(1)).decode()} ({mask:#x})")
            data = data[16 + length :]
        return sorted(names)

    def __exit__(self, *_: object) -> None:
        os.close(self._end)


def main() -> None:
    """Answer cells until standard input ends."""
    for name in _MODULES:
        importlib.import_module(name)
    honest_dataset()
    gc.freeze()  # memory stays shared with the forks
    for line in sys.stdin:
        print(json.dumps(run_cell(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
