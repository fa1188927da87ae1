"""The fleet's page, served by the server itself: live, read-only, and without a network beside its own.

``/`` is the page, ``/events`` its stream (server-sent events), ``/status`` the same once as JSON, ``/metrics`` for
Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vla_rl.fleet.status import Status
from vla_rl.pages import PageAddress, PageServer, render


def serve_page(status: Status, address: PageAddress) -> PageServer:
    """The page of ``status``, served until it is closed; raises UserError when the port is taken or forbidden."""

    def events() -> Iterator[bytes]:
        yield f"data: {json.dumps(status.snapshot())}\n\n".encode()
        while not server.ending.wait(1.0):
            yield f"data: {json.dumps(status.snapshot())}\n\n".encode()

    server = PageServer(
        address,
        lambda nonce: render("fleet.html", "vla-rl fleet", nonce),
        {
            "/events": lambda: ("text/event-stream", events()),
            "/status": lambda: ("application/json", json.dumps(status.snapshot()).encode()),
            "/metrics": lambda: ("text/plain; version=0.0.4; charset=utf-8", metrics(status)),
        },
    )
    return server.start()


_OF_ROBOTS = {
    "records": "records that are durable on the server",
    "bytes": "bytes of durable records",
    "dropped": "records that the robot gave up because its disk was full",
    "episodes": "whole episodes",
    "successes": "episodes that succeeded",
    "steps": "control steps of whole episodes",
    "intervened": "control steps that a person chose",
    "clipped": "control steps whose request the supervisor changed",
}
_OF_VERSIONS = {"episodes": "whole episodes", "successes": "episodes that succeeded"}
_STATES = ("staged", "canary", "active", "retired")


class _Collector:
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """Every family, read from one snapshot."""
        seen = self._status.snapshot()
        yield CounterMetricFamily("vla_rl_fleet_alarms", "alarms since the server began", value=seen["alarmed"])
        for name in ("updates", "episodes"):
            if name in seen["learner"]:
                what = f"{name} of the learner, also of its runs before"
                yield GaugeMetricFamily(f"vla_rl_fleet_learner_{name}", what, value=seen["learner"][name])
        robots, versions = seen["robots"], seen["versions"]
        yield _gauge("connected", "1 while the robot is connected", "robot", robots)
        yield _gauge("waiting", "records that the robot holds and the server does not", "robot", robots)
        yield _gauge("version", "version of the policy that the robot used last", "robot", robots)
        for name, what in _OF_ROBOTS.items():
            yield _counter(f"robot_{name}", what, "robot", robots, name)
        for name, what in _OF_VERSIONS.items():
            yield _counter(f"version_{name}", what, "version", versions, name)
        labels = ("version", "state")
        state = GaugeMetricFamily("vla_rl_fleet_version_state", "1 for the state that it is in", labels=labels)
        for version, one in versions.items():
            for name in _STATES:
                state.add_metric((version, name), float(one["state"] == name))
        yield state


def metrics(status: Status) -> bytes:
    """The present metrics of ``status``, as Prometheus scrapes them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))  # a collector is what has collect()
    text: bytes = generate_latest(registry)
    return text


def _gauge(name: str, what: str, label: str, of: dict[str, dict[str, Any]]) -> Metric:
    family = GaugeMetricFamily(f"vla_rl_fleet_{name}", what, labels=(label,))
    for key, one in of.items():
        family.add_metric((key,), float(one[name]))
    return family


def _counter(name: str, what: str, label: str, of: dict[str, dict[str, Any]], field: str) -> Metric:
    family = CounterMetricFamily(f"vla_rl_fleet_{name}", what, labels=(label,))
    for key, one in of.items():
        family.add_metric((key,), float(one[field]))
    return family
