"""The learner behind a server: every episode is learnt from once, whatever happens to it, and robots get versions."""

from __future__ import annotations

import errno
import io
import itertools
import os
import signal
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from robot_drivers.record import Query
from tests.fleet.records import recorded
from tests.patience import wait_until
from tests.recipes.fleet import configs
from vla_rl.cli import fleet as cli
from vla_rl.contract.errors import UserError
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.manifest import TrustedKeys, spec_hash
from vla_rl.fleet.policy_cache import PolicyCache
from vla_rl.fleet.registry import Registry
from vla_rl.fleet.releases import Outcomes
from vla_rl.fleet.server import FleetServer, FleetServerConfig, Inbox, Wanted, received, send_records
from vla_rl.fleet.transport import TransportOptions
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.fleet.learners import LEARNER, Learn, command, prepare
from vla_rl.recipes.fleet.learning import Learning, Releasing, until_the_server_ends
from vla_rl.recipes.fleet.publishing import publish_first
from vla_rl.recipes.fleet.serving import key_file, signing_key
from vla_rl.recipes.robots.drive import PolicyDecider
from vla_rl.recipes.robots.streaming import check_golden
from vla_rl.training import checkpoint, tracking
from vla_rl.training.checkpoint import latest_state
from vla_rl.training.tracking import RunFolder


@pytest.fixture
def shown(start):
    """A config of a policy and its demonstrations, and those."""
    return replace(configs.corrections(), policy=start.policy, demonstrations=start.demonstrations), start.episodes


def learning(config: Learn, fleet, alarm=print) -> Learning:
    """The learner of the fleet in this folder, as its process would have it."""
    prepare(config, fleet, None)
    registry, key = Registry(fleet / "registry", config.canary), signing_key(fleet, "")
    publish_first(registry, key, config.policy)
    run = RunFolder.resume(fleet / LEARNER)
    return Learning(config, run, Releasing(registry, key, config.patience), alarm)


def sent(shown, **given):
    spec = load_policy(shown[0].policy).spec
    return list(enumerate(recorded(spec, shown[1], **given), 1))


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def take(one: Learning, found) -> None:
    for position, record in found:
        one.take(position, record)


def test_it_imitates_the_person_and_robots_try_one_at_a_time(shown, tmp_path):
    one = learning(shown[0], tmp_path)
    take(one, sent(shown, person=range(3, 6)))
    corrected, reach = one.learner.corrections, one.learner.policy.horizon
    person = [(i, begin) for begin, end in shown[1].spans() for i in range(begin + 3, min(begin + 6, end))]
    decisions = {j for i, begin in person for j in range(max(begin, i - reach + 1), i + 1)}
    assert one.episodes == 3 and len(corrected) == len(decisions)
    assert int(corrected.counts.sum()) == sum(i - max(begin, i - reach + 1) + 1 for i, begin in person)
    assert set(corrected.version.tolist()) == {1}
    while one.published == 0:
        assert one.turn()
    releases = one.releasing.registry.releases
    assert (releases.active, releases.canary, releases.canary_robots, one.updates) == (1, 2, {"arm"}, 4)
    assert one.learner.policy.version == 2
    while one.updates < 12:
        one.turn()
    registry = one.releasing.registry
    assert registry.releases.canary == 2 and one.published == 4, "the next one waits for the trial"
    registry.record(1, "other", 1, Outcomes(1, 1))
    one.turn()
    assert registry.releases.active == 1, "nobody has tried it yet"
    registry.record(2, "arm", 2, Outcomes(1, 1))
    one.turn()
    assert registry.releases.active == 2 and registry.history()[-1]["who"] == "learner"
    assert one.published == 4, "no robot has ended an episode since"


def test_a_full_disk_keeps_a_version_back_until_there_is_room_and_ends_nothing(shown, tmp_path, monkeypatch):
    said: list[str] = []
    one = learning(shown[0], tmp_path, said.append)
    take(one, sent(shown, person=range(3, 6)))
    times = itertools.count()
    one._clock, one._due, one._heard = (lambda: 1e-3 * next(times)), 0.0, 0.0

    with monkeypatch.context() as disk:
        disk.setattr(Registry, "publish", full)
        while one.updates < 8:
            assert one.turn()
    assert len(said) == 1 and "robots do not get what was learnt" in said[0] and one.published == 0
    one._again = 0.0  # the while is over
    one.turn()
    assert one.published == one.updates > 8 and one.learner.policy.version == 2


