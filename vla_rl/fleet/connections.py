"""Connections of nobody: how many may be open at the server's port, and for how long.

gRPC bounds all of them before a handshake, and ends those whose handshake takes too long.  What it cannot do is done
here: of those behind which no robot is known, each address keeps a few, and they give way to newer ones.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import stat
from collections import defaultdict
from collections.abc import Iterator, Set
from urllib.parse import unquote

from vla_rl.contract.errors import UserError

HANDSHAKE_S = 10.0  # after which a connection behind which no robot is known is ended
_OF_ADDRESS, _OF_ALL = 32, 128  # connections behind which no robot is known
_FEWEST, _MOST = 64, 512  # connections besides those of robots
_RESERVE = 192  # files for ledger, registry, page, learner and gRPC itself
_FOLDER = "/dev/fd"  # the files that this process has open

Peer = tuple[str, int]  # address and port


def most_connections(robots: int) -> int:
    """How many connections a server of so many robots takes; raises UserError when too few files may be open.

    The limit of open files is raised as far as it may be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = robots + _MOST + _RESERVE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft - _RESERVE - robots)
    if left < _FEWEST:
        raise UserError(
            f"this process may open {soft} files, too few for {robots} robots, which need "
            f"{robots + _FEWEST + _RESERVE}, so no server is started; raise the limit (ulimit -n), or lower max_robots."
        )
    return robots + left


def peer_of(text: str) -> Peer:
    """Address and port in gRPC's words, as "ipv4:10.0.0.7:5512"; ("", 0) for others."""
    host, _, port = unquote(text.partition(":")[2]).rpartition(":")
    return (host.strip("[]").removeprefix("::ffff:"), int(port)) if port.isdigit() else ("", 0)


def give_back() -> None:
    """Return to the system the memory of connections that ended: the C library keeps it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class Connections:
    """Those that were accepted at ``port`` of this process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._since: dict[Peer, float] = {}

    def end_strangers(self, known: Set[Peer], now: float) -> dict[str, int]:
        """End connections of others than ``known`` that are too old or too many, the oldest first; how many of whom.

        ``now``: seconds of a clock that only grows.
        """
        found = {peer: handle for peer, handle in self._accepted() if peer not in known}
        self._since = {peer: self._since.get(peer, now) for peer in found}
        left: defaultdict[str, int] = defaultdict(int)
        ended: defaultdict[str, int] = defaultdict(int)
        for peer in sorted(found, key=lambda peer: -self._since[peer]):  # the newest first
            left[peer[0]] += 1
            left[""] += 1
            old = now - self._since[peer] > HANDSHAKE_S
            if old or left[peer[0]] > _OF_ADDRESS or left[""] > _OF_ALL:
                self._peer(found[peer], peer)
                ended[peer[0]] += 1
        return ended

    def _accepted(self) -> Iterator[tuple[Peer, int]]:
        for name in os.listdir(_FOLDER):
            if (peer := self._peer(int(name))) is not None:
                yield peer, int(name)

    def _peer(self, handle: int, ending: Peer | None = None) -> Peer | None:
        """Who is connected by this open file, None where it is something else; ended if it is ``ending``.

        A copy of the file is looked at, one at a time, as gRPC may close its own at any moment.
        """
        try:
            if not stat.S_ISSOCK(os.fstat(handle).st_mode):
                return None
            with socket.socket(fileno=os.dup(handle)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != self._port:
                    return None
                host, port = sock.getpeername()[:2]
                peer = (host.removeprefix("::ffff:"), port)
                if peer == ending:
                    sock.shutdown(socket.SHUT_RDWR)
                return peer
        except OSError:  # it listens, was closed meanwhile, or there is no file for a copy
            return None
