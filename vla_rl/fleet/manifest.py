"""What a published policy consists of: every tensor and file by its hashes, and what a robot checks before it acts.

A checkpoint folder is cut into chunks of 4 MB at most, none of which holds parts of two tensors.  A chunk is named by
its SHA-256, so a tensor that did not change has the same chunks in the next version, and they are not sent again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.trust import read_key, write_whole

CHUNK_BYTES = 4 << 20
CLIENT = 1  # what this code can fetch and check; a manifest may ask for more
MAX_MANIFEST_BYTES = 3 << 20  # one message of gRPC, and the chunks of 150 GB
MAX_POLICY_BYTES = 1 << 40
MAX_FILES, MAX_TENSORS, MAX_DEPTH = 1_000, 20_000, 8
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # of a file or folder; neither "." nor ".." nor hidden
_DIGEST = re.compile(r"[0-9a-f]{64}")
SIGNATURE_BYTES = 64
MAX_SIGNED_BYTES = SIGNATURE_BYTES + MAX_MANIFEST_BYTES
_PURPOSE = b"vla-rl policy manifest\n"  # a signature of anything else is none of a manifest


@dataclass(frozen=True)
class Blob:
    """``size`` bytes in chunks of ``CHUNK_BYTES``, the last of which may be shorter, by their SHA-256."""

    size: int
    chunks: tuple[str, ...]

    def sized_chunks(self) -> Iterator[tuple[str, int]]:
        """Each chunk with its number of bytes, in order."""
        for i, digest in enumerate(self.chunks):
            yield digest, min(CHUNK_BYTES, self.size - i * CHUNK_BYTES)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a safetensors file; ``dtype`` as that format writes it ("F32")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Blob


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint folder: ``head``, then the data of ``tensors``, in their order.

    ``path`` is relative, with "/".  Of a safetensors file ``head`` is the header; any other file is all head.
    """

    path: str
    head: Blob
    tensors: tuple[TensorEntry, ...] = ()

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The file's content, in order."""
        return (self.head, *(tensor.data for tensor in self.tensors))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True)
class Golden:
    """What the policy must answer on a robot before it may act there.

    observation  a ``wire`` message {images, state, task, time} of one environment
    seed         of the generator that its noise is drawn from, in mode "eval"
    action       float [H][D]: the learner's answer, in physical units
    tolerance    the largest difference that is accepted, as a share of each dimension's range
    """

    observation: Blob
    seed: int
    action: tuple[tuple[float, ...], ...]
    tolerance: float


@dataclass(frozen=True)
class Manifest:
    """One published policy.

    version          counted up by the registry, never reused
    parent           the version that was active when this one was published, None for the first
    files            the checkpoint folder
    spec_hash        :func:`spec_hash` of the environment that it acts in
    golden           the check before it acts
    learner_version  the learner's own count of publications, for the staleness of what this policy experienced
    progress         share of its training run that was done, which sets the scale of exploration noise
    metrics          figures of the learner, by name
    min_client       the least ``CLIENT`` that may use it
    """

    version: int
    parent: int | None
    files: tuple[FileEntry, ...]
    spec_hash: str
    golden: Golden
    learner_version: int = 0
    progress: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    min_client: int = CLIENT

    def chunks(self) -> dict[str, int]:
        """Bytes of each chunk of the policy and of its golden observation, by SHA-256, each of them once."""
        blobs = [self.golden.observation, *(blob for file in self.files for blob in file.blobs)]
        return {digest: size for blob in blobs for digest, size in blob.sized_chunks()}

    def encode(self) -> bytes:
        """Canonical JSON: what is signed.  Raises ContractError for a figure that is not finite."""
        try:
            return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        except (ValueError, TypeError) as error:
            raise ContractError(
                f"the manifest of policy version {self.version} cannot be written ({error}), so it is not published; "
                "leave figures out that are not finite."
            ) from error

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read what :meth:`encode` wrote; raises ContractError for anything else, and for what is out of bounds."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise _refused(f"it has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        try:
            manifest: Manifest = _read(Manifest, json.loads(data))
            _check(manifest)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise _refused(f"{type(error).__name__}: {str(error)[:200]}") from error
        return manifest


