"""A fleet's server until somebody ends it, the policy that the fleet begins with, and the learner beside it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vla_rl.contract.trust import check_folder
from vla_rl.fleet.identity import Revoked, load_credentials
from vla_rl.fleet.server import FleetServer, FleetServerConfig, log
from vla_rl.recipes.fleet.policies import key_file, signing_key

if TYPE_CHECKING:
    from vla_rl.recipes.fleet.learn import Learn


@dataclass(frozen=True)
class Beginning:
    """``policy``: the checkpoint that the fleet begins with, "" for none; ``learn``: its learner, from the config file
    ``source``.
    """

    policy: str
    learn: Learn | None = None
    source: Path | None = None


def serve(folder: Path, config: FleetServerConfig, credentials: str, beginning: Beginning, show: Console) -> None:
    """Serve until somebody ends it; see :func:`opened`."""
    _print_log()
    with opened(folder, config, credentials, beginning, show):
        threading.Event().wait()


@contextmanager
def opened(
    folder: Path, config: FleetServerConfig, credentials: str, beginning: Beginning, show: Console
) -> Iterator[FleetServer]:
    """A server that listens and stores; ``credentials`` is the folder of its certificate, "" for none."""
    check_folder(folder)
    identity = load_credentials(Path(credentials), "server") if credentials else None
    revoked = Revoked(Path(credentials) / "revoked.txt") if credentials else None
    if beginning.learn:
        config = replace(config, canary=beginning.learn.canary)  # both judge by one rule
    with closing(FleetServer(folder, config, identity, revoked)) as server:
        show.print(f"robots connect to {config.transport.host}:{server.transport.port}; the page is {server.page.url}")
        show.print(f"{folder} holds {server.ledger.position} records (Ctrl-C ends it)", highlight=False)
        _begin(server, folder, credentials, beginning, show)
        yield server


def _begin(server: FleetServer, folder: Path, credentials: str, beginning: Beginning, show: Console) -> None:
    key, learn = signing_key(folder, credentials), beginning.learn
    if policy := learn.policy if learn else beginning.policy:
        from vla_rl.recipes.fleet.publishing import publish_first  # torch, which a server needs for nothing else

        show.print(publish_first(server.registry, key, policy), highlight=False, markup=False)
    if learn:
        from vla_rl.recipes.fleet.learn import LEARNER, command, prepare

        if aside := prepare(learn, folder, beginning.source):
            show.print(f"an earlier learner is now in {aside}", highlight=False)
        server.learn(command(folder, key_file(folder, credentials)))
        show.print(f"a learner runs beside it; its metrics are in {folder / LEARNER}", highlight=False)


def _print_log() -> None:
    """Who comes, leaves and is refused, on standard error."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
