"""One acting process for all tests that leave it alive: it takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_rl.experience.worker import COMMAND, Pipes, Worker

ROOT = str(Path(__file__).resolve().parents[2])


def started() -> Worker:
    """A process that imports this copy, with a variable of its own."""
    return Worker(Pipes(COMMAND, {**os.environ, "PYTHONPATH": ROOT, "OF_ITS_OWN": "yes"}))


@pytest.fixture(scope="session")
def shared() -> Iterator[Worker]:
    with started() as worker:
        yield worker


@pytest.fixture
def mortal() -> Iterator[Worker]:
    """A process for one test, which ends it."""
    with started() as worker:
        yield worker
