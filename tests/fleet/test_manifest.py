"""Manifests come back as they were, and nothing else is read."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.fleet.checkpoints import digest, manifest, signing_key
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.manifest import (
    CHUNK_BYTES,
    CLIENT,
    MAX_MANIFEST_BYTES,
    MAX_SIGNED_BYTES,
    SIGNATURE_BYTES,
    Manifest,
    SigningKey,
    TrustedKeys,
    check_client,
    check_digest,
    spec_hash,
)

SPEC = EnvSpec(
    name="arm",
    images={"wrist": ArraySpec((8, 8, 3), "uint8", 0, 255)},
    state=ArraySpec((2,), "float32", -1.0, 1.0),
    action=ArraySpec((2,), "float32", -1.0, (1.0, 2.0)),
    tasks=("lift",),
    control_dt=0.1,
    time_limit=50,
    max_chunk=8,
)


def test_a_manifest_comes_back_as_it_was():
    whole = manifest()
    assert Manifest.decode(whole.encode()) == whole
    first = replace(whole, parent=None)
    assert Manifest.decode(first.encode()) == first


def test_every_chunk_is_listed_once_with_its_size():
    again = replace(manifest().files[0], path="copy.json")  # the same content at another place
    whole = replace(manifest(), files=(*manifest().files, again))
    assert whole.chunks() == {
        digest("config"): 5,
        digest("head"): 64,
        digest("first"): CHUNK_BYTES,
        digest("second"): 8,
        digest("observation"): 9,
    }
    assert [file.size for file in whole.files] == [5, 64 + CHUNK_BYTES + 8, 5]


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "..", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", ".hidden", "a\\b", "a\0b", "a\nb"),
        *("c:x", "a" * 101, "/".join("abcdefghi"), "base/model.safetensors", "Config.json", "config.json/x"),
    ],
)
def test_files_stay_in_the_folder_and_beside_each_other(path):
    data = json.loads(manifest().encode())
    data["files"].append({**data["files"][0], "path": path})
    with pytest.raises(ContractError, match="nothing is fetched"):
        Manifest.decode(json.dumps(data).encode())


def changed(*where, to):
    data = item = json.loads(manifest().encode())
    for key in where[:-1]:
        item = item[key]
    item[where[-1]] = to
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("where", "to"),
    [
        (("version",), 0),
        (("version",), True),
        (("version",), 1.5),
        (("version",), 1 << 62),
        (("parent",), "1"),
        (("spec_hash",), digest("spec").upper()),
        (("spec_hash",), None),
        (("progress",), float("nan")),
        (("metrics",), []),
        (("metrics", "success"), "high"),
        (("unheard_of",), 1),
        (("golden", "action"), []),
        (("golden", "action"), [[1.0], [1.0, 2.0]]),
        (("golden", "tolerance"), -0.1),
        (("golden", "observation", "size"), CHUNK_BYTES + 1),
        (("files",), {}),
        (("files", 0, "head", "size"), -1),
        (("files", 0, "head", "chunks"), []),
        (("files", 0, "head", "chunks", 0), "../" * 21 + "x"),
        (("files", 1, "tensors", 0, "shape", 0), 7),
        (("files", 1, "tensors", 0, "dtype"), "F128"),
        (("files", 1, "tensors", 0, "dtype"), ["F32"]),
        (("files", 1, "tensors", 0, "data", "chunks"), [digest("first")]),
        (("files", 1, "tensors", 1, "shape"), [-1, 0]),
    ],
)
def test_a_field_that_is_out_of_bounds_is_refused(where, to):
    with pytest.raises(ContractError, match="cannot be read"):
        Manifest.decode(changed(*where, to=to))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b" " * (MAX_MANIFEST_BYTES + 1)])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(ContractError, match="cannot be read"):
        Manifest.decode(data)


def test_a_manifest_for_a_newer_client_is_refused():
    check_client(manifest())
    with pytest.raises(UserError, match="update vla-rl"):
        check_client(replace(manifest(), min_client=CLIENT + 1))


def test_only_a_digest_names_a_chunk():
    assert check_digest(digest("x")) == digest("x")
    for wrong in ("", "x" * 64, digest("x")[:-1], "../" + digest("x")[3:], digest("x") + "\n", None):
        with pytest.raises(ContractError, match="no SHA-256"):
            check_digest(wrong)


def test_the_hash_of_a_spec_is_of_what_a_policy_depends_on():
    assert spec_hash(SPEC) == spec_hash(replace(SPEC, name="arm 2", tasks=("lift", "place"), time_limit=9))
    others = [
        replace(SPEC, images={}),
        replace(SPEC, state=replace(SPEC.state, high=2.0)),
        replace(SPEC, action=replace(SPEC.action, low=-2.0)),
        replace(SPEC, control_dt=0.05),
    ]
    assert len({spec_hash(SPEC), *map(spec_hash, others)}) == 5


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
