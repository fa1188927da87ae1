"""Servers and links that end with their test."""

from __future__ import annotations

import random
from contextlib import ExitStack, closing
from functools import partial

import pytest

from tests.fleet.fleets import MemoryPolicies, WatchedLedger
from vla_rl.fleet.link import Link, LinkOptions
from vla_rl.fleet.protocol import BackoffOptions
from vla_rl.fleet.transport import FleetTransport, TransportOptions

QUICK = BackoffOptions(first_s=0.01, longest_s=0.05)


@pytest.fixture
def store(tmp_path):
    with closing(WatchedLedger(tmp_path / "store")) as made:
        yield made


@pytest.fixture
def policies():
    return MemoryPolicies()


@pytest.fixture
def ending():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(ending, store, policies):
    """``serve(credentials=..., host=...)``: a server of the test's store and policies."""

    def start(credentials=None, revoked=None, clock=None, **options):
        options = TransportOptions(**{"port": 0, **options})
        made = FleetTransport(store, policies, options, credentials, revoked, clock)
        ending.enter_context(closing(made))
        ending.callback(store.slow.set)
        return made

    return start


@pytest.fixture
def link(ending):
    """``link(port, spool)``: a robot that is connected, or tries to."""

    def start(port, spool, credentials=None, clock=None, host="127.0.0.1", **given):
        chosen = {name: given.pop(name) for name in ("silence_s", "heartbeat_s", "batch_kb") if name in given}
        options = LinkOptions(address=f"{host}:{port}", backoff=QUICK, **chosen)
        made = partial(Link, spool, options, credentials, clock=clock, draw=random.Random(0))
        return ending.enter_context(closing(made(**given)))

    return start
