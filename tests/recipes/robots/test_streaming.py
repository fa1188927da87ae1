"""What an arm does reaches the fleet's server as it is played, or waits on the robot until there is one."""

from __future__ import annotations

import io
import itertools
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from robot_drivers.record import Decision
from robot_drivers.simulated import SimulatedRobot
from tests.fleet.fleets import wait_until
from tests.fleet.records import chained, introduction
from tests.patience import PATIENCE
from tests.recipes.robots.arms import OPEN_LOOP, simulated
from tests.recipes.robots.test_person import ENV
from vla_rl.cli import robot
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.intervention import PersonConfig
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.payloads import LOSSLESS, EpisodeEnd, FleetStep, pack_introduction
from vla_rl.fleet.server import FleetServer, FleetServerConfig
from vla_rl.fleet.transport import TransportOptions
from vla_rl.recipes.fleet.export import LEDGER, export
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.drive import Recorder, episode_of
from vla_rl.recipes.robots.person import ScriptedPerson
from vla_rl.recipes.robots.session import LockstepSession
from vla_rl.recipes.robots.streaming import ServerConfig, episode_end, fleet_step, streaming
from vla_rl.recipes.terminal import console


def server_in(folder, port=0):
    return closing(FleetServer(folder, FleetServerConfig(TransportOptions(port=port), page_port=0)))


def played(config, episodes, address, folder):
    """A run of so many short episodes of the expert, and what was printed of the server."""
    printed = Console(file=io.StringIO(), width=300)
    through = partial(streaming, config=ServerConfig(address, "arm-1", folder, patience_s=PATIENCE), show=printed)
    settings = drive.EpisodesConfig("expert", episodes, 1, OPEN_LOOP)
    return drive.drive(config, settings, None, console, through), printed.file.getvalue()


def test_every_step_is_on_the_server_and_in_its_dataset(tmp_path):
    config = simulated(0.5)
    with server_in(tmp_path / "fleet") as server:
        summary, printed = played(config, 2, f"127.0.0.1:{server.transport.port}", tmp_path / "spool")
        assert "everything is stored" in printed
        wait_until(lambda: server.status.snapshot()["total"]["episodes"] == 2)
        total = server.status.snapshot()["total"]
    assert (total["steps"], total["successes"]) == (summary.steps, summary.outcomes["success"])
    assert total["clipped"] == summary.clipped and total["intervened"] == 0
    found = export(tmp_path / "fleet", tmp_path / "dataset", print)
    assert (found.episodes, found.steps) == (2, summary.steps) and not found.left_out
    dataset = load_demonstrations(tmp_path / "dataset", [0, 1])
    assert dataset.tasks == ("pick up the red cube",) and set(dataset.extras["complementary_info.robot"]) == {"arm-1"}


def test_an_episodes_end_belongs_to_the_version_that_played(tmp_path):
    always = PersonConfig(patience=3, delay=0, hold=200, max_share=1.0)
    person = ScriptedPerson(ENV.make_expert().act, ENV.progress(), always)
    printed = Console(file=io.StringIO())
    with (
        server_in(tmp_path / "fleet") as server,
        closing(LockstepSession(simulated(0.4), OPEN_LOOP, person)) as session,
    ):
        config = ServerConfig(f"127.0.0.1:{server.transport.port}", "arm-1", tmp_path / "spool", patience_s=PATIENCE)
        with streaming(session, config, printed) as sent:
            list(sent.play(lambda query: Decision(np.repeat(query.obs.state, 8, 0), 4), 1, 3))
        _, first, *_, last, end = (record for _, record in server.ledger.read(0, 1000))
    assert (first.policy_version, first.intervened, last.policy_version, last.intervened) == (4, False, -1, True)
    assert (end.kind, end.policy_version, end.intervened) == ("episode_end", 4, True)


def test_without_a_server_a_robot_goes_on_and_sends_it_next_time(tmp_path):
    config = simulated(0.2)
    with server_in(tmp_path / "elsewhere") as server:
        port = server.transport.port
    summary, printed = played(config, 1, f"127.0.0.1:{port}", tmp_path / "spool")
    assert summary.steps and f"{summary.steps + 2} records wait in {tmp_path / 'spool'}" in printed
    with server_in(tmp_path / "fleet", port) as server:
        _, printed = played(config, 1, f"127.0.0.1:{port}", tmp_path / "spool")
        assert "everything is stored" in printed and server.ledger.position == 2 * (summary.steps + 2)
        assert len({record.episode for _, record in server.ledger.read(0, 1000) if record.episode}) == 2
    assert export(tmp_path / "fleet", tmp_path / "dataset", print).episodes == 2