def test_a_disk_that_takes_no_state_is_an_alarm_and_the_last_good_one_stays(shown, tmp_path, monkeypatch):
    said: list[str] = []
    one = learning(shown[0], tmp_path, said.append)
    take(one, sent(shown, person=range(3, 6)))

    def saved() -> int:
        found = latest_state(tmp_path / LEARNER / "state")
        assert found is not None
        return found[0]

    with monkeypatch.context() as disk:
        disk.setattr(checkpoint, "save_file", full)
        while one.published == 0:
            assert one.turn()
        assert one.releasing.registry.releases.canary == 2 and saved() == 0
        assert len(said) == 1 and "what was learnt is not saved" in said[0]
    one._again = 0.0  # the while is over
    one.turn()
    assert saved() == one.updates and [row["updates"] for row in one.run.metrics(LEARNER)] == [one.updates]
    kept = one.updates
    with monkeypatch.context() as disk:
        for module, name in ((checkpoint, "save_file"), (tracking, "write_text")):
            disk.setattr(module, name, full)
        next(iter(one.learner.policy.trainable().values())).data.fill_(float("nan"))
        assert not one.turn() and "went back" in said[-1], "which needs no room"
        one._due = 0.0
        assert one.turn() and one.updates > kept
        until_the_server_ends(one, Inbox(io.BytesIO()), lambda _: None)
    assert len(said) == 3 and f"since update {kept} is not saved" in said[-1] and saved() == kept


def test_a_state_of_another_vla_rl_is_one_sentence(shown, tmp_path):
    one = learning(shown[0], tmp_path)
    one.run.save_state(1, {"learner": one.learner.state_dict(), "updates": 1})
    one.run.close()
    with pytest.raises(
        UserError,
        match=r"has no begin, ends, episodes, last, position, published, reader, robots, so it cannot go on: .*",
    ):
        learning(shown[0], tmp_path)


def test_it_starts_where_the_oldest_episode_begins_that_its_weights_have_not_seen(shown, tmp_path):
    found = sent(shown, person=range(3, 6))
    ends = [position for position, record in found if record.kind == "episode_end"]
    for name, cut, begin in (("within", ends[1] + 4, ends[1] + 1), ("between", ends[1], ends[1] + 1)):
        whole, first = (learning(shown[0], tmp_path / name / side) for side in ("a", "b"))
        take(whole, found)
        take(first, found[:cut])
        first.save()
        first.run.close()
        second = learning(shown[0], tmp_path / name / "b")
        wanted = Wanted(**second.wanted())
        assert wanted == Wanted(begin, cut, found[cut - 1][1].hash[:8].hex())
        take(second, found[begin - 1 :])
        assert second.episodes == whole.episodes == 3
        assert torch.equal(second.learner.corrections.actions, whole.learner.corrections.actions)


def test_the_server_sends_what_is_wanted_of_its_ledger_and_all_of_another(shown, tmp_path):
    records = [record for _, record in sent(shown)]
    with closing(Ledger(tmp_path, reserve=0)) as ledger:
        ledger.append(records)
        name = records[8].hash[:8].hex()
        assert Wanted().after(ledger) == 0
        assert Wanted(5, 9, name).after(ledger) == 4
        assert Wanted(5, 9, records[7].hash[:8].hex()).after(ledger) == 0, "another record is there"
        assert Wanted(5, len(records) + 1, name).after(ledger) == 0, "none is there yet"
        read, write = os.pipe()
        ending = threading.Event()
        with open(read, "rb") as incoming, open(write, "wb") as outgoing:
            given = (ledger, outgoing, ending, Wanted(5, 9, name))
            sending = threading.Thread(target=send_records, args=given, daemon=True)
            sending.start()
            expected = [*range(5, len(records) + 1)]
            assert [position for position, _ in itertools.islice(received(incoming), len(expected))] == expected
            ending.set()
            sending.join()


def test_new_episodes_of_a_ledger_that_was_set_back_to_a_copy_are_learnt_from(shown, tmp_path):
    found = sent(shown, person=range(3, 6))
    ends = [position for position, record in found if record.kind == "episode_end"]
    first = learning(shown[0], tmp_path)
    take(first, found)
    first.save()
    first.run.close()
    copy = found[: ends[0]]
    new = [(ends[0] + at, record) for at, (_, record) in enumerate(sent(shown, robot="new", person=range(3, 6)), 1)]
    second = learning(shown[0], tmp_path)
    take(second, copy + new[: ends[1]])
    assert second.position < first.position and second.episodes == 3 + 2
    second.save()
    second.run.close()
    third = learning(shown[0], tmp_path)
    take(third, copy + new)
    assert third.episodes == 3 + 3


