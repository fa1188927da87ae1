"""The vla-eval harness and openpi's client, installed apart from everything else."""

from __future__ import annotations

import sys

import pytest

from tests.docs.conftest import ROOT

HARNESS = ROOT / ".cache" / "harness"


@pytest.fixture(scope="session")
def harness() -> None:
    """``vla_eval`` and ``openpi_client`` can be imported; where they lack, the test fails and is not skipped."""
    if not (HARNESS / "vla_eval").is_dir():
        pytest.fail(f"the vla-eval harness is not in {HARNESS}; run: make install")
    if str(HARNESS) not in sys.path:
        sys.path.append(str(HARNESS))  # last, so that what is installed beside it comes first
