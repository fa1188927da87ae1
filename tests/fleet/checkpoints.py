"""Small checkpoint folders, a registry that holds some, and links to it that break."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

from vla_rl.fleet.manifest import CHUNK_BYTES, Blob, FileEntry, Golden, Manifest, SigningKey, TensorEntry, TrustedKeys
from vla_rl.fleet.registry import Published, Registry


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def manifest(version: int = 2) -> Manifest:
    """One plain file, and one safetensors file with a tensor of two chunks."""
    weight = Blob(CHUNK_BYTES + 8, (digest("first"), digest("second")))
    files = (
        FileEntry("config.json", Blob(5, (digest("config"),))),
        FileEntry(
            "base/model.safetensors",
            Blob(64, (digest("head"),)),
            (
                TensorEntry("weight", "F32", (CHUNK_BYTES // 4 + 2,), weight),
                TensorEntry("empty", "BF16", (0, 3), Blob(0, ())),
            ),
        ),
    )
    golden = Golden(Blob(9, (digest("observation"),)), 3, ((0.5, -1.0), (0.25, 2.0)), 1e-3)
    return Manifest(version, 1, files, digest("spec"), golden, 40, 0.25, {"success": 0.75})


def signing_key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


KEY = signing_key()
TRUSTED = TrustedKeys([KEY.public_pem()])
SPEC_HASH = digest("spec")
PUBLISHED = Published(SPEC_HASH, b"an observation", 3, ((0.5, -1.0),), 1e-3)
FROZEN = np.arange(CHUNK_BYTES // 4 + 5, dtype=np.float32)  # two chunks


def checkpoint(folder: Path, number: int) -> Path:
    """A checkpoint whose head depends on ``number`` and whose backbone does not."""
    (folder / "base").mkdir(parents=True)
    (folder / "config.json").write_text(f'{{"number": {number}}}')
    (folder / "empty.txt").touch()
    save_file({"frozen": FROZEN}, folder / "base" / "model.safetensors")
    save_file({"head": np.full((3, 5), number, np.float32), "same": np.ones(7)}, folder / "model.safetensors")
    return folder


def registry(folder: Path, versions: int, **options: object) -> Registry:
    """A registry in ``folder/server`` with so many staged versions, made of ``folder/1`` and so on."""
    made = Registry(folder / "server", **options)  # type: ignore[arg-type]
    for number in range(1, versions + 1):
        made.publish(checkpoint(folder / str(number), number), PUBLISHED, KEY, "learner", "a test")
    return made


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Link:
    """A registry at the other end of a link that carries ``budget`` bytes of chunks, in pieces of ``piece``."""

    def __init__(self, registry: Registry, budget: float = np.inf, piece: int = 1 << 20) -> None:
        self.registry, self.budget, self.piece, self.carried = registry, budget, piece, 0
        self.asked: list[tuple[str, int]] = []

    def manifest(self, version: int) -> bytes:
        return self.registry.manifest(version)

    def chunk(self, digest: str, offset: int, count: int) -> bytes:
        self.asked.append((digest, offset))
        data = self.registry.chunk(digest, offset, min(count, self.piece))
        if self.carried + len(data) > self.budget:
            raise ConnectionResetError("the link broke")
        self.carried += len(data)
        return data
