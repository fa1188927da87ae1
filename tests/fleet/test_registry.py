"""Versions, who runs which, and what survives."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from tests.fleet.checkpoints import KEY, PUBLISHED, TRUSTED, checkpoint, registry
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.intervals import poisson_rate, wilson
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.registry import History, Registry, read_header
from vla_rl.fleet.releases import CanaryRule, Outcomes, choose_canaries, judge

WHO = ("an operator", "a test")
ROBOTS = [f"arm{i}" for i in range(20)]


def test_unchanged_tensors_are_stored_once(tmp_path):
    made = registry(tmp_path, 1)
    before = set((tmp_path / "server" / "chunks").iterdir())
    made.publish(checkpoint(tmp_path / "2", 2), PUBLISHED, KEY, *WHO)
    first, second = made.get(1), made.get(2)
    fresh = {path.name for path in set((tmp_path / "server" / "chunks").iterdir()) - before}
    assert fresh == second.chunks().keys() - first.chunks().keys()
    tensors = {t.name: t.data for file in second.files for t in file.tensors}
    assert fresh == {*tensors["head"].chunks, *second.files[1].head.chunks}  # and config.json; the header is the same
    assert len(tensors["frozen"].chunks) == 2


def test_a_manifest_says_what_was_published(tmp_path):
    made = registry(tmp_path, 2)
    made.promote(2, *WHO)
    made.publish(checkpoint(tmp_path / "3", 3), PUBLISHED, KEY, *WHO)
    manifest = TRUSTED.read(made.manifest(3))
    assert manifest == made.get(3)
    assert (manifest.version, manifest.parent, manifest.spec_hash) == (3, 2, PUBLISHED.spec_hash)
    assert (manifest.golden.seed, manifest.golden.action) == (3, ((0.5, -1.0),))
    assert [file.path for file in manifest.files] == [
        "base/model.safetensors",
        "config.json",
        "empty.txt",
        "model.safetensors",
    ]
    blob = manifest.golden.observation
    assert made.chunk(blob.chunks[0], 3, 100) == PUBLISHED.observation[3:]
    with pytest.raises(UserError, match="no policy version 4"):
        made.manifest(4)
    for wrong in ("../history", "0" * 64):
        with pytest.raises(ContractError):
            made.chunk(wrong, 0, 10)


def test_staged_canary_active_retired(tmp_path):
    made = registry(tmp_path, 3)
    assert made.releases.version_for("arm0") is None
    made.promote(1, *WHO)
    chosen = made.try_on(2, ROBOTS, *WHO)
    assert len(chosen) == 2  # 10 % of 20
    assert {robot: made.releases.version_for(robot) for robot in ROBOTS} == {r: 1 + (r in chosen) for r in ROBOTS}
    assert made.releases.stages == {1: "active", 2: "canary", 3: "staged"}
    made.promote(2, *WHO)
    assert {made.releases.version_for(robot) for robot in ROBOTS} == {2}
    assert made.releases.stages == {1: "retired", 2: "active", 3: "staged"}
    for change in (made.promote, lambda version, *who: made.try_on(version, ROBOTS, *who)):
        with pytest.raises(UserError, match="active already"):
            change(2, *WHO)


def test_another_canary_ends_the_one_before(tmp_path):
    made = registry(tmp_path, 3)
    made.promote(1, *WHO)
    made.try_on(2, ROBOTS[:10], *WHO)
    made.try_on(3, ROBOTS[10:], *WHO)
    assert made.releases.stages == {1: "active", 2: "retired", 3: "canary"}
    assert {made.releases.version_for(robot) for robot in ROBOTS[:10]} == {1}


def test_a_rollback_is_a_new_head_and_no_number_is_used_again(tmp_path):
    made = registry(tmp_path, 3)
    for version in (1, 2, 3):
        made.promote(version, *WHO)
    head = made.releases.head
    assert made.roll_back(*WHO) == 2
    assert made.releases.head == head + 1
    assert made.roll_back(*WHO) == 1
    assert made.releases.stages == {1: "active", 2: "retired", 3: "retired"}
    with pytest.raises(UserError, match="nothing to go back to"):
        made.roll_back(*WHO)
    assert made.publish(checkpoint(tmp_path / "4", 4), PUBLISHED, KEY, *WHO) == 4


def test_a_rollback_takes_the_canary_back_first(tmp_path):
    made = registry(tmp_path, 3)
    made.promote(1, *WHO)
    made.promote(2, *WHO)
    made.try_on(3, ROBOTS, *WHO)
    assert made.roll_back(*WHO) == 2
    assert made.releases.stages[3] == "retired" and made.releases.version_for(ROBOTS[0]) == 2


def test_pins_hold_whatever_is_promoted(tmp_path):
    made = registry(tmp_path, 3)
    made.promote(1, *WHO)
    made.pin(1, *WHO, robot="arm0")
    made.promote(2, *WHO)
    assert [made.releases.version_for(robot) for robot in ("arm0", "arm1")] == [1, 2]
    assert "arm0" not in made.try_on(3, ["arm0", "arm1"], *WHO)
    made.pin(2, *WHO)
    assert [made.releases.version_for(robot) for robot in ("arm0", "arm1")] == [1, 2]
    with pytest.raises(UserError, match="no robot is free"):
        made.try_on(3, ROBOTS, *WHO)
    made.unpin(*WHO, robot="arm0")
    assert made.releases.version_for("arm0") == 2
    with pytest.raises(UserError, match="'arm0' is not pinned"):
        made.unpin(*WHO, robot="arm0")
    with pytest.raises(UserError, match="no policy version 9"):
        made.pin(9, *WHO)


def test_everything_is_there_when_it_is_opened_again(tmp_path):
    made = registry(tmp_path, 3, clock=lambda: 7.0)
    made.promote(1, "ann", "it is the first")
    made.pin(2, "bob", "he likes it", robot="arm3")
    made.record(5, "arm3", 2, Outcomes(1, 1, 8.0))
    again = Registry(tmp_path / "server")
    assert (again.releases, again.outcomes(), again.history()) == (made.releases, made.outcomes(), made.history())
    assert again.history()[-1] == {
        "do": "pin",
        "who": "bob",
        "why": "he likes it",
        "at": 7.0,
        "robot": "arm3",
        "version": 2,
    }


def test_changes_of_one_process_are_seen_by_another(tmp_path):
    server, learner = registry(tmp_path, 1), Registry(tmp_path / "server")
    assert learner.publish(checkpoint(tmp_path / "2", 2), PUBLISHED, KEY, *WHO) == 2
    server.promote(2, *WHO)
    assert learner.releases == server.releases and learner.releases.active == 2


def test_two_who_publish_at_once_get_two_numbers(tmp_path):
    made = registry(tmp_path, 1)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: Registry(tmp_path / "server").publish(tmp_path / "1", PUBLISHED, KEY, *WHO))
    assert sorted(made.releases.stages) == [1, 2, 3, 4, 5]
    assert len({made.manifest(version) for version in range(1, 6)}) == 5


def test_a_number_whose_manifest_was_written_is_not_used_again(tmp_path):
    made = registry(tmp_path, 1)
    (tmp_path / "server" / "manifests" / f"{7:010d}").touch()  # died before it counted
    assert made.publish(tmp_path / "1", PUBLISHED, KEY, *WHO) == 8


def test_old_versions_go_and_those_in_use_stay(tmp_path):
    made = registry(tmp_path, 6)
    for version in (1, 2, 4):
        made.promote(version, *WHO)
    made.pin(1, *WHO, robot="arm0")
    assert made.remove_old(1, *WHO) > 0
    assert [version for version, stage in made.releases.stages.items() if stage == "removed"] == [3, 5]
    for version in (1, 2, 4, 6):
        assert all(len(made.chunk(digest, 0, size)) == size for digest, size in made.get(version).chunks().items())
    with pytest.raises(UserError, match="no policy version 3"):
        made.promote(3, *WHO)
    assert made.roll_back(*WHO) == 2


@pytest.mark.parametrize("breaks", ["no config", "link", "name", "damaged"])
def test_a_folder_that_robots_could_not_use_is_refused(tmp_path, breaks):
    made = registry(tmp_path, 0)
    folder = checkpoint(tmp_path / "bad", 1)
    if breaks == "no config":
        (folder / "config.json").unlink()
    elif breaks == "link":
        (folder / "secret").symlink_to("/etc/passwd")
    elif breaks == "name":
        (folder / "a b").touch()
    else:
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError):
        made.publish(folder, PUBLISHED, KEY, *WHO)
    assert made.releases.stages == {}


def test_what_is_not_finite_is_not_signed(tmp_path):
    made = registry(tmp_path, 0)
    bad = replace(PUBLISHED, tolerance=float("nan"))
    with pytest.raises(ContractError, match="cannot be written"):
        made.publish(checkpoint(tmp_path / "1", 1), bad, KEY, *WHO)
    assert made.releases.stages == {}


def test_an_episode_counts_once(tmp_path):
    made = registry(tmp_path, 1)
    for position in (1, 2, 2, 1, 3):
        made.record(position, "arm0", 1, Outcomes(1, 1, 10.0, 2, 1))
    Registry(tmp_path / "server").record(3, "arm0", 1, Outcomes(1, 0))
    made.record(4, "arm1", 1, Outcomes(1, 0, 5.0))
    assert made.outcomes() == {1: {"arm0": Outcomes(3, 3, 30.0, 6, 3), "arm1": Outcomes(1, 0, 5.0)}}


def test_a_canary_that_does_worse_is_rolled_back_by_itself(tmp_path):
    made = registry(tmp_path, 2, rule=CanaryRule(min_episodes=5))
    made.promote(1, *WHO)
    for position in range(40):
        assert made.record(position, "arm0", 1, Outcomes(1, 1, 10.0)) is None
    chosen = made.try_on(2, ROBOTS, *WHO)
    (other, *_) = (robot for robot in ROBOTS if robot not in chosen)
    for position in range(40, 50):  # who never had it says how bad it is
        assert not made.record(position, other, 2, Outcomes(1, 0, 10.0)).compared
    for position in range(50, 54):
        assert not made.record(position, chosen[0], 2, Outcomes(1, 0, 10.0)).rollback
    assert made.releases.canary == 2
    assert made.record(54, chosen[0], 2, Outcomes(1, 0, 10.0)).rollback
    assert (made.releases.canary, made.releases.active, made.releases.stages[2]) == (None, 1, "retired")
    last = made.history()[-1]
    assert (last["do"], last["who"], last["version"]) == ("roll back", "canary rule", 2)
    assert "0/5" in last["why"] and "40/40" in last["why"]


RULE = CanaryRule(min_episodes=5)


@pytest.mark.parametrize(
    ("canary", "active", "rollback"),
    [
        ((10, 0), (100, 90), True),
        ((100, 70), (100, 90), True),
        ((100, 80), (100, 90), False),  # the intervals overlap: [.71, .87] and [.83, .94]
        ((100, 90), (100, 70), False),  # better
        ((4, 0), (100, 100), False),  # too few
        ((100, 0), (4, 4), False),
        ((5, 0), (8, 8), True),
    ],
)
def test_a_canary_is_taken_back_when_its_interval_lies_below(canary, active, rollback):
    verdict = judge(Outcomes(*canary), Outcomes(*active), RULE)
    assert verdict.rollback is rollback
    if min(canary[0], active[0]) >= 5:
        assert rollback == (wilson(canary[1], canary[0])[1] < wilson(active[1], active[0])[0])
        assert f"{canary[1]}/{canary[0]}" in verdict.why and f"{active[1]}/{active[0]}" in verdict.why


def test_a_rise_of_interventions_or_clips_per_minute_is_an_alarm():
    active = Outcomes(50, 40, 3000.0, 50, 100)
    assert judge(Outcomes(10, 8, 600.0, 10, 20), active, RULE).alarms == ()
    more = judge(Outcomes(10, 8, 600.0, 40, 20), active, RULE)
    assert not more.rollback and len(more.alarms) == 1 and "interventions per minute" in more.alarms[0]
    low, high = (poisson_rate(40, 10)[0], poisson_rate(50, 50)[1])  # in minutes
    assert f"at least {low:.2g} interventions" in more.alarms[0] and f"at most {high:.2g};" in more.alarms[0]
    overlapping = Outcomes(10, 8, 600.0, 16, 20)
    assert poisson_rate(50, 50)[0] < poisson_rate(16, 10)[0] < high < 1.6 < poisson_rate(16, 10)[1]
    assert judge(overlapping, active, RULE).alarms == ()
    assert "clips per minute" in judge(Outcomes(10, 8, 600.0, 10, 90), active, RULE).alarms[0]
    assert judge(Outcomes(10, 8, 60.0, 10, 20), active, RULE).alarms != ()  # the same number in less time


def test_how_often_the_rule_is_right():
    """The docstring's figures, with fewer trials."""
    generator = np.random.default_rng(0)

    def taken_back(active_rate, canary_rate, active_episodes, trials=60):
        count, rule = 0, CanaryRule()
        for _ in range(trials):
            active = Outcomes(active_episodes, int(generator.binomial(active_episodes, active_rate)))
            successes = np.cumsum(generator.random(200) < canary_rate)
            count += any(judge(Outcomes(i + 1, int(s)), active, rule).rollback for i, s in enumerate(successes))
        return count / trials

    assert taken_back(0.9, 0.9, 200) < 0.15
    assert taken_back(0.9, 0.7, 200) > 0.95


