"""Where the processes write what they have to say."""

from __future__ import annotations

import logging
import os
from pathlib import Path


def quiet(folder: Path) -> None:
    """What the process says goes into a file beside its folder."""
    os.environ["GRPC_VERBOSITY"] = "NONE"
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(message)s")
