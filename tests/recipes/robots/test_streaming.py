"""What an arm does reaches the fleet's server or waits for it; the arm runs the signed policy that the server wants."""

from __future__ import annotations

import errno
import io
import itertools
import threading
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console

from robot_drivers.record import Decision
from robot_drivers.simulated import SimulatedRobot
from tests.fleet.records import chained, introduction
from tests.patience import PATIENCE, wait_until
from tests.recipes.robots.arms import OPEN_LOOP, simulated
from tests.recipes.robots.test_person import ENV
from vla_rl.cli import robot
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.intervention import PersonConfig
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.link import LinkState
from vla_rl.fleet.manifest import SigningKey, TrustedKeys
from vla_rl.fleet.payloads import LOSSLESS, EpisodeEnd, FleetStep, pack_introduction
from vla_rl.fleet.policy_cache import PolicyCache
from vla_rl.fleet.protocol import BackoffOptions
from vla_rl.fleet.server import FleetServer, FleetServerConfig
from vla_rl.fleet.transport import TransportOptions
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.fleet import publishing
from vla_rl.recipes.fleet.export import LEDGER, export
from vla_rl.recipes.fleet.publishing import publish
from vla_rl.recipes.fleet.serving import signing_key
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots import streaming as to_a_fleet
from vla_rl.recipes.robots.drive import Recorder, episode_of
from vla_rl.recipes.robots.person import ScriptedPerson
from vla_rl.recipes.robots.session import LockstepSession, open_session
from vla_rl.recipes.robots.streaming import PolicyOfServer, ServerConfig, episode_end, fleet_step, streaming
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


WHO = ("a person", "a test")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with closing(open_session(simulated(), OPEN_LOOP, print)) as session:
        spec = session.spec
    torch.manual_seed(0)
    config = TinyConfig(width=32, blocks=1, sampler=FlowSampler(Ode(), AllSteps(), 2))
    policy = TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), config)
    policy.save_pretrained(folder := tmp_path_factory.mktemp("policy"))
    return folder


@pytest.fixture
def fleet(tmp_path, checkpoint):
    """A server, and ``add()``, which publishes a version and promotes it."""
    key = signing_key(tmp_path / "fleet", "") if (tmp_path / "fleet").mkdir() is None else None
    with server_in(tmp_path / "fleet") as server:

        def add(key=key):
            version = publish(server.registry, key, checkpoint, "a test")
            server.registry.promote(version, *WHO)
            return version

        server.add = add
        yield server


class Run:
    """Episodes of two control steps or so on the simulated arm, by the policy of the server."""

    def __init__(self, folder, port):
        self.printed = Console(file=io.StringIO(), width=300)
        keys = TrustedKeys([(folder / "fleet" / "signing.pub").read_bytes()])
        self.settings = drive.EpisodesConfig("", 1, 1, OPEN_LOOP)
        policy = PolicyOfServer(folder / "policies", keys, partial(drive.decider_of, settings=self.settings))
        self.server = ServerConfig(f"127.0.0.1:{port}", "arm-1", folder / "spool", None, PATIENCE, policy)

    def play(self, episodes=1, between=lambda session: None):
        """The text that was printed; ``between(session)`` is called before every episode."""

        @contextmanager
        def through(session):
            with streaming(session, self.server, self.printed) as streamed:
                prepare = streamed.prepare
                streamed.prepare = lambda title: (between(streamed), prepare(title))
                yield streamed

        settings = replace(self.settings, episodes=episodes)
        drive.drive(simulated(0.1), settings, None, self.printed, through)
        return self.printed.file.getvalue()


def versions(server):
    """Of every episode on the server, the versions that its steps were decided by."""
    found: dict[str, set[int]] = {}
    for _, record in server.ledger.read(0, 1000):
        if record.kind == "step":
            found.setdefault(record.episode, set()).add(record.policy_version)
    return [sorted(each) for each in found.values()]


def fetched(session, version):
    wait_until(lambda: session._policy._fetched == version or version in session._policy._refused)


def test_it_runs_what_the_server_wants_from_the_next_episode_on(fleet, tmp_path):
    fleet.add()
    wanted = iter((None, 2, 1))

    def between(session):
        if (version := next(wanted)) == 2:
            assert fleet.add() == 2
        if version == 1:
            fleet.registry.roll_back(*WHO)
        if version:
            fetched(session, version)

    said = Run(tmp_path, fleet.transport.port).play(3, between)
    assert versions(fleet) == [[1], [2], [1]]
    assert "version 1 from now on\n" in said and "2 from now on (was 1)" in said and "1 from now on (was 2)" in said