def spec_hash(spec: EnvSpec) -> str:
    """SHA-256 of what a policy depends on: cameras, state, action and control rate, not tasks or the robot's name."""
    data = spec.to_json()
    parts = {name: data[name] for name in ("images", "state", "action", "control_dt")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check_path(path: str) -> str:
    """``path`` if it stays within any folder that it is joined to; raises ValueError otherwise."""
    parts = path.split("/")
    if len(parts) > MAX_DEPTH or not all(_NAME.fullmatch(part) for part in parts):
        raise ValueError(f"{path[:200]!r} is no plain relative path")
    return path


def check_digest(digest: str) -> str:
    """``digest`` if it is a SHA-256 in lower-case hexadecimal; raises ContractError otherwise."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ContractError(
            f"{str(digest)[:100]!r} is no SHA-256, so no chunk is read; look for a broken or foreign client."
        )
    return digest


def check_client(manifest: Manifest) -> None:
    """Raise UserError when ``manifest`` asks for a newer client than this one."""
    if manifest.min_client > CLIENT:
        raise UserError(
            f"policy version {manifest.version} needs client {manifest.min_client} and this is {CLIENT}, so the policy "
            "in use stays; update vla-rl on this robot."
        )


def _refused(why: str) -> ContractError:
    return ContractError(
        f"a policy manifest cannot be read ({why}), so nothing is fetched by it; publish the policy again with this "
        "version of vla-rl."
    )


# -- reading: every field is checked, since the same code reads what arrives from a network ----------------------------


def _read(kind: Any, data: Any) -> Any:
    """``data`` of JSON as a ``kind``: one of the classes above, or the type of a field of theirs; raises ValueError."""
    inner = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        named = isinstance(data, dict) and data.keys() == hints.keys()
        _require(named, f"a {kind.__name__} has {', '.join(sorted(hints))}")
        return kind(**{name: _read(hint, data[name]) for name, hint in hints.items()})
    if get_origin(kind) is tuple:
        _require(isinstance(data, list), "a list is missing")
        return tuple(_read(inner[0], item) for item in data)
    if get_origin(kind) is Mapping:
        return {_read(inner[0], name): _read(inner[1], value) for name, value in data.items()}
    if inner:  # or None
        return None if data is None else _read(inner[0], data)
    if kind is str:
        _require(isinstance(data, str) and len(data) <= 1_000, "a text is missing or too long")
    elif kind is int:
        _require(type(data) is int and 0 <= data < 1 << 62, f"{str(data)[:50]!r} is no count")
    else:
        _require(type(data) in (int, float) and math.isfinite(data), f"{str(data)[:50]!r} is no finite number")
    return kind(data)


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(manifest: Manifest) -> None:
    """Raise ValueError for what no registry publishes."""
    files, golden = manifest.files, manifest.golden
    _require(manifest.version > 0 and manifest.parent != 0, "versions begin with 1")
    tensors = [tensor for file in files for tensor in file.tensors]
    _require(len(files) <= MAX_FILES and len(tensors) <= MAX_TENSORS, "too many files or tensors")
    for blob in (golden.observation, *(blob for file in files for blob in file.blobs)):
        count = -(-blob.size // CHUNK_BYTES)
        _require(len(blob.chunks) == count, f"{blob.size} bytes are not {count} chunks")
    _require(sum(file.size for file in files) <= MAX_POLICY_BYTES, "more bytes than a policy may have")
    for digest in (manifest.spec_hash, *manifest.chunks()):
        check_digest(digest)
    for tensor in tensors:
        fits = len(tensor.shape) <= 16 and math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] == tensor.data.size
        _require(fits, f"{tensor.name!r} has another size")
    _require(len({len(row) for row in golden.action}) == 1, "its golden action is no array")
    _require(golden.tolerance >= 0.0, "its tolerance is negative")
    _distinct([check_path(file.path) for file in files])


def _distinct(paths: Iterable[str]) -> None:
    """No file twice, and none where another one needs a folder, also on a disk that ignores case."""
    previous = "/"
    for path in sorted(path.lower() + "/" for path in paths):  # what lies in a folder follows it at once
        _require(not path.startswith(previous), f"{path[:200]!r} is named twice")
        previous = path


def _require(met: bool, otherwise: str) -> None:
    if not met:
        raise ValueError(otherwise)


class SigningKey:
    """The private key of whoever publishes policies."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new key in a new file that its owner alone may read; raises UserError where there is a file already."""
        key = Ed25519PrivateKey.generate()
        try:
            write_whole(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), put=os.link)
        except OSError as error:
            raise UserError(
                f"the signing key {str(path)!r} could not be written ({error.strerror}), so nothing can be signed; "
                "use the key that exists, or name another file."
            ) from error
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The key in a PEM file; raises UserError when it is missing or no Ed25519 key."""
        try:
            key = load_pem_private_key(read_key(path), password=None)
            if not isinstance(key, Ed25519PrivateKey):
                raise ValueError("it is another kind of key than Ed25519")
        except (UserError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UserError(
                f"{str(path)!r} holds no signing key ({error}), so no policy can be published; make one, or name its "
                "file."
            ) from error
        return cls(key)

    def public_pem(self) -> bytes:
        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def sign(self, manifest: Manifest) -> bytes:
        """The manifest as it is stored and sent: 64 bytes of signature, then :meth:`Manifest.encode`."""
        body = manifest.encode()
        return self._key.sign(_PURPOSE + body) + body


class TrustedKeys:
    """The public keys that a robot trusts: one, or the old and the new while a fleet changes its key."""

    def __init__(self, pems: Sequence[bytes]) -> None:
        """Raises UserError where one of ``pems`` is no Ed25519 public key, or there is none."""
        try:
            keys = [load_pem_public_key(pem) for pem in pems]
        except (ValueError, UnsupportedAlgorithm) as error:
            raise _untrusting(str(error)) from error
        self._keys = [key for key in keys if isinstance(key, Ed25519PublicKey)]
        if not keys or len(self._keys) < len(keys):
            raise _untrusting("it takes Ed25519 keys, at least one")

    def read(self, signed: bytes) -> Manifest:
        """The manifest in what :meth:`SigningKey.sign` returned.

        The signature is verified before anything is parsed.  Raises ContractError when none of the keys made it.
        """
        signature, body = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if len(signed) > MAX_SIGNED_BYTES or not any(_made(key, signature, body) for key in self._keys):
            raise ContractError(
                f"a policy manifest of {len(signed)} bytes is not signed by a key that this robot trusts, so it is "
                "refused and the policy in use stays; look for a foreign server, or give the robot the fleet's key."
            )
        return Manifest.decode(body)


def _made(key: Ed25519PublicKey, signature: bytes, body: bytes) -> bool:
    try:
        key.verify(signature, _PURPOSE + body)
    except InvalidSignature:
        return False
    return True


def _untrusting(why: str) -> UserError:
    return UserError(
        f"the public key for policies cannot be used ({why}), so no policy could be verified; copy the fleet's public "
        "key to this robot again."
    )
