"""``python -m tests.mutants.warm``: run tests of the copy that it stands in, in forks that need not import torch again.

Reads a line of JSON a run, ``{"tests": [ids], "patience": seconds}``, and answers with one,
``{"code": ..., "output": ...}``; the code is that of pytest, null for tests that did not end.  Nothing of ours is
imported before the fork, so that every run has the files as they are then.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

_OTHERS = (
    *("av", "cryptography.x509", "google.protobuf", "grpc", "gymnasium", "hypothesis", "msgpack", "mujoco", "numpy"),
    *("PIL.Image", "pyarrow.parquet", "pytest", "rich.progress", "safetensors.torch", "scipy.stats", "torch"),
    *("torch.distributed", "torch.optim", "tyro"),
)
_FLAGS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "mutants_sentinel", "--tb=short", "-m", "")
_TICK = 0.02  # s


def main() -> None:
    for name in _OTHERS:
        with suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        code, output = _run(asked["tests"], asked["patience"])
        print(json.dumps({"code": code, "output": output}), flush=True)


def _run(tests: Sequence[str], patience: float) -> tuple[int | None, str]:
    with tempfile.TemporaryFile("w+b") as said:
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            import pytest

            code = int(pytest.main([*_FLAGS, *tests]))
            sys.stdout.flush()
            os._exit(code)
        end, status = time.monotonic() + patience, None
        while status is None and time.monotonic() < end:
            ended, found = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(found) if ended else None
            time.sleep(0 if ended else _TICK)
        with suppress(ProcessLookupError):  # what it has started ends with it
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
        said.seek(0)
        return status, said.read().decode(errors="replace")


if __name__ == "__main__":
    main()
