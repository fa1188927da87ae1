"""The server's folder of published policies, and which robot runs which of them.

``chunks/`` holds what policies consist of, ``manifests/`` one signed file per version, ``history`` who changed what and
why, ``outcomes`` how episodes went.  A change counts once its line in ``history`` is on the disk; everything else is
written before.  Several processes of one machine may open the same folder.

Where the tensors of a safetensors file lie is read from its header, without that format's library: 8 bytes with the
header's length (unsigned, little-endian), the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.manifest import (
    CHUNK_BYTES,
    ITEM_BYTES,
    MAX_FILES,
    SIGNATURE_BYTES,
    Blob,
    FileEntry,
    Golden,
    Manifest,
    SigningKey,
    TensorEntry,
    check_digest,
    check_path,
)
from vla_rl.fleet.releases import (
    EVERY_ROBOT,
    CanaryRule,
    MissingError,
    Outcomes,
    Releases,
    Verdict,
    choose_canaries,
    judge,
)

T = TypeVar("T")
MOST_VERSIONS = 10**10  # a manifest is called by ten digits


@dataclass(frozen=True)
class Published:
    """What is published with a checkpoint folder; see ``Golden`` and ``Manifest`` for the fields."""

    spec_hash: str
    observation: bytes
    seed: int
    action: tuple[tuple[float, ...], ...]
    tolerance: float


class Registry:
    """Policies in ``folder``; ``rule`` says when a canary is taken back without anybody being asked."""

    def __init__(
        self,
        folder: Path,
        rule: CanaryRule | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._rule, self._disk, self._clock = folder, rule or CanaryRule(), disk or Disk(), clock
        self._disk.make_folders(folder / "manifests")
        self._store = ContentStore(folder / "chunks", self._disk)
        self._history, self._log = History(folder / "history", self._disk), History(folder / "outcomes", self._disk)
        self._releases, self._changes = Releases(), list[dict[str, Any]]()
        self._outcomes, self._position = dict[int, dict[str, Outcomes]](), -1
        self._newest: dict[str, Any] = {}  # whose episode was counted last
        self._lock = threading.RLock()

    # -- what robots ask ----------------------------------------------------------------------------------------------

    @property
    def releases(self) -> Releases:
        """After all changes, those of other processes too."""
        with self._lock:
            for change in self._history.new():
                self._releases = self._understood(partial(self._releases.after, change), change)
                self._changes.append(change)
            return self._releases

    def head(self, robot: str) -> tuple[int, str]:
        """What ``robot`` runs from its next episode on: version and stage; (0, "") for nothing."""
        releases = self.releases
        version = releases.version_for(robot)
        return (0, "") if version is None else (version, releases.stages[version])

    def manifest(self, version: int) -> bytes:
        """The signed manifest of ``version``; raises MissingError for one that is not there."""
        self.releases.check(version)
        return self._disk.read(self._manifest_path(version))

    def chunk(self, digest: str, offset: int, count: int) -> bytes:
        """At most ``count`` bytes of a chunk from ``offset`` on; MissingError for one that is not here."""
        return self._store.read(digest, offset, count)

    def get(self, version: int) -> Manifest:
        """The manifest of ``version``, as this server wrote it; raises MissingError for one that is not there."""
        return Manifest.decode(self.manifest(version)[SIGNATURE_BYTES:])

    # -- what people and learners do ----------------------------------------------------------------------------------

    def publish(self, checkpoint: Path, published: Published, key: SigningKey, who: str, why: str) -> int:
        """Stage the policy in the folder ``checkpoint``; returns its version.

        Raises UserError for a folder that cannot be published, or a disk that has no room; nothing has changed then.
        """
        try:
            with self._alone():
                files = put_folder(checkpoint, self._store.put)
                observation = put_bytes(published.observation, self._store.put)
                self._store.sync()
                golden = Golden(observation, published.seed, published.action, published.tolerance)
                with self._lock:  # robots were served until here
                    version, parent = self._next_version(), self.releases.active
                    manifest = Manifest(version, parent, files, published.spec_hash, golden)
                    Manifest.decode(manifest.encode())  # what no robot would accept is not signed
                    self._disk.write_whole(self._manifest_path(version), key.sign(manifest))
                    self._disk.sync_folder(self._folder / "manifests")
                    self._change("publish", who, why, version=version)
                    return version
        except OSError as error:
            raise UserError(
                f"{str(checkpoint)!r} could not be published ({error}), so robots keep what they run; free some disk "
                "space or look at the disk."
            ) from error

    def try_on(self, version: int, robots: Iterable[str], who: str, why: str) -> tuple[str, ...]:
        """Make ``version`` the canary of some of ``robots``, the fleet's; returns those who try it."""
        with self._changing() as releases:
            self._check_other(version, releases)
            free = [robot for robot in robots if not {robot, EVERY_ROBOT} & releases.pins.keys()]
            if not free:
                raise UserError(
                    f"no robot is free to try policy version {version}, since all are pinned or there is none; unpin "
                    "one, or promote the version."
                )
            chosen = choose_canaries(free, version, self._rule.share)
            self._change("canary", who, why, version=version, robots=list(chosen))
        return chosen

    def promote(self, version: int, who: str, why: str) -> None:
        """Make ``version`` what every robot runs that is not pinned; a canary ends."""
        with self._changing() as releases:
            self._check_other(version, releases)
            self._change("promote", who, why, version=version)

    def roll_back(self, who: str, why: str) -> int | None:
        """Take the canary back or, without one, the active version; returns what is active now.

        Raises UserError where no version was active before.
        """
        with self._changing() as releases:
            if releases.canary is None and not releases.before:
                raise UserError(
                    f"no policy was active before version {releases.active}, so there is nothing to go back to; "
                    "promote another version."
                )
            self._change("roll back", who, why, version=releases.canary or releases.active)
            return self.releases.active

    def pin(self, version: int, who: str, why: str, robot: str = EVERY_ROBOT) -> None:
        """Keep one robot, or every one without a pin of its own, on ``version`` whatever is promoted."""
        with self._changing() as releases:
            releases.check(version)
            self._change("pin", who, why, robot=robot, version=version)

    def unpin(self, who: str, why: str, robot: str = EVERY_ROBOT) -> None:
        """Undo :meth:`pin`."""
        with self._changing() as releases:
            if robot not in releases.pins:
                raise UserError(f"{robot!r} is not pinned, so nothing changes; pinned: {sorted(releases.pins)}.")
            self._change("unpin", who, why, robot=robot)

    def remove_old(self, keep: int, who: str, why: str) -> int:
        """Remove all but the newest ``keep`` versions and those in use; returns how many bytes that freed."""
        with self._changing() as releases:
            there = [version for version, stage in releases.stages.items() if stage != "removed"]
            kept = {*sorted(there)[max(0, len(there) - keep) :], *releases.in_use()}
            gone = sorted(set(there) - kept)
            if gone:
                self._change("remove", who, why, versions=gone)
            used = {digest for version in kept for digest in self.get(version).chunks()}
            return self._store.keep_only(used)

    # -- how episodes went --------------------------------------------------------------------------------------------

    def record(self, position: int, robot: str, version: int, outcome: Outcomes) -> Verdict | None:
        """Count an episode of ``robot``, at ``position`` of the ledger; one that was counted already is dropped.

        Returns what that means for the canary, None without one; a canary that does worse is taken back.  Only what
        its own robots did counts for it.
        """
        with self._changing() as releases:
            self._count()
            if position <= self._position:
                return None
            self._log.append({"position": position, "robot": robot, "version": version, **asdict(outcome)})
            self._count()
            verdict = self._judged(releases)
            if verdict is not None and verdict.rollback:
                self._change("roll back", "canary rule", verdict.why, version=releases.canary)
            return verdict

    def set_back(self, position: int) -> None:
        """Count what comes behind ``position``, where the ledger ends now: it may be an older copy than was counted."""
        with self._changing():
            self._count()
            if position < self._position:
                self._log.append({"position": position, **self._newest, **asdict(Outcomes())})
                self._count()

    def verdict(self) -> Verdict | None:
        """What the episodes so far say about the canary; None without one."""
        with self._lock:
            self._count()
            return self._judged(self.releases)

    def outcomes(self) -> dict[int, dict[str, Outcomes]]:
        """Episodes by version and robot."""
        with self._lock:
            self._count()
            return {version: dict(robots) for version, robots in self._outcomes.items()}

    def history(self) -> list[dict[str, Any]]:
        """All changes in their order: ``do``, ``who``, ``why``, ``at`` (seconds since 1970) and what it was about."""
        with self._lock:
            _ = self.releases
            return list(self._changes)

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other thread or process writes into the folder meanwhile."""
        with (self._folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _changing(self) -> Iterator[Releases]:
        """The present state, which nobody else changes meanwhile."""
        with self._alone(), self._lock:
            yield self.releases

    def _change(self, do: str, who: str, why: str, **about: Any) -> None:
        self._history.append({"do": do, "who": who, "why": why, "at": self._clock(), **about})

    def _count(self) -> None:
        for entry in self._log.new():
            self._understood(partial(self._count_one, entry), entry)

    def _count_one(self, entry: dict[str, Any]) -> None:
        self._position = entry.pop("position")
        self._newest = {name: entry[name] for name in ("robot", "version")}
        robots = self._outcomes.setdefault(entry.pop("version"), {})
        robot = entry.pop("robot")
        robots[robot] = robots.get(robot, Outcomes()) + Outcomes(**entry)

    def _understood(self, do: Callable[[], T], entry: Any) -> T:
        """What ``do`` makes of ``entry``; ContractError for one that no registry has written."""
        try:
            versions = [entry[name] for name in ("version",) if name in entry] + list(entry.get("versions", ()))
            if all(type(one) is int and 0 < one < MOST_VERSIONS for one in versions):
                return do()
            wrong = f"version {versions}"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            wrong = f"{type(error).__name__}: {error}"
        raise ContractError(
            f"the registry {str(self._folder)!r} has an entry that means nothing ({wrong[:200]}), so what robots run "
            "is unknown; bring its history and outcomes back from a copy."
        )

    def _judged(self, releases: Releases) -> Verdict | None:
        if releases.canary is None or releases.active is None:
            return None
        tried = self._total(releases, releases.canary, {releases.canary})
        return judge(tried, self._total(releases, releases.active, {releases.canary, releases.active}), self._rule)

    def _total(self, releases: Releases, version: int, running: set[int]) -> Outcomes:
        """How ``version`` did on the robots that are to run one of ``running``, whatever others say of it."""
        found = self._outcomes.get(version, {}).items()
        return sum((one for robot, one in found if releases.version_for(robot) in running), Outcomes())

    def _check_other(self, version: int, releases: Releases) -> None:
        releases.check(version)
        if version == releases.active:
            raise UserError(f"policy version {version} is active already, so nothing changes; name another version.")

    def _next_version(self) -> int:
        """Above every version that was published, and every one of whose publication only a manifest is left."""
        written = [int(name) for name in self._disk.names(self._folder / "manifests") if name.isdigit()]
        return 1 + max([0, *written, *self.releases.stages])

    def _manifest_path(self, version: int) -> Path:
        return self._folder / "manifests" / f"{version:010d}"


Put = Callable[[bytes], str]  # stores a chunk and returns its SHA-256


def put_folder(folder: Path, put: Put) -> tuple[FileEntry, ...]:
    """Hand every chunk of the files in ``folder`` to ``put``; returns their entries, by path.

    Raises UserError for a folder that is no checkpoint, too many files, links, and names that are not plain.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{str(folder)!r} has no config.json, so it is no checkpoint to publish; name its folder.")
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    if len(paths) > MAX_FILES:
        raise UserError(
            f"{str(folder)!r} holds {len(paths)} files, more than {MAX_FILES}, so it is not published; name the folder "
            "of one checkpoint."
        )
    return tuple(_entry(folder, path, put) for path in paths)


