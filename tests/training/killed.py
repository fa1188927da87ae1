"""``python -m tests.training.killed STEP ARGUMENTS``: vla-rl, of which process 1 is killed when it has saved STEP."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from vla_rl.cli import main
from vla_rl.training import checkpoint


def kill_after(step: int) -> None:
    """The process that writes its part of the state of ``step`` does nothing after it; process 0 writes last."""
    write = checkpoint.write_state

    def written(folder: Any, at: int, *given: Any) -> None:
        write(folder, at, *given)
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.write_state = written


if __name__ == "__main__":
    kill_after(int(sys.argv[1]))
    main(sys.argv[2:])
