"""After a power cut at any point, what was published, promoted, fetched and used is there, whole and verified."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.fleet.checkpoints import KEY, PUBLISHED, SPEC_HASH, TRUSTED, Link
from tests.fleet.sqlite_files import PowerCut
from tests.fleet.test_power_cut import at
from tests.fleet.torn_disk import TornDisk
from vla_rl.fleet.policy_cache import PolicyCache
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import Outcomes

WHO = ("learner", "a test")
Told = dict[str, list[int]]


def small(folder: Path, number: int) -> Path:
    (folder / "base").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"number": number}))
    save_file({"head": np.full(3, number, np.float32)}, folder / "base" / "model.safetensors")
    return folder


def cuts(
    tmp_path: Path, live: Callable[[TornDisk, Told], None], left: str, seed: int
) -> Iterator[tuple[TornDisk, Told]]:
    """What is left when the power is cut at each point in turn, and what the program was told until then."""
    for number in count(1):
        root = tmp_path / f"at{number}"
        root.mkdir()
        disk, told = TornDisk(root), Told()
        disk.before = at(number, disk.cut)
        with contextlib.suppress(PowerCut):
            live(disk, told)
        yield disk.left(tmp_path / f"left{number}", left, seed), told
        if disk.points < number:
            assert number > 20
            return


@pytest.mark.parametrize(("left", "seed"), [("torn", 1), pytest.param("nothing", 0, marks=pytest.mark.full)])
def test_what_was_published_and_promoted_survives_a_power_cut_at_any_point(left, seed, tmp_path):
    folders = [small(tmp_path / str(number), number) for number in (1, 2)]

    def live(disk: TornDisk, told: Told) -> None:
        made = Registry(disk.root / "server", disk=disk)
        for folder in folders:
            told["published"] = [*told.get("published", ()), made.publish(folder, PUBLISHED, KEY, *WHO)]
            made.promote(told["published"][-1], *WHO)
            told["active"] = told["published"][-1:]
            made.record(len(told["published"]), "arm", 1, Outcomes(1, 1))
            told["episodes"] = [len(told["published"])]

    for disk, told in cuts(tmp_path, live, left, seed):
        made = Registry(disk.root / "server", disk=disk)
        assert {*told.get("published", ())} <= {*made.releases.stages}
        for version in made.releases.stages:  # nothing that counts lacks anything
            assert TRUSTED.read(made.manifest(version)).version == version
            for digest, size in made.get(version).chunks().items():
                assert hashlib.sha256(made.chunk(digest, 0, size)).hexdigest() == digest
        assert (made.releases.active or 0) >= sum(told.get("active", ()))
        counted = sum(one.episodes for robots in made.outcomes().values() for one in robots.values())
        assert counted >= sum(told.get("episodes", ()))
        shown = max([0, *made.releases.stages])
        assert made.publish(folders[0], PUBLISHED, KEY, *WHO) > shown, "its number is used once"


@pytest.mark.parametrize(("left", "seed"), [("torn", 1), pytest.param("nothing", 0, marks=pytest.mark.full)])
def test_a_robots_policies_survive_a_power_cut_at_any_point(left, seed, tmp_path):
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

    for disk, told in cuts(tmp_path, live, left, seed):
        cache = PolicyCache(disk.root / "robot", TRUSTED, disk)
        used = cache.in_use()[0] if cache.in_use() else 0
        assert used >= sum(told.get("used", ()))
        for version in {*told.get("here", ()), *cache.in_use(), *cache.versions()}:
            assert cache.get(version).manifest.version == version
            assert (cache.get(version).folder / "config.json").read_text() == json.dumps({"number": version})
        assert cache.fetch(2, SPEC_HASH, Link(made)).manifest.version == 2