def put_bytes(data: bytes, put: Put) -> Blob:
    """``data`` in chunks."""
    return Blob(len(data), tuple(put(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)))


def _entry(folder: Path, path: Path, put: Put) -> FileEntry:
    name = path.relative_to(folder).as_posix()
    try:
        check_path(name)
    except ValueError as error:
        raise UserError(f"{error}, so it cannot be published; rename it.") from error
    if path.is_symlink() or not path.is_file():
        raise UserError(f"{str(path)!r} is no regular file, so it cannot be published; put a copy in its place.")
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return FileEntry(name, _blob(file, path.stat().st_size, put))
        head, places = read_header(file, path.stat().st_size)
        tensors = (TensorEntry(at.name, at.dtype, at.shape, _blob(file, at.size, put)) for at in places)
        return FileEntry(name, put_bytes(head, put), tuple(tensors))


def _blob(file: BinaryIO, size: int, put: Put) -> Blob:
    chunks = []
    for begin in range(0, size, CHUNK_BYTES):
        data = file.read(min(CHUNK_BYTES, size - begin))
        if len(data) < min(CHUNK_BYTES, size - begin):
            raise ContractError(f"{file.name!r} shrank while it was read, so it is not published; do not write to it.")
        chunks.append(put(data))
    return Blob(size, tuple(chunks))


