"""The generated code is that of fleet.proto."""

from __future__ import annotations

import pytest

from tests.fleet.generate import GENERATED, generate
from tests.test_layout import ROOT


def test_generating_again_changes_nothing(tmp_path):
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, which the extra dev brings")
    generate(tmp_path)
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), (
            f"{name} is old: python -m tests.fleet.generate"
        )
