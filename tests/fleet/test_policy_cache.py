"""Policies arrive whole or not at all, whatever happens to link, disk, server and power; so are they published."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.fleet.checkpoints import (
    KEY,
    PUBLISHED,
    SPEC_HASH,
    TRUSTED,
    Link,
    checkpoint,
    content,
    digest,
    registry,
    signing_key,
)
from tests.fleet.test_power_cut import at
from tests.fleet.torn_disk import PowerCut, TornDisk
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.fleet.disk import Disk, File
from vla_rl.fleet.manifest import CHUNK_BYTES, CLIENT
from vla_rl.fleet.policy_cache import SPARE_BYTES, PolicyCache
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import Outcomes

WHO = ("learner", "a test")
Told = dict[str, list[int]]
LEFT = [("torn", 3), *(pytest.param(left, 1, marks=pytest.mark.full) for left in ("torn", "nothing"))]


def small(folder: Path, number: int) -> Path:
    (folder / "base").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"number": number}))
    save_file({"head": np.full(3, number, np.float32)}, folder / "base" / "model.safetensors")
    return folder


def cuts(
    tmp_path: Path, live: Callable[[TornDisk, Told], None], left: str, stride: int
) -> Iterator[tuple[TornDisk, Told]]:
    """What is left when the power is cut at every ``stride``-th point, and what the program was told until then."""
    for number in count(1, stride):
        root = tmp_path / f"at{number}"
        root.mkdir()
        disk, told = TornDisk(root), Told()
        disk.before = at(number, disk.cut)
        with contextlib.suppress(PowerCut):
            live(disk, told)
        yield disk.left(tmp_path / f"left{number}", left, number), told
        if disk.points < number:
            assert number > 20
            return


@pytest.mark.parametrize(("left", "stride"), LEFT)
def test_what_was_published_and_promoted_survives_a_power_cut_at_any_point(left, stride, tmp_path):
    folders = [small(tmp_path / str(number), number) for number in (1, 2)]

    def live(disk: TornDisk, told: Told) -> None:
        made = Registry(disk.root / "server", disk=disk)
        for folder in folders:
            told["published"] = [*told.get("published", ()), made.publish(folder, PUBLISHED, KEY, *WHO)]
            made.promote(told["published"][-1], *WHO)
            told["active"] = told["published"][-1:]
            made.record(len(told["published"]), "arm", 1, Outcomes(1, 1))
            told["episodes"] = [len(told["published"])]

    for disk, told in cuts(tmp_path, live, left, stride):
        made = Registry(disk.root / "server", disk=disk)
        assert {*told.get("published", ())} <= {*made.releases.stages}
        for version in made.releases.stages:  # nothing that counts lacks anything
            assert TRUSTED.read(made.manifest(version)).version == version
            for name, size in made.get(version).chunks().items():
                assert hashlib.sha256(made.chunk(name, 0, size)).hexdigest() == name
        assert (made.releases.active or 0) >= sum(told.get("active", ()))
        counted = sum(one.episodes for robots in made.outcomes().values() for one in robots.values())
        assert counted >= sum(told.get("episodes", ()))
        shown = max([0, *made.releases.stages])
        assert made.publish(folders[0], PUBLISHED, KEY, *WHO) > shown, "its number is used once"


@pytest.mark.parametrize(("left", "stride"), LEFT)
def test_a_robots_policies_survive_a_power_cut_at_any_point(left, stride, tmp_path):
    made = Registry(tmp_path / "server")
    for number in (1, 2, 3):
        made.publish(small(tmp_path / str(number), number), PUBLISHED, KEY, *WHO)

    def live(disk: TornDisk, told: Told) -> None:
        cache = PolicyCache(disk.root / "robot", TRUSTED, disk)
        for version in (1, 2, 3):
            cache.fetch(version, SPEC_HASH, Link(made))
            told["here"] = [*told.get("here", ()), version][-2:]  # the first one goes when the third comes
            cache.use(version)
            told["used"] = [version]

    for disk, told in cuts(tmp_path, live, left, stride):
        cache = PolicyCache(disk.root / "robot", TRUSTED, disk)
        used = cache.in_use()[0] if cache.in_use() else 0
        assert used >= sum(told.get("used", ()))
        for version in {*told.get("here", ()), *cache.in_use(), *cache.versions()}:
            assert cache.get(version).manifest.version == version
            assert (cache.get(version).folder / "config.json").read_text() == json.dumps({"number": version})
        assert cache.fetch(2, SPEC_HASH, Link(made)).manifest.version == 2


def fetched(cache, version, link):
    """Fetch ``version`` over a link that breaks, as often as it takes; returns how often it broke."""
    breaks = 0
    while True:
        try:
            cache.fetch(version, SPEC_HASH, link)
            return breaks
        except ConnectionResetError:
            breaks += 1
            link.budget += 300_000


def test_the_folder_is_that_of_the_learner_bit_for_bit(tmp_path):
    cache = PolicyCache(tmp_path / "robot", TRUSTED)
    got = cache.fetch(1, SPEC_HASH, Link(registry(tmp_path, 1)))
    assert content(got.folder) == content(tmp_path / "1")
    assert got.observation == PUBLISHED.observation and got.manifest.version == 1
    assert cache.versions() == (1,) and not list((tmp_path / "robot" / "incoming").iterdir())


def test_an_interrupted_fetch_goes_on_in_the_middle_of_a_chunk(tmp_path):
    link = Link(registry(tmp_path, 1), budget=100_000, piece=70_000)
    cache = PolicyCache(tmp_path / "robot", TRUSTED)
    assert fetched(cache, 1, link) > 10
    assert link.carried == sum(cache.get(1).manifest.chunks().values())  # nothing came twice
    assert content(cache.get(1).folder) == content(tmp_path / "1")
    assert any(0 < offset < CHUNK_BYTES for _, offset in link.asked)


def test_only_what_changed_is_fetched(tmp_path):
    made = registry(tmp_path, 2)
    cache = PolicyCache(tmp_path / "robot", TRUSTED)
    cache.fetch(1, SPEC_HASH, Link(made))
    cache.use(1)
    link = Link(made)
    cache.fetch(2, SPEC_HASH, link)
    assert {name for name, _ in link.asked} == made.get(2).chunks().keys() - made.get(1).chunks().keys()
    assert link.carried < 1000 < CHUNK_BYTES < sum(made.get(2).chunks().values())
    assert content(cache.get(2).folder) == content(tmp_path / "2")


def test_the_last_two_versions_stay_and_a_third_while_it_waits(tmp_path):
    made = registry(tmp_path, 4)
    cache = PolicyCache(tmp_path / "robot", TRUSTED)
    assert cache.in_use() == ()
    for version in (1, 2, 3):
        cache.fetch(version, SPEC_HASH, Link(made))
        cache.use(version)
    assert cache.in_use() == (3, 2)
    cache.fetch(4, SPEC_HASH, Link(made))
    assert cache.versions() == (2, 3, 4)
    cache.use(2)  # a rollback needs no link
    again = PolicyCache(tmp_path / "robot", TRUSTED)
    assert again.in_use() == (2, 3)
    with pytest.raises(UserError, match="version 1 is not on this robot"):
        again.use(1)


def test_what_is_not_signed_by_the_fleet_is_refused_before_anything_is_fetched(tmp_path):
    link = Link(registry(tmp_path, 1))
    with pytest.raises(ContractError, match="not signed"):
        PolicyCache(tmp_path / "robot", type(TRUSTED)([signing_key().public_pem()])).fetch(1, SPEC_HASH, link)
    assert not link.asked


def test_another_version_than_was_asked_for_is_refused(tmp_path):
    made = registry(tmp_path, 2)
    link = Link(made)
    link.manifest = lambda version: made.manifest(1)
    with pytest.raises(ContractError, match="2 was asked for and 1 came"):
        PolicyCache(tmp_path / "robot", TRUSTED).fetch(2, SPEC_HASH, link)
    assert not link.asked


def test_a_policy_for_another_robot_or_client_is_refused_before_it_is_fetched(tmp_path):
    made = registry(tmp_path, 1)
    link, cache = Link(made), PolicyCache(tmp_path / "robot", TRUSTED)
    with pytest.raises(UserError, match="for another robot"):
        cache.fetch(1, digest("another spec"), link)
    link.manifest = lambda version: KEY.sign(replace(made.get(1), min_client=CLIENT + 1))
    with pytest.raises(UserError, match="update vla-rl"):
        cache.fetch(1, SPEC_HASH, link)
    assert not link.asked and cache.versions() == ()


@pytest.mark.parametrize("wrong", ["damaged", "too long", "endless nothing"])
def test_a_server_that_sends_something_else_is_refused(tmp_path, wrong):
    link = Link(registry(tmp_path, 1))
    answers = {"damaged": lambda count: bytes(count), "too long": lambda count: bytes(count + 1)}
    link.chunk = lambda digest, offset, count: answers.get(wrong, lambda count: b"")(count)
    cache = PolicyCache(tmp_path / "robot", TRUSTED)
    with pytest.raises(ContractError, match="arrived damaged" if wrong == "damaged" else r"sent \d+ bytes"):
        cache.fetch(1, SPEC_HASH, link)
    assert cache.versions() == ()
    assert cache.fetch(1, SPEC_HASH, Link(link.registry)).manifest.version == 1  # and the right one is taken after it


def test_what_a_power_cut_spoilt_of_a_chunk_is_fetched_again(tmp_path):
    cache, link = PolicyCache(tmp_path / "robot", TRUSTED), Link(registry(tmp_path, 1), budget=2_500_000)
    with pytest.raises(ConnectionResetError):
        cache.fetch(1, SPEC_HASH, link)
    for part in (tmp_path / "robot" / "incoming").iterdir():
        part.write_bytes(bytes(part.stat().st_size))
    assert content(cache.fetch(1, SPEC_HASH, Link(link.registry)).folder) == content(tmp_path / "1")


class SmallDisk(Disk):
    """Holds ``room`` more bytes; says that it has ``claimed`` of them."""

    def __init__(self, room, claimed):
        self.room, self.claimed = room, claimed

    def free(self, folder):
        return self.claimed

    def open(self, path):
        file, disk = super().open(path), self

        class Limited:
            def write(self, data):
                if len(data) > disk.room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                disk.room -= len(data)
                return file.write(data)

            truncate, sync, close, write_all = file.truncate, file.sync, file.close, File.write_all

        return Limited()


def test_a_full_disk_leaves_the_old_policy_and_is_told(tmp_path):
    made = registry(tmp_path, 1)
    cache = PolicyCache(tmp_path / "robot", TRUSTED)
    cache.fetch(1, SPEC_HASH, Link(made))
    cache.use(1)
    folder = checkpoint(tmp_path / "2", 2)
    (folder / "more.bin").write_bytes(bytes(range(256)) * 40_000)  # 10 MB
    made.publish(folder, PUBLISHED, KEY, *WHO)
    link = Link(made)
    with pytest.raises(UserError, match=r"MB are free.*the policy in use stays"):
        PolicyCache(tmp_path / "robot", TRUSTED, SmallDisk(1 << 40, 50 << 20)).fetch(2, SPEC_HASH, link)
    assert not link.asked
    for room in (0, 6 << 20, 14 << 20):  # while it is fetched, and while it is put together
        with pytest.raises(UserError, match=r"disk is full.*the policy in use stays"):
            PolicyCache(tmp_path / "robot", TRUSTED, SmallDisk(room, 1 << 40)).fetch(2, SPEC_HASH, Link(made))
        again = PolicyCache(tmp_path / "robot", TRUSTED)
        assert again.in_use() == (1,) and content(again.get(1).folder) == content(tmp_path / "1")
        assert not list((tmp_path / "robot" / "incoming").iterdir())
    assert content(cache.fetch(2, SPEC_HASH, Link(made)).folder) == content(folder)


@pytest.mark.parametrize("lacking", [0, 1])
def test_what_has_arrived_needs_no_more_room(tmp_path, lacking):
    made, cache = registry(tmp_path, 1), PolicyCache(tmp_path / "robot", TRUSTED)
    with pytest.raises(ConnectionResetError):
        cache.fetch(1, SPEC_HASH, Link(made, budget=2_500_000))
    arrived = sum(path.stat().st_size for path in (tmp_path / "robot/incoming").iterdir())
    manifest = made.get(1)
    needed = sum(manifest.chunks().values()) - arrived + sum(file.size for file in manifest.files) + SPARE_BYTES
    again = PolicyCache(tmp_path / "robot", TRUSTED, SmallDisk(1 << 40, needed - lacking))
    if lacking:
        with pytest.raises(UserError, match="MB are free"):
            again.fetch(1, SPEC_HASH, Link(made))
    else:
        assert again.fetch(1, SPEC_HASH, Link(made)).manifest.version == 1
    assert arrived > 1 << 20


def test_flipped_bits_are_seen_and_mended(tmp_path):
    made = registry(tmp_path, 2)
    cache = PolicyCache(tmp_path / "robot", TRUSTED)
    folder = cache.fetch(1, SPEC_HASH, Link(made)).folder
    cache.use(1)
    weights = folder / "base" / "model.safetensors"
    spoilt = bytearray(weights.read_bytes())
    spoilt[-1] ^= 1
    weights.write_bytes(spoilt)
    with pytest.raises(ContractError, match="is damaged"):
        cache.get(1)
    link = Link(made)
    assert content(cache.fetch(2, SPEC_HASH, link).folder) == content(tmp_path / "2")  # not made of damaged chunks
    assert link.carried < CHUNK_BYTES  # only the damaged chunk of the two, and what changed
    cache.use(2)
    link = Link(made)
    assert content(cache.fetch(1, SPEC_HASH, link).folder) == content(tmp_path / "1")
    assert not link.asked  # all of it is in version 2 or undamaged
