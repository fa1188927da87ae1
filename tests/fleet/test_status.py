"""What the page and Prometheus say of a fleet is what was counted."""

from __future__ import annotations

import json

import pytest

from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError
from vla_rl.contract.intervals import wilson
from vla_rl.fleet.page import ALARMS, ALARMS_OF_ONE, OTHERS, RECENT, VERSIONS_OF_ONE, Status, metrics
from vla_rl.fleet.payloads import EpisodeEnd

SUCCESS = EpisodeEnd("success", steps=100, intervened=10, clipped=3, seconds=4.0)
FAILURE = EpisodeEnd("time_limit", steps=200, intervened=0, clipped=1, seconds=8.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def filled() -> tuple[Status, Clock]:
    clock = Clock()
    status = Status(clock, lambda: 5.0)
    status.connected("left", waiting=7)
    status.connected("right", waiting=0)
    for version, end in ((1, SUCCESS), (1, FAILURE), (2, SUCCESS)):
        status.episode("left", version, end)
    status.episode("right", 2, FAILURE)
    status.policy(1, "retired")
    status.policy(2, "active")
    status.policy(3, "staged")
    return status, clock


def test_episodes_are_counted_of_robots_versions_and_all():
    seen = filled()[0].snapshot()
    left, second = seen["robots"]["left"], seen["versions"]["2"]
    assert (left["episodes"], left["successes"], left["steps"], left["intervened"], left["clipped"]) == (
        3,
        2,
        400,
        20,
        7,
    )
    assert (left["low"], left["high"]) == wilson(2, 3) and left["success"] == 2 / 3 and left["seconds"] == 16.0
    assert (second["episodes"], second["successes"], second["state"]) == (2, 1, "active")
    assert (seen["total"]["episodes"], seen["total"]["successes"], seen["total"]["steps"]) == (4, 2, 600)
    assert seen["versions"]["3"] | {"low": 0, "high": 0} == seen["versions"]["3"] | {
        "low": 0,
        "high": 0,
        "success": None,
    }
    assert seen["recent"] == [[1, True], [1, False], [2, True], [2, False]]
    json.dumps(seen, allow_nan=False)


def test_a_robot_says_what_it_holds_and_when_it_was_heard():
    status, clock = filled()
    clock.now += 3
    status.stored("left", "lift", 2, size=500, waiting=6)
    status.stored("left", "", 2, size=500, waiting=5)
    status.dropped("left", 40)
    clock.now += 2
    status.disconnected("left")
    left, right = (status.snapshot()["robots"][name] for name in ("left", "right"))
    assert left["silent"] == 2.0 and right["silent"] == 5.0
    assert (left["records"], left["bytes"], left["waiting"], left["dropped"]) == (2, 1000, 5, 40)
    assert left["task"] == "lift" and not left["connected"] and right["connected"]


def test_a_robot_of_an_earlier_life_of_the_server_was_not_heard():
    status = Status()
    status.episode("old", 1, SUCCESS)
    assert status.snapshot()["robots"]["old"]["silent"] is None


def test_memory_is_bounded():
    status = Status()
    for n in range(ALARMS + 5):
        status.alarm(str(n))
    for _ in range(RECENT + 5):
        status.episode("r", 1, SUCCESS)
    seen = status.snapshot()
    assert seen["alarmed"] == ALARMS + 5 and len(seen["alarms"]) == ALARMS
    assert seen["alarms"][0]["sentence"] == str(ALARMS + 4), "the newest first"
    assert len(seen["recent"]) == RECENT and seen["total"]["episodes"] == RECENT + 5


def test_prometheus_reads_the_same_numbers():
    status = filled()[0]
    status.stored("left", "lift", 2, size=500, waiting=6)
    status.alarm("look")
    lines = dict(line.rsplit(" ", 1) for line in metrics(status).decode().splitlines() if not line.startswith("#"))
    assert lines['vla_rl_fleet_robot_episodes_total{robot="left"}'] == "3.0"
    assert lines['vla_rl_fleet_robot_intervened_total{robot="left"}'] == "20.0"
    assert lines['vla_rl_fleet_waiting{robot="left"}'] == "6.0"
    assert lines['vla_rl_fleet_version{robot="left"}'] == "2.0"
    assert lines['vla_rl_fleet_connected{robot="right"}'] == "1.0"
    assert lines['vla_rl_fleet_version_successes_total{version="2"}'] == "1.0"
    assert lines['vla_rl_fleet_version_state{state="active",version="2"}'] == "1.0"
    assert lines['vla_rl_fleet_version_state{state="active",version="1"}'] == "0.0"
    assert lines["vla_rl_fleet_alarms_total"] == "1.0"


def test_the_end_of_an_episode_comes_back():
    assert EpisodeEnd.from_payload(SUCCESS.payload()) == SUCCESS and SUCCESS.success and not FAILURE.success


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": -1},
        {"intervened": 101},
        {"clipped": -1},
        {"steps": True},
        {"seconds": float("nan")},
        {"seconds": 1e300},
        {"steps": 1 << 40},
        {"seconds": 4},
        {"outcome": ""},
        {"outcome": "x" * 65},
        {"outcome": "a\nb"},
        {"outcome": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_wrong_end_is_refused(changed: dict[str, object]):
    with pytest.raises(ContractError, match="end of an episode says"):
        EpisodeEnd.from_payload(wire.pack(vars(SUCCESS) | changed))


@pytest.mark.parametrize("payload", [b"", b"\xc1", wire.pack([1]), wire.pack({"outcome": "success"})], ids=repr)
def test_what_is_no_end_is_refused(payload: bytes):
    with pytest.raises(ContractError):
        EpisodeEnd.from_payload(payload)


def sentences(status: Status) -> list[str]:
    return [one["sentence"] for one in status.snapshot()["alarms"]]


def test_what_is_wrong_now_stands_first_since_when_it_began_and_goes_when_it_is_over():
    walls = iter([10.0, 20.0, 30.0])
    status = Status(Clock(), lambda: next(walls))
    status.standing("disk", "it is nearly full")
    status.alarm("something happened")
    status.standing("disk", "it is full")
    assert sentences(status) == ["it is full", "something happened"]
    seen = status.snapshot()
    assert seen["alarms"][0]["at"] == 10.0 and seen["alarmed"] == 2
    status.standing("disk", "")
    assert sentences(status) == ["something happened"]


def test_a_robot_that_is_not_heard_and_a_page_that_stands_still_are_alarms_while_they_are():
    status, clock = filled()
    status.looked()
    status.disconnected("left")
    status.stored("old", "lift", 1, 10, 0)  # of an earlier life of the server
    clock.now += 61
    status.connected("right", 0)
    found = sentences(status)
    assert len(found) == 2 and "not counted since then" in found[0] and "'left'" in found[1]
    assert status.snapshot()["alarms"][1]["at"] == 5.0 - 61
    status.looked()
    status.connected("left", 0)
    assert sentences(status) == []


def test_one_robot_has_its_share_of_alarms_and_of_versions():
    status = Status()
    for _ in range(3):
        status.alarm("of another", "other")
    for n in range(1000):
        status.alarm(f"again {n}", "loud")
        status.episode("loud", 10**6 + n, SUCCESS)
    status.policy(7, "active")
    status.episode("loud", 7, SUCCESS)
    status.episode("other", 3, SUCCESS)
    assert len(sentences(status)) == ALARMS_OF_ONE + 1 and "of another" in sentences(status)
    versions = status.snapshot()["versions"]
    assert len(versions) == VERSIONS_OF_ONE + 3 and versions["7"]["episodes"] == versions["3"]["episodes"] == 1
    assert versions[str(OTHERS)]["episodes"] == 1000 - VERSIONS_OF_ONE
    assert len(metrics(status)) < 10_000
