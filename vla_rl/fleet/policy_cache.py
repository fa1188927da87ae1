"""The robot's end: published policies are fetched piece by piece, verified, and put together beside the one in use.

``NUMBER/`` holds the checkpoint folder of a version and ``NUMBER.manifest`` its signed manifest, written last;
``incoming/`` what is being fetched; ``in_use`` the version in use and the one before it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.disk import WRITING, Disk
from vla_rl.fleet.manifest import Manifest, TrustedKeys, check_client

PIECE_BYTES = 1 << 20  # asked for at once
SPARE_BYTES = 64 << 20  # of the disk, left for everything else
Place: TypeAlias = tuple[Path, int, int, str]  # file, offset, bytes and SHA-256 of a chunk


class PolicySource(Protocol):
    """Where policies come from; what it raises ends a fetch, and the next one goes on where that stopped."""

    def manifest(self, version: int) -> bytes:
        """The signed manifest of ``version``."""

    def chunk(self, digest: str, offset: int, count: int) -> bytes:
        """At most ``count`` bytes of a chunk from ``offset`` on, at least one."""


@dataclass(frozen=True)
class CachedPolicy:
    """A version that is here, whole and verified."""

    manifest: Manifest
    folder: Path
    observation: bytes  # of its golden observation


class PolicyCache:
    """Policies on a robot: the one in use, the one before it, and one that is being fetched."""

    def __init__(self, folder: Path, keys: TrustedKeys, disk: Disk | None = None) -> None:
        self._folder, self._keys, self._disk = folder, keys, disk or Disk()
        self._incoming = folder / "incoming"
        self._held: dict[str, Place] | None = None  # where chunks lie; None: to be read again
        self._disk.make_folders(self._incoming)

    # -- what is here -------------------------------------------------------------------------------------------------

    def versions(self) -> tuple[int, ...]:
        names = self._disk.names(self._folder)
        return tuple(sorted(int(name.removesuffix(".manifest")) for name in names if name.endswith(".manifest")))

    def in_use(self) -> tuple[int, ...]:
        """The version in use and the one before it, newest first; () on a robot that never had one."""
        if "in_use" not in self._disk.names(self._folder):
            return ()
        return tuple(json.loads(self._disk.read(self._folder / "in_use")))

    def use(self, version: int) -> None:
        """Remember that the robot acts by ``version`` from now on, which survives a power cut."""
        self.get(version)
        current = [version, *(other for other in self.in_use() if other != version)][:2]
        self._disk.write_whole(self._folder / "in_use", json.dumps(current).encode())
        self._disk.sync_folder(self._folder)

    def get(self, version: int) -> CachedPolicy:
        """A version that is here, all of it verified; raises UserError for another one, ContractError for damage."""
        if version not in self.versions():
            here = ", ".join(map(str, self.versions())) or "none"
            raise UserError(f"policy version {version} is not on this robot (here: {here}); fetch it first.")
        manifest = self._keys.read(self._disk.read(self._path(version, ".manifest")))
        for place in self._places(manifest):
            self._read(*place)
        observation = self._disk.read(self._path(version, ".observation"))
        return CachedPolicy(manifest, self._path(version), observation)

    # -- fetching -----------------------------------------------------------------------------------------------------

    def fetch(self, version: int, spec_hash: str, source: PolicySource) -> CachedPolicy:
        """Have ``version`` here: what no version here holds already comes from ``source``.

        A fetch that was interrupted goes on where it stopped, in the middle of a chunk too.  The policy in use is
        never touched.  Raises what ``source`` raises; UserError for a policy that is for another robot or a newer
        client, and for a disk without room; ContractError for what is not signed or not what its hash says.
        """
        if version in self.versions():
            with suppress(ContractError):  # a damaged one is made anew below
                return self.get(version)
        signed = source.manifest(version)
        manifest = self._keys.read(signed)
        if manifest.version != version:
            raise ContractError(
                f"policy version {version} was asked for and {manifest.version} came, so it is refused and the policy "
                "in use stays; look at the server."
            )
        check_client(manifest)
        if manifest.spec_hash != spec_hash:
            raise UserError(
                f"policy version {version} is for another robot (cameras, state, actions or control rate differ), so "
                "it is not fetched and the policy in use stays; publish one for this robot, or pin it to its own."
            )
        try:
            self._remove_all_but({version, *self.in_use()} & {*self.versions()})
            self._fetch(manifest, source)
            self._assemble(manifest, signed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._keep_incoming(())
            raise _no_room(version, "the disk is full") from error
        return self.get(version)

    def _fetch(self, manifest: Manifest, source: PolicySource) -> None:
        """Bring every chunk that no version here holds to ``incoming``."""
        missing = {digest: size for digest, size in manifest.chunks().items() if not self._is_held(digest)}
        self._keep_incoming(missing)
        arrived = sum(self._disk.size(self._incoming / name) for name in self._disk.names(self._incoming))
        needed = sum(missing.values()) - arrived + sum(file.size for file in manifest.files) + SPARE_BYTES
        if (free := self._disk.free(self._folder)) < needed:
            raise _no_room(manifest.version, f"it takes {needed >> 20} MB and {free >> 20} MB are free")
        for digest, size in missing.items():
            self._fetch_chunk(digest, size, source)

    def _fetch_chunk(self, digest: str, size: int, source: PolicySource) -> None:
        path = self._incoming / digest
        resumed = self._append(path, digest, size, source)
        if hashlib.sha256(self._disk.read(path)).hexdigest() == digest:
            return
        self._disk.remove(path)
        if not resumed:
            raise ContractError(
                f"chunk {digest[:12]}... arrived damaged, so it was dropped and the policy in use stays; fetch the "
                "policy again, and look at the server's disk if it happens again."
            )
        self._fetch_chunk(digest, size, source)  # a power cut may have spoilt what was here of it

    def _append(self, path: Path, digest: str, size: int, source: PolicySource) -> bool:
        """Bring the rest of a chunk; returns whether the beginning of it was here already."""
        with closing(self._disk.open(path)) as file:
            if self._disk.size(path) > size:
                file.truncate(0)
            resumed = self._disk.size(path) > 0
            while (there := self._disk.size(path)) < size:
                piece = source.chunk(digest, there, min(PIECE_BYTES, size - there))
                if not 0 < len(piece) <= size - there:
                    raise ContractError(
                        f"the server sent {len(piece)} bytes of a chunk that lacks {size - there}, so the policy is "
                        "not used; look at the server."
                    )
                file.write_all(piece)
        return resumed

    # -- putting together ---------------------------------------------------------------------------------------------

    def _assemble(self, manifest: Manifest, signed: bytes) -> None:
        """Write the checkpoint folder, and then the manifest, without which it does not count."""
        folder = self._path(manifest.version)
        writing = folder.with_name(folder.name + WRITING)
        for entry in manifest.files:
            path = writing / entry.path
            self._disk.make_folders(path.parent)
            with closing(self._disk.open(path)) as file:
                for digest in (digest for blob in entry.blobs for digest in blob.chunks):
                    file.write_all(self._content(digest))
                file.sync()
            self._disk.sync_folder(path.parent)
        observation = b"".join(self._content(digest) for digest in manifest.golden.observation.chunks)
        if manifest.version in self.versions():  # it is damaged
            self._disk.remove(self._path(manifest.version, ".manifest"))
            shutil.rmtree(folder)
        self._disk.rename(writing, folder)
        self._disk.write_whole(self._path(manifest.version, ".observation"), observation)
        self._disk.sync_folder(self._folder)
        self._disk.write_whole(self._path(manifest.version, ".manifest"), signed)
        self._disk.sync_folder(self._folder)
        self._held = None
        self._keep_incoming(())

    def _content(self, digest: str) -> bytes:
        """A chunk, verified: as it came, or out of a version that is here."""
        path = self._incoming / digest
        try:
            size = self._disk.size(path)
        except FileNotFoundError:
            return self._read(*self._all_places()[digest])
        return self._read(path, 0, size, digest)

    def _read(self, path: Path, offset: int, size: int, digest: str) -> bytes:
        try:
            data = self._disk.read(path, offset, size)
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise ContractError(
                f"{str(path)!r} is damaged, so nothing is done with the policy that it belongs to; fetch that version "
                "again, and look at the disk."
            )
        return data

    def _is_held(self, digest: str) -> bool:
        """Whether a version that is here holds the chunk undamaged."""
        places = self._all_places()
        with suppress(KeyError, ContractError):
            self._read(*places[digest])
            return True
        return False

    def _all_places(self) -> dict[str, Place]:
        """Where the chunks of all versions lie that are here."""
        if self._held is None:
            self._held = {}
            for version in self.versions():
                manifest = self._keys.read(self._disk.read(self._path(version, ".manifest")))
                self._held |= {place[-1]: place for place in self._places(manifest)}
        return self._held

    def _places(self, manifest: Manifest) -> list[Place]:
        folder, observation = self._path(manifest.version), self._path(manifest.version, ".observation")
        files = [(folder / entry.path, entry.blobs) for entry in manifest.files]
        places: list[Place] = []
        for path, blobs in [(observation, (manifest.golden.observation,)), *files]:
            offset = 0
            for digest, size in (chunk for blob in blobs for chunk in blob.sized_chunks()):
                places.append((path, offset, size, digest))
                offset += size
        return places

    # -- making room --------------------------------------------------------------------------------------------------

    def _remove_all_but(self, kept: set[int]) -> None:
        """Remove other versions, manifests first, and what an interrupted assembly left."""
        names = self._disk.names(self._folder)
        for name in sorted(names, key=lambda name: not name.endswith(".manifest")):
            number, _, suffix = name.partition(".")
            if number.isdigit() and (int(number) not in kept or suffix.endswith(WRITING[1:])):
                path = self._folder / name
                shutil.rmtree(path) if path.is_dir() else self._disk.remove(path)
        self._held = None

    def _keep_incoming(self, digests: Collection[str]) -> None:
        for name in self._disk.names(self._incoming):
            if name not in digests:
                self._disk.remove(self._incoming / name)

    def _path(self, version: int, suffix: str = "") -> Path:
        return self._folder / f"{version:010d}{suffix}"


def _no_room(version: int, why: str) -> UserError:
    return UserError(
        f"policy version {version} has no room on this robot ({why}), so the policy in use stays; free some disk space."
    )
