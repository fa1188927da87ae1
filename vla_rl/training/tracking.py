"""A run folder: resolved config, metrics as JSON lines, checkpoints, summary."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from vla_rl.contract.batch import OneProcess, Reducer
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.trust import check_folder, check_link, mark_file, read_named, write_whole
from vla_rl.experience.lerobot.disk import free_name, lock_folder
from vla_rl.training.checkpoint import (
    latest_shared,
    latest_state,
    newest,
    process_folder,
    read_state,
    require_processes,
    save_shared,
    save_state,
    step_of,
)

LOCK = "run.lock"
_PAUSE = 0.05  # seconds between two looks at a lock
_held: dict[tuple[int, int], int] = {}  # device and inode of a lock file -> descriptor, of this process


def lock_run(folder: Path) -> int:
    """Lock ``folder`` for this process; returns what :func:`unlock_run` needs.

    A lock of this process, or one whose process has died, is taken over.  Raises UserError as ``lock_folder``, and for
    the working folder.
    """
    if folder.resolve() == Path.cwd():
        raise UserError(
            f"{str(folder)!r} is the working folder, which a later run could not move aside, so nothing was run; name "
            "a folder of its own, for example --out runs/first."
        )
    if (own := _held.get(_identity(folder / LOCK))) is not None:
        return own
    descriptor = _held[_identity(folder / LOCK)] = lock_folder(folder, folder / LOCK)
    return descriptor


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode of a file, (0, 0) where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def await_unlocked(folder: Path, patience: float) -> None:
    """Return when no other process holds the lock of ``folder``, or after ``patience`` seconds.

    A process that was killed releases it at once; that of a machine that died on a network disk, when the server
    misses the machine.
    """
    end = time.monotonic() + patience
    while _locked(folder / LOCK) and time.monotonic() < end:
        time.sleep(_PAUSE)


def _locked(path: Path) -> bool:
    """Whether another process has locked the file at ``path``."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def unlock_run(folder: Path, descriptor: int) -> None:
    """Release the lock of ``folder`` and remove its file; safe to call twice."""
    for key, held in list(_held.items()):
        if held == descriptor:
            del _held[key]
            (folder / LOCK).unlink(missing_ok=True)
            os.close(descriptor)


COMMAND = "command.txt"
START = "start"  # the checkpoint that a run keeps of the policy it begins with
_AT_START = (
    "config.json",
    "config_files",
    COMMAND,
    LOCK,
    "tensorboard",
    "wandb",
)  # before anything is recorded