_LENGTH = 8
MAX_HEADER_BYTES = 100_000_000  # as the format's own library has it


@dataclass(frozen=True)
class TensorPlace:
    """A tensor and its number of bytes; tensors lie one after the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def read_header(file: BinaryIO, size: int) -> tuple[bytes, tuple[TensorPlace, ...]]:
    """The bytes before the tensors of a ``file`` of ``size`` bytes, and the tensors in the order in which they lie.

    Raises ContractError unless the tensors have the sizes of their shapes and fill the rest of the file without a gap.
    """
    start = file.read(_LENGTH)
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH or length > min(MAX_HEADER_BYTES, size - _LENGTH):
        raise _damaged(f"its header cannot have {length} of {size} bytes")
    header, end, places = file.read(length), 0, list[TensorPlace]()
    try:
        entries = json.loads(header, object_pairs_hook=_distinct)
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (begin, stop) = tuple(entry["shape"]), entry["data_offsets"]
            place = TensorPlace(name, entry["dtype"], shape, ITEM_BYTES[entry["dtype"]] * math.prod(shape))
            plain = all(type(number) is int and number >= 0 for number in (*shape, begin, stop))
            if not plain or begin != end or stop - begin != place.size:
                raise ValueError(f"{name!r} does not follow the tensor before or its shape")
            places.append(place)
            end = stop
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(f"{type(error).__name__}: {str(error)[:200]}") from error
    if end != size - _LENGTH - length:
        raise _damaged(f"its tensors have {end} bytes and the file has {size - _LENGTH - length} for them")
    return start + header, tuple(places)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an entry occurs twice")
    return found


def _damaged(why: str) -> ContractError:
    return ContractError(
        f"a safetensors file cannot be read ({why}), so it is not published; save the checkpoint again."
    )


class History:
    """The entries of a file.  What a power cut left half written at its end does not count and is overwritten."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """The folder of ``path`` exists."""
        self._path, self._disk, self._end = path, disk, 0

    def new(self) -> list[dict[str, Any]]:
        """The entries since the last call; raises ContractError for a damaged one that others follow."""
        if self._path.name not in self._disk.names(self._path.parent):
            return []
        entries: list[dict[str, Any]] = []
        lines = self._disk.read(self._path, self._end).split(b"\n")
        for number, line in enumerate(lines[:-1]):  # nothing, or half a line, follows the last end of a line
            entry = _change(line)
            if entry is None:
                if any(_change(later) is not None for later in lines[number + 1 :]):
                    raise ContractError(
                        f"{str(self._path)!r} is damaged at byte {self._end} and goes on after it, so what happened is "
                        "unknown; bring the file back from a copy, or look at the disk."
                    )
                break
            entries.append(entry)
            self._end += len(line) + 1
        return entries

    def append(self, entry: dict[str, Any]) -> None:
        """Write ``entry`` behind what :meth:`new` has returned; returns when it survives a power cut."""
        text = json.dumps(entry, sort_keys=True, allow_nan=False).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        with closing(self._disk.open(self._path)) as file:
            file.truncate(self._end)
            file.write_all(line)
            file.sync()
        self._disk.sync_folder(self._path.parent)


def _change(line: bytes) -> dict[str, Any] | None:
    """The entry in a line; None where its checksum is another."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    return json.loads(text)


