"""Who changes which policy a fleet's robots run, and by which key: a registry, beside its server or without one."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import wilson
from vla_rl.contract.trust import check_folder, write_whole
from vla_rl.fleet.canary import Outcomes
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import EVERY_ROBOT
from vla_rl.fleet.server import REGISTRY
from vla_rl.fleet.signing import SigningKey

KEY, PUBLIC_KEY = "signing.key", "signing.pub"


def open_registry(folder: Path) -> Registry:
    """The registry of a fleet's folder; raises UserError where there is none."""
    if not (folder / REGISTRY).is_dir():
        raise UserError(f"{str(folder)!r} is no fleet's folder: it has no {REGISTRY}; give the one of vla-rl serve.")
    check_folder(folder)
    return Registry(folder / REGISTRY)


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


def for_each(folder: Path, robots: Sequence[str], do: Callable[[Registry, str], None]) -> str:
    """``do`` with every one of ``robots``, or once for all when none is named; returns what a person should read."""
    registry = open_registry(folder)
    for robot in robots or (EVERY_ROBOT,):
        do(registry, robot)
    return f"{', '.join(robots) or 'every robot'}: done"


def number(text: str) -> int:
    """A version; raises UserError."""
    if not text.isdigit():
        raise UserError(f"{text!r} is no version of a policy, so nothing changes; vla-rl fleet versions lists them.")
    return int(text)
