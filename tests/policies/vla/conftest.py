"""The toy family is known while these tests run."""

from __future__ import annotations

import pytest

from tests.policies.vla.toy_family import TARGET
from vla_rl.policies.vla.checkpoint import FAMILIES


@pytest.fixture(autouse=True)
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", TARGET)
