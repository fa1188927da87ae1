"""A config that says who reads it, and never comes to an end."""

import os
import time
from pathlib import Path


def sleeps() -> None:
    """The folder of the file SLEEPER gets the process id."""
    Path(os.environ["SLEEPER"]).write_text(str(os.getpid()))
    time.sleep(3600)