@pytest.mark.parametrize("at", [0, 3])
def test_an_episode_ends_before_a_step_that_is_not_finite(at, tmp_path, monkeypatch):
    observe, count = SimulatedRobot.observe, itertools.count()

    def broken(self):
        measured = observe(self)
        measured.position[0] = np.nan if next(count) >= at else measured.position[0]
        return measured

    config, out = simulated(0.4), tmp_path / "recorded"
    monkeypatch.setattr(SimulatedRobot, "observe", broken)
    with server_in(tmp_path / "fleet") as server:
        address = ServerConfig(f"127.0.0.1:{server.transport.port}", "arm-1", tmp_path / "spool", patience_s=PATIENCE)
        through = partial(streaming, config=address, show=Console(file=io.StringIO()))
        summary = drive.drive(config, drive.EpisodesConfig("", 1, 1, OPEN_LOOP), out, console, through)
        records = [record for _, record in server.ledger.read(0, 1000)][1:]
    assert summary.outcomes == {"fault": 1} and summary.steps == at and "success 0.0%" in str(summary)
    steps = [FleetStep.from_payload(record.payload) for record in records[:-1]]  # which refuses what is not finite
    assert len(steps) == at
    if at:
        end = EpisodeEnd.from_payload(records[-1].payload)
        assert (end.outcome, end.steps) == ("fault", at)
        assert np.isfinite(load_demonstrations(out).state).all()
    else:
        assert not records


def test_another_machine_needs_certificates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="leads to other machines"):
        robot.robot(["record", "simulated", "--policy", "expert", "--server", "10.0.0.1:7790", "--out", "out"])


NEW = {"complementary_info.robot"}  # what a fleet's dataset has beside a robot's own


def test_an_export_is_the_recording(tmp_path):
    config = simulated(0.4)
    records = []
    with closing(LockstepSession(config, OPEN_LOOP)) as session, Recorder(tmp_path / "recorded") as recorder:
        decide = drive.build_decider(session, config, drive.EpisodesConfig("expert", 2, 1, OPEN_LOOP))
        records.append(replace(introduction(), payload=pack_introduction(session.spec)))
        for number in (1, 2):
            seen = list(session.play(decide, number, number))
            recorder.add(episode_of(seen, session.spec, -1))
            like = replace(introduction(), kind="step", episode=str(number), task=session.spec.tasks[0])
            like = replace(like, policy_version=-1)
            start = seen[0].record.captured
            records += [replace(like, payload=fleet_step(one, start).payload(LOSSLESS)) for one in seen]
            end = episode_end([one.record for one in seen])
            records.append(replace(like, kind="episode_end", payload=end.payload()))
    with closing(Ledger(tmp_path / "fleet" / LEDGER)) as ledger:
        ledger.append(chained(records))
    summary = export(tmp_path / "fleet", tmp_path / "exported", print)
    recorded, exported = (load_demonstrations(tmp_path / name) for name in ("recorded", "exported"))
    assert (summary.episodes, summary.steps) == (2, len(recorded.state)) and not summary.left_out
    for name in ("state", "action", "time", "task", "seed", "episode"):
        np.testing.assert_array_equal(getattr(exported, name), getattr(recorded, name))
    np.testing.assert_array_equal(exported.images["front"], recorded.images["front"])
    assert exported.extras.keys() == recorded.extras.keys() | NEW
    for name, values in recorded.extras.items():
        np.testing.assert_array_equal(exported.extras[name], values, err_msg=name)
        assert exported.extras[name].dtype == values.dtype, name
    assert (exported.tasks, exported.fps, exported.robot) == (recorded.tasks, recorded.fps, recorded.robot)
    assert set(exported.extras["complementary_info.robot"].tolist()) == {"arm"}


def test_what_has_no_whole_episode_is_not_exported(tmp_path):
    with pytest.raises(UserError, match="no fleet's folder"):
        export(tmp_path, tmp_path / "out", print)
    with closing(Ledger(tmp_path / LEDGER)) as ledger:
        ledger.append([introduction()])
    with pytest.raises(UserError, match="no whole episode"):
        export(tmp_path, tmp_path / "out", print)
