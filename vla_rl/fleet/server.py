"""The fleet's server: what robots send is on its disk before it says so, and a page shows how it goes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from vla_rl.fleet.canary import CanaryRule
from vla_rl.fleet.identity import Credentials, Revoked, check_reach
from vla_rl.fleet.learner_process import LearnerProcess
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.page import PageAddress, PageServer
from vla_rl.fleet.registered import RegisteredPolicies
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.status import Status
from vla_rl.fleet.transport import FleetTransport, TransportOptions
from vla_rl.fleet.watcher import Watcher

log = logging.getLogger("vla_rl.fleet")
LEDGER, REGISTRY = "ledger", "registry"  # in a fleet's folder
_LOW = 4 << 30  # bytes: with less room for records, a person should make some
_LOOK_S, _RETRY_S = 0.2, 1.0  # how often the ledger is looked at, and after a failure


@dataclass(frozen=True)
class FleetServerConfig:
    """Where robots connect, and the port of the page, which this machine alone can open (0: any that is free)."""

    transport: TransportOptions = field(default_factory=TransportOptions)
    page_port: int = 7791
    canary: CanaryRule = field(default_factory=CanaryRule)


class FleetServer:
    """Serves the fleet in ``folder`` until :meth:`close`.

    A SIGKILL at any moment loses nothing that was acknowledged.  Raises UserError when other machines could connect
    without certificates, when a port is taken, and when another server has the folder.
    """

    def __init__(
        self,
        folder: Path,
        config: FleetServerConfig | None = None,
        credentials: Credentials | None = None,
        revoked: Revoked | None = None,
    ) -> None:
        config = config or FleetServerConfig()
        check_reach(config.transport.host, credentials)
        self.status, self._ending = Status(), threading.Event()
        with ExitStack() as opening:
            self.ledger = opening.enter_context(closing(Ledger(folder / LEDGER)))
            self.registry = Registry(folder / REGISTRY, config.canary)
            self.registry.set_back(self.ledger.position)
            policies = RegisteredPolicies(self.registry)
            self.page = opening.enter_context(closing(PageServer(self.status, PageAddress(port=config.page_port))))
            transport = FleetTransport(self.ledger, policies, config.transport, credentials, revoked)
            self.transport = opening.enter_context(closing(transport))
            self._watcher = Watcher(self.ledger, self.registry, self.status, transport.waiting, transport.alarms)
            self._thread = threading.Thread(target=self._watch, name="fleet-watcher", daemon=True)
            self._thread.start()
            self._opened = opening.pop_all()

    def learn(self, command: Sequence[str]) -> LearnerProcess:
        """Keep ``command`` running beside the server; it gets every record (``fleet/learner_process.py``)."""
        return self._opened.enter_context(closing(LearnerProcess(command, self.ledger, self.status)))

    def close(self) -> None:
        """End learner, connections and page; what was acknowledged is on the disk.  Safe to call twice."""
        self._ending.set()
        self._thread.join()
        self._opened.close()

    def _tell_of_the_disk(self) -> None:
        """What is wrong with it now, long before it is full."""
        folder, failed, trouble = self.ledger.folder, self.ledger.failed, self.transport.trouble
        kept = "robots keep what they do and send it when it can be stored"
        failing = f"nothing is stored in {folder}, because {failed}; {kept}: look at the disk." if failed else ""
        self.status.standing("ledger", failing)
        refused = f"what robots sent last could not be stored ({trouble}); {kept}." if trouble and not failed else ""
        self.status.standing("storing", refused)
        room = self.ledger.room()
        low = ""
        if room == 0:
            low = f"the disk of {folder} is full, so nothing is stored; {kept}: free space on it."
        elif room < _LOW:
            low = f"the disk of {folder} has room for {room / 1e9:.1f} GB more; free space on it before it is full."
        self.status.standing("disk", low)

    def _watch(self) -> None:
        trouble = ""
        while not self._ending.is_set():
            more, now = False, ""
            try:
                self._tell_of_the_disk()
                self.ledger.reopen()
                more = self._watcher.look()
            except (
                Exception
            ) as error:  # whatever it is, it may work in a moment, and the page says since when it stands
                now = str(error) or type(error).__name__
                if now != trouble:
                    log.exception("what robots sent cannot be counted now")
            trouble = now
            self._ending.wait(_RETRY_S if trouble else 0.0 if more else _LOOK_S)
