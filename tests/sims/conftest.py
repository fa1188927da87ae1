"""Environments that are closed after their test."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest

from sims.catalog import make


@pytest.fixture
def build():
    """``make`` whose environments are closed after the test."""
    with ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(closing(make(*given, **options)))
