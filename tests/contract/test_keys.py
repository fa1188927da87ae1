"""Files that guard: who may read a secret, and that nothing is there in part."""

from __future__ import annotations

import os
import stat

import pytest

from tests.tls import secret_file
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_key, write_whole


def test_a_secret_is_read_without_blanks_around_it(tmp_path):
    assert read_key(secret_file(tmp_path / "key", b" 0123456789abcdef\n")) == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        *(
            (content, 0o600, r"holds \d+ bytes, so whoever guesses them .* openssl rand")
            for content in (b"", b" " * 20)
        ),
        (b"0123456789abcde", 0o600, r"holds 15 bytes"),
        *((b"0123456789abcdef", mode, r"other users of this machine.* chmod 600") for mode in (0o640, 0o604, 0o620)),
    ],
)
def test_a_secret_that_is_short_or_read_by_others_is_refused(content, mode, says, tmp_path):
    secret_file(tmp_path / "key", content).chmod(mode)
    with pytest.raises(UserError, match=says):
        read_key(tmp_path / "key")
    with pytest.raises(UserError, match="cannot be read"):
        read_key(tmp_path / "none")


def test_what_guards_is_its_owners_at_once_and_never_in_part(tmp_path, monkeypatch):
    path, before, seen = tmp_path / "signing.key", b"old", list[tuple[bytes, set[int]]]()
    path.write_bytes(before)

    def look(real):
        def called(*given, **options):
            asides = {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir() if one != path}
            seen.append((path.read_bytes(), asides))
            return real(*given, **options)

        return called

    for name in ("fsync", "replace"):
        monkeypatch.setattr(f"os.{name}", look(getattr(os, name)))
    write_whole(path, b"new")
    assert seen == [(before, {0o600}), (before, {0o600}), (b"new", set())]
    assert path.read_bytes() == b"new" and [one.name for one in tmp_path.iterdir()] == ["signing.key"]


def test_a_disk_that_takes_nothing_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    (tmp_path / "list").write_bytes(b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "list", b"new")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("list", b"old")]
