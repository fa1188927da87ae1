"""Manifests and keys for tests."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from vla_rl.fleet.manifest import CHUNK_BYTES, Blob, FileEntry, Golden, Manifest, SigningKey, TensorEntry


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
