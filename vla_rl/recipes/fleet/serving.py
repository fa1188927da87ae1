"""A fleet's server until somebody ends it, the policy that the fleet begins with, and the learner beside it."""

from __future__ import annotations

import getpass
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import wilson
from vla_rl.contract.trust import check_folder, write_whole
from vla_rl.fleet.identity import Revoked, load_credentials
from vla_rl.fleet.manifest import SigningKey
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import Outcomes
from vla_rl.fleet.server import REGISTRY, FleetServer, FleetServerConfig, log, part_of_fleet
from vla_rl.recipes.terminal import print_log

if TYPE_CHECKING:
    from vla_rl.recipes.fleet.learners import Learn


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
    print_log(log)
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
        from vla_rl.recipes.fleet.learners import LEARNER, command, prepare

        if aside := prepare(learn, folder, beginning.source):
            show.print(f"an earlier learner is now in {aside}", highlight=False)
        server.learn(command(folder, key_file(folder, credentials)))
        show.print(f"a learner runs beside it; its metrics are in {folder / LEARNER}", highlight=False)


KEY, PUBLIC_KEY = "signing.key", "signing.pub"


def open_registry(folder: Path) -> Registry:
    """The registry of a fleet's folder; raises UserError where there is none."""
    return Registry(part_of_fleet(folder, REGISTRY))


def signing_key(folder: Path, credentials: str) -> SigningKey:
    """The key in the folder ``credentials``, or of ``folder`` itself where that is "", made when it is first needed.

    Robots trust its public half: ``signing.pub``, of their own certificate's folder or of ``folder``.
    """
    path = key_file(folder, credentials)
    if credentials:
        return SigningKey.load(path)
    try:
        key = SigningKey.load(path) if path.exists() else SigningKey.create(path)
    except UserError:
        if not path.exists():
            raise
        key = SigningKey.load(path)  # another process was quicker
    public = folder / PUBLIC_KEY
    if not public.exists() or public.read_bytes() != key.public_pem():
        write_whole(public, key.public_pem(), 0o644)
    return key


def key_file(folder: Path, credentials: str) -> Path:
    """Where :func:`signing_key` finds or makes it."""
    return (Path(credentials) if credentials else folder) / KEY


def user() -> str:
    """Who is at the keyboard, for the registry's history."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # this number has no name
        return f"user {os.getuid()}"


def table(registry: Registry) -> Table:
    """Versions, their stage, and how they did on the robots: success with its interval (Wilson, 95 %)."""
    made, played = Table("version", "stage", "episodes", "success"), registry.outcomes()
    for version, stage in sorted(registry.releases.stages.items()):
        total = sum(played.get(version, {}).values(), Outcomes())
        low, high = wilson(total.successes, total.episodes)
        rate = f"{total.successes / total.episodes:.0%} [{low:.0%}, {high:.0%}]" if total.episodes else ""
        made.add_row(str(version), stage, str(total.episodes), rate)
    return made


def number(text: str) -> int:
    """A version; raises UserError."""
    if not text.isdigit():
        raise UserError(f"{text!r} is no version of a policy, so nothing changes; vla-rl fleet versions lists them.")
    return int(text)