def test_a_residual_learns_from_what_robots_sent_goes_on_exactly_and_plays_on_an_arm(shown, tmp_path):
    config = replace(shown[0], method=configs.REPLAY)
    found = sent(shown, person=range(3, 6))
    undisturbed, first = (learning(config, tmp_path / name) for name in ("a", "b"))
    for one in (undisturbed, first):
        take(one, found[: 2 * len(found) // 3])
        assert one.turn() and one.updates == 2
        one.save()
    first.learner.learn(3)  # lost by the kill
    first.run.close()
    second = learning(config, tmp_path / "b")
    for one in (undisturbed, second):
        take(one, found)
        while one.published == 0:
            assert one.turn()
    for name, item in undisturbed.learner.policy.trainable().items():
        assert torch.equal(item, second.learner.policy.trainable()[name])
    assert undisturbed.learner.learner.decisions == len(shown[1].state) == second.learner.learner.decisions
    drawn = second.learner.learner.replay.online.transitions(second.learner.learner.replay.online.decisions())
    assert int(drawn.intervened.sum()) == 3 * 3 and set(drawn.version.tolist()) == {1}
    assert second.releasing.registry.releases.canary == 2
    plays_as_on_a_robot(second, tmp_path, shown[1].observation())


def plays_as_on_a_robot(one: Learning, folder, seen) -> None:
    """A robot fetches version 2, which answers as it did here and decides at every step."""
    keys = TrustedKeys([(folder / "b" / "signing.pub").read_bytes()])
    spec = one.learner.policy.spec
    cached = PolicyCache(folder / "robot", keys).fetch(2, spec_hash(spec), one.releasing.registry)
    fetched = load_policy(cached.folder, spec)
    check_golden(fetched, cached)
    decide = PolicyDecider(fetched, torch.Generator().manual_seed(1))
    chunks = [decide(Query(seen.select(np.array([i])), i, 1 if i else None, 0)).chunk for i in range(4)]
    assert np.stack(chunks).shape == (4, 1, spec.action_dim) and np.isfinite(chunks).all()


def test_episodes_of_another_robot_are_told_once_and_not_learnt_from(shown, tmp_path):
    said: list[str] = []
    one = learning(shown[0], tmp_path, said.append)
    spec = replace(load_policy(shown[0].policy).spec, control_dt=0.5)
    take(one, enumerate(recorded(spec, shown[1], robot="other"), 1))
    assert one.episodes == 0 and len(said) == 1 and "robot other" in said[0] and "control rate" in said[0]
    bad = [(at, replace(r, payload=b"\xc1") if at == 9 else r) for at, r in sent(shown, person=range(3, 6))]
    take(one, [(at + 1000, record) for at, record in bad])
    assert one.episodes == 2 and len(said) == 2 and "robot arm" in said[1], "one that cannot be read among others"


@pytest.mark.full
def test_a_server_keeps_its_learner_running_and_a_killed_one_goes_on(shown, tmp_path):
    config = replace(shown[0], publish_every=2)
    fleet = tmp_path / "fleet"
    with closing(FleetServer(fleet, FleetServerConfig(TransportOptions(port=0), 0, config.canary))) as server:
        publish_first(server.registry, signing_key(fleet, ""), config.policy)
        assert prepare(config, fleet, None) is None
        server.ledger.append([record for _, record in sent(shown, person=range(3, 6))])
        process = server.learn(command(fleet, key_file(fleet, "")))
        wait_until(lambda: server.registry.releases.canary == 2)
        first = process.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: process.pid not in (None, first))
        assert "exit code -9" in server.status.snapshot()["alarms"][-1]["sentence"]
        wait_until(lambda: server.status.snapshot()["learner"].get("episodes") == 3)
    _, state = latest_state(fleet / LEARNER / "state")
    assert state["episodes"] == 3 and state["position"] == server.ledger.position


def test_another_config_begins_anew_and_the_same_one_goes_on(shown, tmp_path):
    assert prepare(shown[0], tmp_path, None) is None
    assert prepare(shown[0], tmp_path, None) is None and not (tmp_path / "learner.1").exists()
    assert prepare(replace(shown[0], turn=3), tmp_path, None) == tmp_path / "learner.1"


def test_what_is_no_learner_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is none; add --learn"):
        cli.serve([str(tmp_path), "--learner.turn", "3"])
    with pytest.raises(UserError, match="returns no Learn"):
        cli.serve([str(tmp_path), "--learn", f"{configs.__file__}:no_learner"])
    with pytest.raises(UserError, match="did you mean '--turn'"):
        cli.serve([str(tmp_path), "--learn", f"{configs.__file__}:corrections", "--learner.turm", "3"])


@pytest.mark.parametrize("wrong", ["an episode", "a weight"])
def test_where_numbers_went_wrong_the_last_good_state_is_back_and_learning_goes_on(shown, tmp_path, wrong):
    said: list[str] = []
    one = learning(shown[0], tmp_path, said.append)
    found = sent(shown, person=range(3, 6))
    take(one, found)
    one._clock, one._due = (lambda: one._heard), 0.0
    assert one.turn()
    one.save()
    kept = {name: item.clone() for name, item in one.learner.policy.trainable().items()}
    if wrong == "an episode":
        one.learner.corrections.actions[:] = np.nan
    else:
        next(iter(one.learner.policy.trainable().values())).data.fill_(torch.nan)
    one._due = 0.0
    assert not one.turn() and one.published == 0
    assert all(torch.equal(item, kept[name]) for name, item in one.learner.policy.trainable().items())
    assert len(said) == 1 and "went back to what it had learnt by update 2" in said[0] and "not finite" in said[0]
    assert one._due > one._heard, "nothing is tried at once again"
    one._due, before = 0.0, one.updates
    assert one.turn() and one.updates > before and len(said) == 1
