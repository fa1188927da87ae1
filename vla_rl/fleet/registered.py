"""A registry as the transport offers it to robots (``downloads.Policies``)."""

from __future__ import annotations

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.registry import Registry


class RegisteredPolicies:
    """The versions of ``registry``; a robot's head is what it runs from its next episode on, (0, "") for nothing."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def head(self, robot: str) -> tuple[int, str]:
        """Version and state: "canary", "active", or whatever it is pinned to."""
        releases = self._registry.releases
        version = releases.version_for(robot)
        return (0, "") if version is None else (version, releases.stages[version])

    def changes(self) -> int:
        """How many changes the registry has seen, of other processes too."""
        return self._registry.releases.head

    def manifest(self, version: int) -> bytes:
        """The signed manifest; raises KeyError for a version that is not there."""
        try:
            return self._registry.manifest(version)
        except UserError as error:
            raise KeyError(str(error)) from error

    def chunk(self, sha256: bytes, offset: int, count: int) -> bytes:
        """At most ``count`` bytes from ``offset`` on; raises KeyError for a chunk that is not there."""
        try:
            return self._registry.chunk(sha256.hex(), offset, count)
        except ContractError as error:
            raise KeyError(str(error)) from error
