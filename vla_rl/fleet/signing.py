"""Ed25519 signatures of manifests: a robot uses only policies that the holder of the private key published."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

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

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.trust import read_key, write_whole
from vla_rl.fleet.manifest import MAX_MANIFEST_BYTES, Manifest

SIGNATURE_BYTES = 64
MAX_SIGNED_BYTES = SIGNATURE_BYTES + MAX_MANIFEST_BYTES
_PURPOSE = b"vla-rl policy manifest\n"  # a signature of anything else is none of a manifest


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
        except (UserError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UserError(
                f"{str(path)!r} holds no signing key ({error}), so no policy can be published; make one, or name its "
                "file."
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise UserError(
                f"{str(path)!r} holds another kind of key than Ed25519, so no policy can be published; make a new one."
            )
        return cls(key)

    def public_pem(self) -> bytes:
        """What robots trust, as PEM."""
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
