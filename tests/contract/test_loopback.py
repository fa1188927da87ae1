"""Which addresses are this machine."""

from __future__ import annotations

import pytest

from vla_rl.contract.wire import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_this_machine(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example", "localhost.example.org", ""])
def test_others(host: str):
    assert not is_loopback(host)