class ContentStore:
    """Chunks in a folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder, self._disk = folder, disk
        disk.make_folders(folder)

    def put(self, data: bytes) -> str:
        """Store ``data`` unless it is there; returns its SHA-256.  It survives a power cut after :meth:`sync`."""
        digest = hashlib.sha256(data).hexdigest()
        try:
            self._disk.size(self._folder / digest)
        except FileNotFoundError:
            self._disk.write_whole(self._folder / digest, data)
        return digest

    def sync(self) -> None:
        """Return when all that was put survives a power cut."""
        self._disk.sync_folder(self._folder)

    def read(self, digest: str, offset: int, count: int) -> bytes:
        """``count`` bytes of a chunk from ``offset`` on, fewer at its end; MissingError for one that is not here."""
        path = self._folder / check_digest(digest)
        try:
            return self._disk.read(path, offset, count)
        except FileNotFoundError as error:
            raise MissingError(
                f"there is no chunk {digest[:12]}..., so it cannot be sent; ask for the manifest again: its version "
                "may have been removed."
            ) from error

    def keep_only(self, digests: Collection[str]) -> int:
        """Remove all other chunks, and what was left half written; returns how many bytes that freed."""
        freed = 0
        for name in self._disk.names(self._folder):
            if name not in digests:
                freed += self._disk.size(self._folder / name)
                self._disk.remove(self._folder / name)
        return freed