def test_some_robots_try_a_version_and_others_the_next():
    robots = [f"arm{i}" for i in range(30)]
    chosen = [choose_canaries(robots, version, 0.1) for version in range(20)]
    assert {len(some) for some in chosen} == {3} and len(set(chosen)) > 15
    assert choose_canaries(reversed(robots), 4, 0.1) == chosen[4]
    assert choose_canaries(["only"], 1, 0.1) == ("only",)


def test_the_share_of_canaries_is_rounded_to_the_nearest_robot():
    assert [len(choose_canaries(map(str, range(count)), 2, 0.1)) for count in (1, 14, 16, 30)] == [1, 1, 2, 3]


def history(tmp_path):
    return History(tmp_path / "history", Disk())


def test_entries_come_back_once_and_in_order(tmp_path):
    written, read = history(tmp_path), history(tmp_path)
    assert read.new() == []
    for number in range(3):
        written.append({"number": number, "text": "line\nbreak"})
        written.new()
    assert [entry["number"] for entry in read.new()] == [0, 1, 2]
    assert read.new() == []
    written.append({"number": 3})
    assert read.new() == [{"number": 3}]


def test_whatever_is_left_of_a_torn_entry_does_not_count(tmp_path):
    first = history(tmp_path)
    first.append({"number": 0})
    whole = (tmp_path / "history").read_bytes()
    first.new()
    first.append({"number": 1})
    both = (tmp_path / "history").read_bytes()
    for cut in range(len(whole), len(both)):
        for tail in (b"", b"\0\0\n"):
            (tmp_path / "history").write_bytes(both[:cut] + tail)
            after = history(tmp_path)
            assert after.new() == [{"number": 0}]
            after.append({"number": 2})
            assert history(tmp_path).new() == [{"number": 0}, {"number": 2}]


