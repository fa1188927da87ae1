"""A whole server with its learner among everything that can be wrong at once: nothing is lost, and nobody ends."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.commands import save_untrained
from tests.docs.conftest import ROOT
from tests.fleet.fleets import Hand, MemorySpool
from tests.fleet.records import recorded
from tests.fleet.test_transport import strangers
from tests.patience import wait_until
from tests.recipes.fleet import configs
from tests.serving.test_messages import bomb
from vla_rl.contract import wire
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.payloads import LOSSLESS, EpisodeEnd, FleetStep
from vla_rl.fleet.protocol import write_records
from vla_rl.fleet.record import FleetRecord
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.fleet.learners import LEARNER
from vla_rl.recipes.imitate import collect
from vla_rl.training.checkpoint import latest_state

FILES, STRANGERS, DISK_MB = 1024, 2000, 300  # of which a ledger leaves 256 free


def _payload(change: Callable[[FleetStep], FleetStep]) -> Callable[[FleetRecord], FleetRecord]:
    return lambda record: replace(record, payload=change(FleetStep.from_payload(record.payload)).payload(LOSSLESS))


def _message(**fields: object) -> Callable[[FleetRecord], FleetRecord]:
    return lambda record: replace(record, payload=wire.pack(wire.unpack(record.payload) | fields))


STEPS: dict[str, Callable[[FleetRecord], FleetRecord]] = {
    "NaN state": _payload(lambda one: replace(one, state=one.state * np.nan)),
    "huge action": _payload(lambda one: replace(one, action=one.action + 1e30)),
    "another label": _payload(lambda one: replace(one, labels={"other": np.array(1.0)})),
    "another size": _payload(lambda one: replace(one, images={k: v[:8, :8] for k, v in one.images.items()})),
    "another type": _payload(lambda one: replace(one, state=one.state.astype(np.float64))),
    "a time below 0": _message(time=-1),
    "the time of another step": _message(time=7),
    "a field too many": _message(more=1),
    "a picture that claims to be huge": _message(images={"front": bomb(), "wrist": bomb()}),
    "no message": lambda record: replace(record, payload=b"\xc1"),
    "an unknown version": lambda record: replace(record, policy_version=999),
}
ENDS: dict[str, bytes] = {
    "more steps than there are": EpisodeEnd("success", 1000, 0, 0, 1.0).payload(),
    "no end": b"\xc1",
    "endless": wire.pack({"outcome": "success", "steps": 3, "intervened": 0, "clipped": 0, "seconds": float("inf")}),
}
EVENTS: dict[str, bytes] = {
    "no event": b"\xc1",
    "no spec": wire.pack({"event": "introduction", "spec": {}}),
    "a spec of arrays": wire.pack({"event": "introduction", "spec": {"state": np.zeros((2, 2))}}),
}


def bad_episodes(episode: list[FleetRecord]) -> Iterator[tuple[str, list[FleetRecord]]]:
    """One whole episode for every kind of wrong record, which has one of it."""
    for name, spoil in STEPS.items():
        yield name, [episode[0], spoil(episode[1]), *episode[2:]]
    for name, payload in ENDS.items():
        yield name, [*episode[:-1], replace(episode[-1], payload=payload)]
    yield "no steps", [episode[-1]]
    yield "never ends", episode[:-1]
    for name, payload in EVENTS.items():  # the last ones: nothing of this robot can be read behind them
        yield name, [replace(episode[0], kind="event", payload=payload, episode="", task=""), *episode]


def put(spool: MemorySpool, found: list[FleetRecord], prefix: str, **fields: object) -> None:
    names = ("kind", "payload", "episode", "task", "policy_version", "intervened")
    for one in found:
        given = {name: getattr(one, name) for name in names} | fields
        spool.put(1, **{**given, "episode": one.episode and f"{prefix}-{one.episode}"})


def speak_wrongly(port: int) -> None:
    """Everything that is refused before it is stored."""
    spool = MemorySpool("liar")
    spool.put(5)
    for message in (
        b"\xff" * 1000,
        pb.FromRobot(heartbeat=pb.Heartbeat(sent_ns=1)),
        pb.FromRobot(records=pb.Records()),
        write_records(spool.records[3:]),  # of which the first three are missing
        write_records([spool.records[0]])[:-3],
    ):
        with Hand(port) as hand, suppress(grpc.RpcError):
            hand.greet(spool)
            hand.send(message)
            with suppress(AssertionError):
                hand.next("nack")
        with Hand(port) as hand, suppress(grpc.RpcError, AssertionError):
            hand.send(message)
            hand.next("welcome")


@contextmanager
def small_disk(folder) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_server_that_learns_loses_nothing_and_lives_among_all_that_is_wrong_at_once(tmp_path, link):
    episodes = collect(EnvConfig("lift"), 3, 1, 2)
    save_demonstrations(episodes, tmp_path / "shown", video="never")
    policy = save_untrained(tmp_path / "policy")
    made = recorded(load_policy(policy).spec, episodes, person=range(3, 6))
    introduction, episode = made[0], made[1 : [one.kind for one in made].index("episode_end") + 1]
    with ExitStack() as opened:
        opened.enter_context(small_disk(tmp_path / "disk"))
        fleet = tmp_path / "disk/fleet"
        process = opened.enter_context(_serving(fleet, policy, tmp_path / "shown"))
        port, page = (int(re.search(r"127\.0\.0\.1:(\d+)", part)[1]) for part in process.stderr.readline().split(";"))
        log = opened.enter_context(_log(process))

        def seen() -> dict:
            with urllib.request.urlopen(f"http://127.0.0.1:{page}/status", timeout=60) as answer:
                return json.load(answer)

        def alarms() -> str:
            return "\n".join(one["sentence"] for one in seen()["alarms"])

        good, bad = MemorySpool("good"), MemorySpool("bad")
        put(good, made, "first", policy_version=1)
        put(bad, [introduction], "")
        kinds = list(bad_episodes(episode))
        for number, (_, found) in enumerate(kinds):
            put(bad, found, f"{number}")
        states = [link(port, spool).status for spool in (good, bad)]

        def stored() -> bool:
            return [state().durable for state in states] == [good.next_seq - 1, bad.next_seq - 1]

        opened.callback(lambda: print(*log[-40:], sep="\n"))
        wait_until(stored)
        speak_wrongly(port)
        wait_until(lambda: "2" in seen()["versions"])  # learnt from what is good among all this
        learners = _learners(process.pid)
        assert "robot bad" in alarms() and "robot good" not in alarms()
        with ExitStack() as held:
            strangers(port, STRANGERS, held)
            put(good, made, "second", policy_version=2)
            wait_until(stored)
            wait_until(lambda: seen()["versions"]["2"]["state"] in ("active", "retired"))
        wait_until(lambda: good.acknowledgements[-1] == good.next_seq - 1)
        before = max(map(int, seen()["versions"]))
        fill(tmp_path / "disk/junk")
        put(good, made, "third", policy_version=before)
        wait_until(lambda: "full, so nothing is stored" in alarms())
        assert not stored()
        (tmp_path / "disk/junk").unlink()
        wait_until(stored)
        wait_until(lambda: "nothing is stored" not in alarms() and "could not be stored" not in alarms())
        put(good, made, "fourth", policy_version=before)
        wait_until(stored)
        wait_until(lambda: max(map(int, seen()["versions"])) > before)
        wait_until(lambda: seen()["learner_silent"] < 5 and "the learner ended" not in alarms())
        assert process.poll() is None and len(learners) == 1 and _learners(process.pid) == learners, "one life"
        assert not re.search("learner .*ended", alarms())
        fill(tmp_path / "disk/junk")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130 and "is not saved" in "\n".join(log)
        assert latest_state(fleet / LEARNER / "state"), "the last good one is whole"
        (tmp_path / "disk/junk").unlink()
        ledger = Ledger(fleet / "ledger")
        found = [record for _, record in ledger.read(0, 1 << 20, 1 << 40)]
        ledger.close()
    for spool in (good, bad):
        assert [one.encoded for one in found if one.robot == spool.robot] == [one.encoded for one in spool.records]
    assert "Traceback" not in "\n".join(log)


def _learners(server: int) -> set[int]:
    """Ids of the learners whose parent is the process ``server``."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and b"vla_rl.recipes.fleet.learning" in (path / "cmdline").read_bytes():
                found.add(int(path.name))
    return found


@contextmanager
def _serving(fleet, policy, shown) -> Iterator[subprocess.Popen]:
    learn = [f"{configs.__file__}:corrections", "--learner.demonstrations", str(shown)]
    ports = ["--port", "0", "--page-port", "0", "--policy", str(policy), "--learner.rest-after", "2"]
    command = [sys.executable, "-m", "vla_rl.cli", "serve", str(fleet), *ports, "--learn", *learn]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=limited, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _log(process: subprocess.Popen) -> Iterator[list[str]]:
    """What it prints, as it comes."""
    lines: list[str] = []
    reading = threading.Thread(target=lambda: [*map(lines.append, process.stderr)], daemon=True)
    reading.start()
    yield lines
