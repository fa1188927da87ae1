"""A config that says who reads it, and is read for a long time."""

import os
import time
from pathlib import Path


def sleeps() -> None:
    """The file SLEEPER gets the process id, and 0 when nobody has ended the process for long."""
    Path(os.environ["SLEEPER"]).write_text(str(os.getpid()))
    time.sleep(100)
    Path(os.environ["SLEEPER"]).write_text("0")
