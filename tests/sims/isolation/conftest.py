"""Workers of these tests import this copy of vla-rl."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def workers_import_this_copy(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