class RunFolder:
    """Everything that one run writes.  A folder that holds an earlier run is moved aside, never overwritten.

    Raises UserError when another process runs in the folder.

    config.json     what was run
    command.txt     the command that began it, and those that prolonged it, a line each
    metrics.jsonl   one object per line: stage, step, seconds since the start, and the metrics
    checkpoints/    folders written by policies
    state/          what resuming needs, see ``training/checkpoint.py`` and ``shared_state.py``
    summary.json    the result

    Metrics also go to the trackers that the config's field ``tracking`` names.
    """

    def __init__(self, path: str | Path, config: Any, group: Reducer | None = None, *, resumed: bool = False) -> None:
        """``path`` is that of the whole run; of several processes, ``group``, each has a folder in it but the first.

        Only the first process has trackers.  ``resumed``: the run that is there goes on, see :meth:`resume`.
        """
        self.run, self.group = Path(path), group or OneProcess()
        self.path = process_folder(self.run, self.group.rank)
        self.config, self.resumed = config, resumed
        names = getattr(config, "tracking", ()) if self.group.rank == 0 else ()
        check_trackers(names)  # before an earlier run is moved
        self._lock = lock_run(self.path)
        self.moved_to = None if resumed else _move_aside(self.path)
        if self.moved_to:
            unlock_run(self.moved_to, self._lock)  # its lock went with it
            self._lock = lock_run(self.path)
        if not resumed:
            write_json(self.path / "config.json", to_json(config))
            mark_file(self.path / "config.json")
        lines = read_metrics(self.path)
        self._start = time.monotonic() - (lines[-1]["elapsed_s"] if lines else 0.0)
        self._trackers = [TRACKERS[name](self.path, to_json(config)) for name in dict.fromkeys(names)]

    @classmethod
    def resume(cls, path: str | Path, group: Reducer | None = None) -> RunFolder:
        """The folder of an unfinished run, to continue it; ``config`` is what was run.  See the constructor.

        Raises UserError when there is no run, or a finished one, or one of another number of processes.
        """
        run, group = Path(path), group or OneProcess()
        config = config_of(run)
        if (run / "summary.json").exists():
            raise UserError(
                f"the run in {str(path)!r} is finished, so there is nothing to go on with; see its summary.json, or "
                "give a larger --rl.loop.iterations or --rl.loop.env-steps."
            )
        require_processes(run, group.size)
        return cls(run, config, group, resumed=True)

    def save_state(self, step: int, state: dict[str, Any]) -> None:
        """Save the training state after ``step``; of several processes, each its own."""
        if self.group.size > 1:
            save_shared(self.run, step, state, self.group)
        else:
            save_state(self.path / "state", step, state)

    def load_state(self, stage: str) -> dict[str, Any] | None:
        """The newest saved state, None when there is none; removes the later metrics of ``stage``."""
        several = self.group.size > 1
        found = latest_shared(self.run, self.group) if several else latest_state(self.path / "state")
        if found is None:
            return None
        step, state = found
        self.keep_metrics(lambda line: line["stage"] != stage or line["step"] <= step)
        return state

    def keep_metrics(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Remove the metrics of what a resumed run does again: every line that is not ``wanted``."""
        kept = "".join(json.dumps(line) + "\n" for line in read_metrics(self.path) if wanted(line))
        path = self.path / "metrics.jsonl"
        if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != kept:  # else a full disk will do
            write_text(path, kept)

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to ``metrics.jsonl``; numbers that are not finite become null.

        Raises ContractError when a metric has the name of one of the line's own entries.
        """
        line = {"stage": stage, "step": step, "elapsed_s": round(self.elapsed, 3)}
        if taken := sorted(line.keys() & metrics):
            raise ContractError(
                f"the metric {taken[0]!r} has the name of an entry that every line has, so the line would be filed "
                "under something else; rename the metric."
            )
        line |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise _write_error(self.path / "metrics.jsonl", error) from error
        for tracker in self._trackers:
            tracker.log(stage, step, metrics)

    def add_command(self, words: Sequence[str]) -> None:
        """Note the command that runs it, if it was one."""
        if words:
            path = self.path / COMMAND
            before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            write_text(path, f"{before}{shlex.join(words)}\n")

    def close(self) -> None:
        """Let the trackers write what they still hold, and unlock the folder; safe to call twice."""
        for tracker in self._trackers:
            tracker.close()
        unlock_run(self.path, self._lock)

    def discard_if_empty(self) -> bool:
        """Remove the folder of a run that failed before it recorded anything; an earlier run gets its name back.

        Returns whether it has.  A copy of the policy that it started from is nothing recorded.
        """
        kept = [path for path in self.path.iterdir() if path.name not in _AT_START]
        recorded = [item for path in kept for item in (path.iterdir() if path.name == "checkpoints" else [path])]
        if self.resumed or any(path.name != START for path in recorded):
            return False
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)
        if self.moved_to is None or self.path.exists():
            return False
        os.replace(self.moved_to, self.path)
        return True

    @property
    def elapsed(self) -> float:
        """Seconds since the start, without the pauses between a stopped run and its going on."""
        return time.monotonic() - self._start

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        return [row for row in read_metrics(self.path) if row["stage"] == stage]

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)


def config_of(run: Path) -> Any:
    """What the run in the folder ``run`` is; raises UserError when there is none."""
    check_folder(run)
    if not (run / "config.json").exists():
        raise UserError(f"{str(run)!r} has no config.json, so there is no run to go on with; name a run folder.")
    try:
        return from_json(read_named(run / "config.json"))
    except ValueError as error:
        raise UserError(
            f"the config.json of {str(run)!r} is damaged ({error}), so the run cannot go on; copy the folder again."
        ) from error


