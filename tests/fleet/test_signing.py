"""A robot reads what the holder of the private key signed, and nothing else."""

from __future__ import annotations

import os
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.fleet.manifests import manifest, signing_key
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.manifest import MAX_SIGNED_BYTES, SIGNATURE_BYTES, Manifest, SigningKey, TrustedKeys


def test_what_was_signed_is_read():
    key = signing_key()
    assert TrustedKeys([key.public_pem()]).read(key.sign(manifest())) == manifest()


def test_while_keys_change_the_old_and_the_new_one_are_trusted():
    old, new = signing_key(), signing_key()
    trusted = TrustedKeys([old.public_pem(), new.public_pem()])
    assert trusted.read(old.sign(manifest(1))).version == 1
    assert trusted.read(new.sign(manifest(2))).version == 2


def test_anything_else_is_refused_before_it_is_parsed(monkeypatch):
    key = signing_key()
    signed, trusted = key.sign(manifest()), TrustedKeys([key.public_pem()])
    monkeypatch.setattr(Manifest, "decode", lambda data: pytest.fail("an unverified manifest was parsed"))
    flipped = [bytes([*signed[:at], signed[at] ^ 1, *signed[at + 1 :]]) for at in (0, SIGNATURE_BYTES, len(signed) - 1)]
    bare = key._key.sign(manifest().encode()) + manifest().encode()  # signed as something else
    for wrong in (b"", signed[:-1], signed + b" ", signing_key().sign(manifest()), bare, *flipped):
        with pytest.raises(ContractError, match="not signed by a key"):
            trusted.read(wrong)


def test_a_manifest_that_is_too_large_is_not_even_hashed(monkeypatch):
    key = signing_key()
    trusted = TrustedKeys([key.public_pem()])
    monkeypatch.setattr("vla_rl.fleet.manifest._made", lambda *parts: pytest.fail("all of it was hashed"))
    with pytest.raises(ContractError, match="not signed by a key"):
        trusted.read(bytes(MAX_SIGNED_BYTES + 1))


def test_a_private_key_is_its_owners_and_never_replaced(tmp_path):
    path = tmp_path / "signing.pem"
    key = SigningKey.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SigningKey.load(path).public_pem() == key.public_pem()
    with pytest.raises(UserError, match="use the key that exists"):
        SigningKey.create(path)
    assert SigningKey.load(path).public_pem() == key.public_pem()


def test_of_two_that_make_a_key_at_once_one_wins_and_a_killed_one_leaves_none(tmp_path, monkeypatch):
    path, real = tmp_path / "signing.key", os.fsync

    def slow(handle):  # another is quicker than this one, whose key is not yet whole
        monkeypatch.setattr("os.fsync", real)
        assert not path.exists()
        made.append(SigningKey.create(path))
        real(handle)

    made: list[SigningKey] = []
    monkeypatch.setattr("os.fsync", slow)
    with pytest.raises(UserError, match="use the key that exists"):
        SigningKey.create(path)
    assert SigningKey.load(path).public_pem() == made[0].public_pem()


def test_files_without_such_a_key_are_named(tmp_path):
    other = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "other.pem").write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "text.pem").write_text("no key")
    for name in ("other", "text", "missing"):
        with pytest.raises(UserError, match=f"{name}.pem"):
            SigningKey.load(tmp_path / f"{name}.pem")
    public = other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for pems in ([], [b"no key"], [public], [signing_key().public_pem(), public]):
        with pytest.raises(UserError, match="no policy could be verified"):
            TrustedKeys(pems)