def test_damage_that_others_follow_is_told(tmp_path):
    made = history(tmp_path)
    for number in range(3):
        made.append({"number": number})
        made.new()
    data = bytearray((tmp_path / "history").read_bytes())
    data[data.index(b"1}")] ^= 1
    (tmp_path / "history").write_bytes(data)
    with pytest.raises(ContractError, match="damaged at byte"):
        history(tmp_path).new()


TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.half": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 5),
    "scalar": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
}


def test_places_are_those_of_the_formats_own_library(tmp_path):
    data = save(TENSORS, metadata={"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(data)
    head, places = read_header(io.BytesIO(data), len(data))
    assert {place.name for place in places} == set(TENSORS)
    begin = len(head)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        for place in places:
            assert (list(place.shape), place.dtype) == (
                file.get_slice(place.name).get_shape(),
                file.get_slice(place.name).get_dtype(),
            )
            raw = data[begin : begin + place.size]
            assert raw == TENSORS[place.name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
            begin += place.size
    assert begin == len(data)


def file_of(header, content=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + content


def entry(begin=0, end=8, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x08\0\0",
        file_of({}, length=1 << 60),
        file_of({}, length=3),
        file_of(b"[]"),
        file_of(b"{"),
        file_of(b"\xff\xff"),
        file_of(b"[" * 50_000),
        file_of({"a": entry()}),  # cut short
        file_of({"a": entry()}, bytes(9)),  # more than the tensors
        file_of({"a": entry(shape=(3,))}, bytes(8)),
        file_of({"a": entry(dtype="F9")}, bytes(8)),
        file_of({"a": entry(shape=(-2,), end=-8)}, bytes(8)),
        file_of({"a": entry(shape=(2.0,))}, bytes(8)),
        file_of({"a": entry(), "b": entry(4, 12)}, bytes(12)),  # overlap
        file_of({"a": entry(), "b": entry(12, 20)}, bytes(20)),  # gap
        file_of({"a": entry(4, 12)}, bytes(12)),
        file_of({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        file_of(b'{"a":%b,"a":%b}' % (json.dumps(entry()).encode(), json.dumps(entry(8, 16)).encode()), bytes(16)),
    ],
)
def test_a_damaged_file_is_refused(data):
    with pytest.raises(ContractError, match="not published"):
        read_header(io.BytesIO(data), len(data))


def test_no_more_is_read_than_there_is():
    class Watched(io.BytesIO):
        def read(self, size=-1):
            assert 0 <= size <= 10
            return super().read(size)

    data = file_of({}, length=11)
    with pytest.raises(ContractError, match="not published"):
        read_header(Watched(data), len(data))