def prolong(run: Path, config: Any, processes: int = 1) -> int:
    """Give the run in ``run``, finished or not, the longer ``config``; returns the step that it goes on from.

    Its summary so far is kept as ``summary.1.json``, ``summary.2.json``, ...  Raises UserError, before anything is
    changed, when another process runs in it, when other than ``processes`` began it, and when it saved no state.
    """
    require_processes(run, processes)
    if (state := newest(run / "state")) is None:
        raise UserError(
            f"the run in {str(run)!r} has saved no state of reinforcement learning, so it cannot go on; start another "
            "from its checkpoint with --policy."
        )
    if processes == 1:  # of several, each has a part
        read_state(state)  # what cannot go on stays as it is
    read_metrics(run)
    lock_run(run)
    summary, kept = run / "summary.json", free_name(run / "summary", ".json")
    if ended := summary.exists():
        os.replace(summary, kept)
    try:
        write_json(run / "config.json", to_json(config))
    except UserError:
        if ended:
            os.replace(kept, summary)
        raise
    mark_file(run / "config.json")
    return step_of(state)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All whole lines of ``metrics.jsonl``; the last one may have been cut off when the process was killed.

    Raises UserError for a damaged line before it.
    """
    path = run / "metrics.jsonl"
    check_link(path, run)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            entry = json.loads(line)
            lines.append({**entry, "stage": entry["stage"], "step": entry["step"]})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"line {number} of {str(path)!r} is damaged ({line[:40]!r}), so the metrics of the run cannot be "
                "read; delete that line."
            ) from error
    return lines


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; raises UserError when the disk is full or the folder cannot be written."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; raises UserError when the disk is full or the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode(), 0o644)
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{str(path)!r} could not be written ({error.strerror}), so the run stopped with what it had saved before; "
        "free some disk space or choose another folder with --out."
    )


def _move_aside(path: Path) -> Path | None:
    """Give an earlier run in ``path`` the first free name ``path.1``, ``path.2``, ...; returns it."""
    if not (path / "config.json").exists():
        return None
    aside = free_name(path)
    os.replace(path, aside)
    return aside


class TensorBoardTracker:
    """Scalars ``stage/name`` in ``RUN/tensorboard``; look at them with ``tensorboard --logdir runs``.

    They are on the disk ten seconds later at most.  A resumed run writes another file beside the first; steps that it
    repeats are there twice.
    """

    package = "tensorboard"

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), flush_secs=10)

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of the project "vla-rl" in ``RUN/wandb``, with the run's config; every stage has its own step axis.

    It is offline unless this machine is logged in (see :func:`wandb_mode`); ``wandb sync`` sends it later.  A resumed
    run continues the one that is in the folder.
    """

    package = "wandb"

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        import wandb

        run.mkdir(parents=True, exist_ok=True)
        before = sorted((run / "wandb").glob("*run-*-*"))
        try:
            self._run = wandb.init(
                project="vla-rl",
                name="/".join(run.resolve().parts[-2:]),
                dir=str(run),
                config=dict(config),
                mode=(mode := wandb_mode()),
                id=before[-1].name.rpartition("-")[2] if before else None,
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases could not begin a run ({error}), so nothing was started; set WANDB_MODE=offline and "
                "send the run later with 'wandb sync', or log in again with 'wandb login'."
            ) from error
        if mode == "offline":
            print(
                f"Weights & Biases is not logged in, so the run stays here; send it: wandb sync {run}/wandb/offline-*"
            )
        self._stages: set[str] = set()

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/step", hidden=True)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        self._run.finish()


def wandb_mode() -> Any:
    """None, which leaves it to ``WANDB_MODE``, when that is set; else "online" where logged in, "offline" elsewhere.

    Nobody is asked, and nothing is sent to find out.
    """
    import wandb

    if os.environ.get("WANDB_MODE"):
        return None
    return "online" if wandb.login(prompt=False, verify=False) else "offline"


Tracker: TypeAlias = TensorBoardTracker | WandbTracker  # for display; ``metrics.jsonl`` is the record
TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a name that is none of ``TRACKERS``, and for a tracker whose library is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"there is no tracker {name!r}, so nothing was started; {did_you_mean(name, TRACKERS)}")
        if importlib.util.find_spec(package := TRACKERS[name].package) is None:
            raise UserError(
                f"the tracker {name!r} needs {package}, which is not installed, so nothing was started; "
                "pip install 'vla-rl[tracking]'."
            )