def test_a_policy_that_is_wrong_or_not_signed_is_refused(fleet, tmp_path, monkeypatch):
    fleet.add()
    real, checks = publishing.answer, iter((0.0, 1.0))
    monkeypatch.setattr(publishing, "answer", lambda *given: real(*given) + next(checks))
    foreign = SigningKey.create(tmp_path / "foreign.key")
    wanted = iter((None, 2, 3))

    def between(session):
        if version := next(wanted):
            with monkeypatch.context() as local:
                local.setattr(publishing, "answer", real)
                fleet.add(*([foreign] if version == 3 else []))
            fetched(session, version)

    said = Run(tmp_path, fleet.transport.port).play(3, between)
    assert versions(fleet) == [[1], [1], [1]]
    assert "version 2 is not used: it answers its golden observation otherwise" in said
    assert "version 3 is not used: " in said and "not signed by a key that this robot trusts" in said


TROUBLES = {
    "damaged on its way": ContractError("a chunk arrived damaged"),
    "no files": OSError(errno.EMFILE, "Too many open files"),
    "no memory": MemoryError(),
}


class Flaky(PolicyCache):
    """Fails at what ``failing`` names, until it is cleared."""

    failing: dict[str, Exception]

    def fetch(self, *given):
        return self._unless("fetch", super().fetch, *given)

    def get(self, *given):
        return self._unless("get", super().get, *given)

    def _unless(self, name, do, *given):
        if name in self.failing:
            raise self.failing[name]
        return do(*given)


@pytest.mark.parametrize(
    ("when", "trouble"), [("fetch", "damaged on its way"), ("fetch", "no memory"), ("get", "no files")]
)
def test_what_failed_for_a_passing_reason_is_tried_again(fleet, checkpoint, tmp_path, monkeypatch, trouble, when):
    monkeypatch.setattr(to_a_fleet, "BackoffOptions", lambda: BackoffOptions(0.01, 0.02))
    monkeypatch.setattr(to_a_fleet, "_LOOK_S", 0.01)
    fleet.add()
    fleet.registry.status = lambda: LinkState(connected=True, policy=(1, "active"))
    keys = TrustedKeys([(tmp_path / "fleet" / "signing.pub").read_bytes()])
    cache, printed = Flaky(tmp_path / "policies", keys), Console(file=io.StringIO(), width=300)
    cache.failing = {when: TROUBLES[trouble]}
    spec, made = load_policy(checkpoint).spec, []

    def make(policy):
        made.append(policy)
        return lambda query: pytest.fail("nobody asked")

    with closing(to_a_fleet.FleetPolicy(cache, fleet.registry, spec, make, printed)) as policy:

        def refused():
            policy._swap()
            return 1 in policy._refused

        wait_until(refused)
        assert not made
        cache.failing = {}
        policy.ready()
    assert policy.version == 1 and len(made) == 1 and not policy._refused
    assert "version 1 from now on" in printed.file.getvalue()


def test_without_its_server_it_begins_with_what_it_ran_last(fleet, tmp_path):
    port = fleet.transport.port
    threading.Timer(0.5, fleet.add).start()
    assert "waiting for the server's first policy" in Run(tmp_path, port).play()
    fleet.close()
    again = Run(tmp_path, port)
    assert "policy version 1 from now on" in again.play()
    assert PolicyCache(
        tmp_path / "policies", TrustedKeys([(tmp_path / "fleet/signing.pub").read_bytes()])
    ).in_use() == (1,)


def test_a_golden_answer_is_compared_in_every_dimension(checkpoint, tmp_path, fleet):
    fleet.add()
    keys = TrustedKeys([(tmp_path / "fleet" / "signing.pub").read_bytes()])
    policy = load_policy(checkpoint)
    cached = PolicyCache(tmp_path / "cache", keys).fetch(1, fleet.registry.get(1).spec_hash, fleet.registry)
    to_a_fleet.check_golden(policy, cached)
    span = policy.spec.action.high[-1] - policy.spec.action.low[-1]
    for off, refused in ((0.5, False), (2.0, True)):
        rows = [[*row[:-1], row[-1] + off * publishing.TOLERANCE * span] for row in cached.manifest.golden.action]
        changed = replace(cached.manifest.golden, action=tuple(map(tuple, rows)))
        other = replace(cached, manifest=replace(cached.manifest, golden=changed))
        wrong = pytest.raises(UserError, match="answers its golden observation otherwise")
        with wrong if refused else nullcontext():
            to_a_fleet.check_golden(policy, other)


def test_whose_policies_a_robot_runs_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="or a --server that has one"):
        robot.robot(["run", "simulated"])
    with pytest.raises(UserError, match="add --signing-key with the signing"):
        robot.robot(["run", "simulated", "--server", "127.0.0.1:1"])
    with pytest.raises(UserError, match="'nowhere' cannot be read"):
        robot.robot(["run", "simulated", "--server", "127.0.0.1:1", "--signing-key", "nowhere"])
