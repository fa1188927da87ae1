"""The fleet's server: everything that the page and the rule of canaries say comes from what is on the disk."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from tests.docs.conftest import ROOT
from tests.fleet.checkpoints import KEY, PUBLISHED, SPEC_HASH, TRUSTED, checkpoint, content
from tests.fleet.fleets import MemorySpool
from tests.fleet.records import chained, episode, introduction, step
from tests.patience import wait_until
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.fleet import disk
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.payloads import LOSSLESS, EpisodeEnd
from vla_rl.fleet.policy_cache import PolicyCache
from vla_rl.fleet.server import FleetServer, FleetServerConfig
from vla_rl.fleet.transport import TransportOptions

ANY = FleetServerConfig(TransportOptions(port=0), page_port=0)
WHO = ("a person", "a test")


def spool_of(*episodes, robot="arm"):
    """A robot that holds these episodes."""
    spool = MemorySpool(robot, introduction().epoch)
    spool.records = chained(replace(one, robot=robot) for one in [introduction(), *(r for e in episodes for r in e)])
    return spool


@pytest.fixture
def opened(tmp_path, ending):
    return lambda: ending.enter_context(closing(FleetServer(tmp_path / "fleet", ANY)))


def released(server, folder, *versions):
    """These versions are published, and the first is for every robot."""
    for version in versions:
        server.registry.publish(checkpoint(folder / str(version), version), PUBLISHED, KEY, *WHO)
    server.registry.promote(versions[0], *WHO)


def shown(server):
    """What the page shows."""
    with urllib.request.urlopen(f"{server.page.url}status") as answer:
        return json.load(answer)


def test_what_robots_send_is_on_the_page_also_after_a_restart(opened, link):
    server = opened()
    link(server.transport.port, spool_of(episode("a", 3), episode("b", 2, "time_limit"), episode("c", 2, "redo")))
    wait_until(lambda: shown(server)["robots"].get("arm", {}).get("records") == 11)
    before = shown(server)
    assert (before["total"]["episodes"], before["total"]["successes"], before["total"]["steps"]) == (2, 1, 5)
    assert before["robots"]["arm"]["connected"] and before["robots"]["arm"]["waiting"] == 0
    assert before["robots"]["arm"]["task"] == "lift" and before["versions"]["1"]["episodes"] == 2
    server.close()
    again = opened()
    wait_until(lambda: shown(again)["robots"].get("arm", {}).get("records") == 11)
    assert shown(again)["total"] == before["total"]


def test_a_robot_downloads_what_the_registry_has_for_it(opened, link, tmp_path):
    server, announced = opened(), []
    made = link(server.transport.port, MemorySpool(), on_policy=lambda *policy: announced.append(policy))
    released(server, tmp_path, 1)
    wait_until(lambda: (1, "active") in announced)
    cached = PolicyCache(tmp_path / "robot", TRUSTED).fetch(1, SPEC_HASH, made)
    assert content(cached.folder) == content(tmp_path / "1")
    wait_until(lambda: shown(server)["versions"].get("1", {}).get("state") == "active")
    with pytest.raises(UserError, match="9"):
        made.manifest(9)


def test_a_canary_that_fails_is_taken_back_and_that_is_an_alarm(opened, link, tmp_path):
    server = opened()
    released(server, tmp_path, 1, 2)
    server.registry.try_on(2, ["arm"], *WHO)
    good = [episode(f"good{n}", 1) for n in range(12)]
    bad = [episode(f"bad{n}", 1, "time_limit", version=2) for n in range(12)]
    link(server.transport.port, spool_of(*good, *bad))
    wait_until(lambda: server.registry.releases.canary is None)
    wait_until(lambda: any("the canary was taken back" in one["sentence"] for one in shown(server)["alarms"]))
    assert server.registry.releases.active == 1 and len(server.registry.history()) == 5


def test_only_what_its_robots_did_and_sent_counts_for_a_canary(opened, link, tmp_path):
    server = opened()
    released(server, tmp_path, 1, 2)
    server.registry.try_on(2, ["arm"], *WHO)
    ends = [[one for one in episode(f"e{n}", 1, "time_limit", version=2) if one.kind != "step"] for n in range(12)]
    other = [[replace(one, policy_version=2) if one.kind != "step" else one for one in episode("other", 1)]]
    link(server.transport.port, spool_of(*[episode(f"good{n}", 1) for n in range(12)], *ends, *other))
    link(server.transport.port, spool_of(*[episode(f"e{n}", 1, "time_limit", 2) for n in range(12)], robot="evil"))
    wait_until(lambda: shown(server)["total"]["episodes"] == 37)
    assert server.registry.releases.canary == 2
    assert not server.registry.verdict().compared and "arm" not in server.registry.outcomes()[2]
    assert "which its stored steps do not say" in shown(server)["alarms"][0]["sentence"]


def test_episodes_of_a_ledger_that_was_set_back_to_a_copy_count(opened, link, tmp_path):
    server = opened()
    released(server, tmp_path, 1)
    link(server.transport.port, spool_of(episode("a", 5), episode("b", 5)))
    wait_until(lambda: shown(server)["total"]["episodes"] == 2)
    server.close()
    shutil.rmtree(tmp_path / "fleet/ledger")
    again = opened()
    spool = spool_of(episode("c", 1))
    link(again.transport.port, spool)
    wait_until(lambda: shown(again)["total"]["episodes"] == 1)
    assert again.registry.outcomes()[1]["arm"].episodes == 3


def test_what_a_person_rescued_is_no_success_of_the_policy(opened, link, tmp_path):
    server = opened()
    released(server, tmp_path, 1)
    rescued = [*episode("b", 2)]
    end = replace(EpisodeEnd.from_payload(rescued[-1].payload), intervened=1)
    link(server.transport.port, spool_of(episode("a", 2), [*rescued[:-1], replace(rescued[-1], payload=end.payload())]))
    wait_until(lambda: shown(server)["total"]["episodes"] == 2)
    found = server.registry.outcomes()[1]["arm"]
    assert (found.episodes, found.successes, found.interventions) == (2, 1, 1)
    assert shown(server)["total"]["successes"] == 2, "the task was done twice"


def test_an_episode_whose_end_cannot_be_read_is_an_alarm_and_the_rest_is_counted(opened, link):
    broken = [replace(one, payload=b"\xc0") if one.kind == "episode_end" else one for one in episode("a", 1)]
    server = opened()
    link(server.transport.port, spool_of(broken, episode("b", 1)))
    wait_until(lambda: shown(server)["total"]["episodes"] == 1)
    assert "episode a" in shown(server)["alarms"][0]["sentence"]


def test_a_step_that_nobody_can_learn_from_is_stored_and_an_alarm_by_name(opened, link):
    server, bad = opened(), [*episode("bad", 3)]
    spoilt = replace(step(1), state=np.array([np.nan, 0], np.float32)).payload(LOSSLESS)
    spool = spool_of(episode("a", 2), [bad[0], replace(bad[1], payload=spoilt), *bad[2:]], episode("b", 2))
    link(server.transport.port, spool)
    wait_until(lambda: shown(server)["robots"].get("arm", {}).get("records") == len(spool.records))
    (alarm,) = (one["sentence"] for one in shown(server)["alarms"])
    assert (
        "episode bad of robot arm is stored, and nothing can be learnt from it: a control step" in alarm
        and "not finite" in alarm
    )
    assert [record for _, record in server.ledger.read(0, 100)] == spool.records


@pytest.mark.parametrize(
    ("code", "alarm"), [(errno.EIO, "disk failed"), (errno.EMFILE, "could not be stored"), (errno.ENOSPC, "is full")]
)
def test_a_disk_that_fails_is_an_alarm_while_it_does_and_costs_nothing(code, alarm, opened, link, monkeypatch):
    server, spool = opened(), spool_of(episode("a", 3))
    link(server.transport.port, spool)
    wait_until(lambda: spool.acknowledgements[-1:] == [4])
    write, free = disk.File.write, disk.Disk.free

    def fail(file, data):
        raise OSError(code, "the test's disk")

    monkeypatch.setattr(disk.File, "write", fail)
    if code == errno.ENOSPC:
        monkeypatch.setattr(disk.Disk, "free", lambda self, folder: 0)
    records = len(spool.records)
    spool.put(20)
    wait_until(lambda: any(alarm in one["sentence"] for one in shown(server)["alarms"]))
    monkeypatch.setattr(disk.File, "write", write)
    monkeypatch.setattr(disk.Disk, "free", free)
    wait_until(lambda: spool.acknowledgements[-1] == records + 19)
    wait_until(lambda: not any(alarm in one["sentence"] for one in shown(server)["alarms"]))
    assert [record for _, record in server.ledger.read(0, 100)] == spool.records
    wait_until(lambda: shown(server)["robots"]["arm"]["records"] == records + 20)


_LEARNER = """
import pathlib, sys
been = pathlib.Path(sys.argv[1])
if not been.exists():
    been.touch()
    sys.exit(3)
while not pathlib.Path(sys.argv[2]).exists():
    pass
print('{"learner": {"updates": 5, "episodes": 2}}', flush=True)
sys.stdin.buffer.read()
"""


def test_a_learner_that_ended_is_an_alarm_until_it_says_how_far_it_is(opened, tmp_path):
    server = opened()
    server.learn([sys.executable, "-c", _LEARNER, str(tmp_path / "been"), str(tmp_path / "go")])
    wait_until(lambda: any("nothing is learnt until" in one["sentence"] for one in shown(server)["alarms"]))
    (tmp_path / "go").touch()
    wait_until(lambda: shown(server)["learner"])
    seen = shown(server)
    assert [one["sentence"][:30] for one in seen["alarms"]] == ["the learner ended (exit code 3"]
    assert seen["learner"]["updates"] == 5 and seen["learner_silent"] is not None


def test_it_starts_on_this_machine_alone_without_certificates(tmp_path):
    with pytest.raises(UserError, match="leads to other machines"):
        FleetServer(tmp_path, FleetServerConfig(TransportOptions("0.0.0.0", 0), 0))
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_command_serves_until_it_is_killed_and_goes_on(tmp_path, link):
    def started():
        command = [sys.executable, "-m", "vla_rl.cli", "serve", str(tmp_path / "fleet"), "--port", "0"]
        process = subprocess.Popen(
            [*command, "--page-port", "0"],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        printed = process.stderr.readline()
        return process, int(re.search(r"127\.0\.0\.1:(\d+)", printed)[1])

    spool = spool_of(episode("a", 3), episode("b", 2))
    first, port = started()
    sent = link(port, spool)
    wait_until(lambda: spool.acknowledgements[-1:] == [7])
    first.kill()
    sent.close()
    second, _ = started()
    assert "holds 8 records" in second.stderr.readline()
    second.send_signal(signal.SIGINT)
    assert second.wait() == 130 and "is on the disk" in second.stderr.read()
    first.stderr.close(), second.stderr.close(), first.wait()


def test_a_ledger_becomes_a_dataset(tmp_path):
    with closing(Ledger(tmp_path / "fleet/ledger")) as ledger:
        ledger.append(spool_of(episode("a", 3), episode("b", 2)).records)
    main(["fleet", "export", str(tmp_path / "fleet")])
    assert load_demonstrations(tmp_path / "fleet" / "dataset", [0, 1]).time.tolist() == [0, 1, 2, 0, 1]
