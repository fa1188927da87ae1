"""The control process: whatever becomes of the others, the arm comes to rest within the watchdog's time.

What is asserted are the commands that the arm has got, counted in control steps by their own stamps.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_drivers.control import Control, Inbox, Outbox, Rate
from robot_drivers.driver import claimed
from robot_drivers.executor import Executor, RecedingHorizon
from robot_drivers.record import ControlStep, Decision, Query
from robot_drivers.runtime import ControlProcess, Runtime
from robot_drivers.safety import Supervisor
from tests.patience import PATIENCE, wait_until
from tests.robot_drivers.arms import DT, FAR, HERE, HZ, LIMITS, SPEED, ToyArm, config, observation, towards
from vla_rl.contract.errors import UserError
from vla_rl.contract.wire import Pieces, framed, greeting

WATCHDOG = round(LIMITS.watchdog * HZ)  # control steps
STEP = SPEED * DT  # rad, of an arm that moves
AFTER = 40  # commands that are looked at


def commands(path: Path) -> np.ndarray:
    """[N,3]: seconds and positions, so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    numbers = [[float(word) for word in line.split()] for line in lines if len(line.split()) == 3]
    return np.array(numbers).reshape(-1, 3)


def ended(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("end\n")


def moving(path: Path) -> bool:
    last = commands(path)[-6:]
    return len(last) == 6 and bool((np.diff(last[:, 1]) > STEP / 4).all())


def assert_holds_after(path: Path, stamp: float) -> None:
    """From ``stamp`` on nobody says anything new: no more commands than the watchdog waits differ from the last."""
    wait_until(lambda: ended(path) or bool((commands(path)[:, 0] > stamp + LIMITS.max_age).sum() >= AFTER))
    since = commands(path)
    since = since[since[:, 0] > stamp + LIMITS.max_age]
    moved = np.abs(since[:, 1] - since[-1, 1]) > STEP / 2
    assert len(since) and moved.sum() <= WATCHDOG, since


def at_port(folder: Path) -> dict[str, str]:
    return {"port": str(folder), "path": "commands"}


def started(folder: Path) -> closing[ControlProcess]:
    """A process for an arm at the port ``folder``, which writes to "commands" there."""
    return closing(ControlProcess(replace(config(""), driver=f"{HERE}:PortedArm", driver_options=at_port(folder))))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ControlProcess, Path]]:
    """A control process, and the file of its arm's commands."""
    folder = tmp_path_factory.mktemp("arm")
    with started(folder) as control:
        yield control, folder / "commands"
    assert ended(folder / "commands")


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[bool], list[int]]]:
    """Starts an owner of an arm, which writes to "commands"; says the ids of owner, control and teleoperator."""
    made: list[subprocess.Popen[str]] = []

    def start(leader: bool) -> list[int]:
        command = [sys.executable, "-m", HERE, str(tmp_path / "commands"), "leader" * leader]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert made[0].stdout is not None
        return [made[0].pid, *map(int, made[0].stdout.readline().split())]

    yield start
    for process in made:
        process.kill()
        process.communicate()
    wait_until(lambda: ended(tmp_path / "commands"))  # the arm is disconnected


@pytest.mark.parametrize(
    ("who", "signal_number"),
    [
        ("owner", signal.SIGKILL),
        ("teleoperator", signal.SIGSTOP),
        pytest.param("owner", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("teleoperator", signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_when_somebody_is_killed_or_hangs_the_arm_holds(who: str, signal_number: int, owner, tmp_path: Path) -> None:
    path = tmp_path / "commands"
    pids = owner(who == "teleoperator")
    wait_until(lambda: moving(path))
    os.kill(pids[0 if who == "owner" else 2], signal_number)
    assert_holds_after(path, time.monotonic())


def test_a_policy_that_hangs_leaves_the_arm_holding(running) -> None:
    control, path = running
    hung, release = threading.Event(), threading.Event()
    first, asked = towards([FAR, 0.5], 400, SPEED), list[int]()

    def decide(query: Query) -> Decision:
        asked.append(query.step)
        if query.step > asked[0] + 30:
            hung.set()
            release.wait()
        return first(query)

    with closing(Runtime(control, decide, observation, patience=0.1)) as runtime:
        steps = runtime.episode(1, 1 << 30)  # is not ended when nobody looks on
        for _ in steps:
            if hung.is_set():
                break
        assert_holds_after(path, time.monotonic() + 0.1)
        release.set()
        steps.close()


def test_a_policy_that_hangs_for_long_ends_the_episode(running) -> None:
    compiled, release, asked = threading.Event(), threading.Event(), []
    first = towards([FAR, 0.5], 20, SPEED)

    def decide(query: Query) -> Decision:
        asked.append(query.step)
        (release if len(asked) > 1 else compiled).wait()  # the first one may take longer
        return first(query)

    with closing(Runtime(running[0], decide, observation, patience=0.1)) as runtime:
        with pytest.raises(UserError, match=r"has not decided for 0.5 s, so the arm is held"):
            for number, _ in enumerate(runtime.episode(2, 1 << 30)):
                if number > 40:
                    compiled.set()
        assert compiled.is_set() and len(asked) == 2
        release.set()


def test_a_camera_that_hangs_leaves_the_arm_holding(running) -> None:
    (control, path), stuck = running, [np.inf]

    def pictured() -> float:
        return min(stuck[0], time.monotonic())

    with closing(Runtime(control, towards([FAR, 0.5], 400, SPEED), observation, pictured=pictured)) as runtime:
        steps = runtime.episode(3, 1 << 30)  # is not ended when nobody looks on
        for _ in steps:
            if moving(path):
                stuck[0] = time.monotonic()
                break
        assert_holds_after(path, stuck[0])
        steps.close()


@pytest.mark.parametrize("silent", [False, True])
def test_control_ends_at_rest_when_its_owner_is_gone_not_silent(silent: bool) -> None:
    (reader, owner_writes), (owner_reads, writer) = os.pipe(), os.pipe()
    arm = ToyArm(time.monotonic)
    executor = Executor(arm, Supervisor(LIMITS), RecedingHorizon(4))
    control = Control(arm, executor, Inbox(reader, "control"), Outbox(writer, "control"))
    control.step()
    if not silent:
        os.close(owner_writes)
    for _ in range(30):
        time.sleep(0.001)
        control.step()
    assert control.done is not silent
    for end in (reader, owner_reads, writer, *([owner_writes] if silent else [])):
        os.close(end)


def undisturbed(runtime: Runtime) -> Iterator[list[ControlStep]]:
    """Episodes, one of which is not held up by what this machine does beside it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        yield list(runtime.episode(4, 60))


def test_an_episode_in_real_time_is_recorded_step_by_step(running) -> None:
    with closing(Runtime(running[0], towards([0.5, 0.5], 30, 0.5), observation)) as runtime:
        steps = next(one for one in undisturbed(runtime) if sum(step.record.source == "policy" for step in one) > 30)
        again = list(runtime.episode(5, 20))
    records = [step.record for step in steps]
    assert len(steps) == 60 and len(again) == 20
    assert [record.outcome for record in records] == [""] * 59 + ["time_limit"]
    assert np.diff([record.step for record in records]).tolist() == [1] * 59
    assert {record.episode for record in records} == {4}
    decided = [record for record in records if record.source == "policy"]
    assert {record.policy_version for record in decided} == {7}
    ahead = {(record.chunk, record.step - record.chunk - record.step_in_chunk) for record in decided}
    assert len(ahead) == len({chunk for chunk, _ in ahead}), "the actions of a chunk follow on each other"
    assert all(count >= 0 for _, count in ahead)
    for time_step, step in enumerate(steps):
        assert step.obs.time.tolist() == [time_step]
        np.testing.assert_array_equal(step.obs.state[0], step.record.position.astype(np.float32))
    assert runtime.delay >= 1


def test_a_chunk_that_no_arm_should_execute_is_refused(running) -> None:
    control, path = running
    control.begin(6, 100)
    while (report := control.newest()).record.episode != 6:
        pass
    control.decided(Decision(np.full((4, 2), np.nan)), report.record.step + 1)
    with pytest.raises(UserError, match="finite numbers"):
        while control.receive():
            pass
    before = len(commands(path))
    wait_until(lambda: len(commands(path)) > before + 5)  # control goes on


def test_one_arm_is_driven_by_one_program(running) -> None:
    """Whatever else their files say."""
    port = running[1].parent
    other = {"port": f"{port}/../{port.name}", "path": "other"}
    for options in (other, {"driver": f"{HERE}:PortedArm", "options": other}):  # the same arm in a dry run
        with pytest.raises(UserError, match="another program on this computer drives the arm at"), claimed(options):
            pass


def test_a_killed_process_is_told_and_its_arm_is_free_again(tmp_path: Path) -> None:
    with started(tmp_path) as control:
        os.kill(control.pid, signal.SIGKILL)
        with pytest.raises(UserError, match="was killed by SIGKILL, so the arm is where its last command left it"):
            while control.receive():
                pass
    with claimed(at_port(tmp_path)):
        pass


def test_what_does_not_fit_is_refused_before_anything_moves(tmp_path: Path) -> None:
    limits = LIMITS.to_json()
    wrong = replace(config(str(tmp_path / "commands")), limits={**limits, "joints": limits["joints"][:1]})
    with pytest.raises(UserError, match=r"The limits are of the joints \['lift'\], but toy has \['lift', 'gripper'\]"):
        ControlProcess(wrong)
    assert not len(commands(tmp_path / "commands"))


def test_missed_steps_are_left_out_and_do_not_come_in_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    pace, begun = Rate(0.1), []
    for spent in (0.02, 0.13, 0.02, 0.57, 0.01, 0.01):  # seconds that a step takes; the fourth misses others
        clock[0] += spent
        pace.wait()
        begun.append(round(clock[0] - 100.0, 6))
    assert begun == pytest.approx([0.1, 0.23, 0.3, 0.87, 0.9, 1.0])
    assert pace.overruns == 4


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def test_messages_arrive_whole_in_whatever_pieces_they_come() -> None:
    sent = [greeting("a"), {"chunk": np.arange(6.0).reshape(2, 3)}, {"kind": "stop"}]
    data = b"".join(framed(message) for message in sent)
    for size in (1, 7, len(data)):
        pieces, received = Pieces(), []
        for begin in range(0, len(data), size):
            received += pieces.add(data[begin : begin + size])
        assert (
            received[0] == sent[0] and received[2] == sent[2] and np.array_equal(received[1]["chunk"], sent[1]["chunk"])
        )


def test_an_inbox_takes_what_is_there_and_the_greeting_first(pipe: list[int]) -> None:
    inbox = Inbox(pipe[0], "control")
    assert inbox.poll() == []
    os.write(pipe[1], framed(greeting("owner")) + framed({"kind": "stop"}) + framed({"kind": "close"})[:9])
    assert inbox.poll() == [{"kind": "stop"}] and inbox.poll() == []
    os.write(pipe[1], framed({"kind": "close"})[9:])
    assert inbox.poll() == [{"kind": "close"}] and not inbox.gone


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"Traceback (most recent call last)", "where a message should begin"),
        (framed({"kind": "stop"}), "no vla-rl greeting"),
        (framed({**greeting("owner"), "contract_version": 999}), "contract version 999"),
        (b"vla1" + (1 << 40).to_bytes(8, "little"), "announces"),
    ],
)
def test_a_peer_that_speaks_nonsense_is_heard_no_more(pipe: list[int], data: bytes, why: str) -> None:
    inbox = Inbox(pipe[0], "control")
    os.write(pipe[1], data)
    assert inbox.poll() == [] and why in inbox.gone
    os.write(pipe[1], framed(greeting("owner")) + framed({"kind": "stop"}))
    assert inbox.poll() == []


def test_what_waits_for_a_peer_that_hangs_is_bounded_and_whole(pipe: list[int]) -> None:
    outbox = Outbox(pipe[1], "control", room=1 << 16)
    for number in range(2000):
        outbox.put({"number": number, "data": bytes(200)})
        outbox.flush()
    assert outbox.dropped > 500 and outbox.waiting
    os.set_blocking(pipe[0], False)
    pieces, received = Pieces(), []
    while outbox.waiting:
        received += pieces.add(os.read(pipe[0], 1 << 16))
        outbox.flush()
    received += pieces.add(os.read(pipe[0], 1 << 20))
    numbers = [message["number"] for message in received[1:]]
    assert received[0] == greeting("control") and numbers[-1] == 1999 and sorted(set(numbers)) == numbers
    assert len(numbers) + outbox.dropped == 2000


def test_a_peer_that_reads_gets_everything_however_large(pipe: list[int]) -> None:
    """More than a pipe takes at once, and in all more than may wait."""
    outbox, inbox, received = Outbox(pipe[1], "control", room=1 << 20), Inbox(pipe[0], "owner"), []
    for number in range(20):
        outbox.put({"number": number, "data": bytes([number]) * 200_000})
        while outbox.waiting:
            outbox.flush()
            received += inbox.poll()
    received += inbox.poll()
    assert outbox.dropped == 0 and not inbox.gone
    assert received == [{"number": number, "data": bytes([number]) * 200_000} for number in range(20)]


def test_nothing_waits_for_a_peer_that_has_ended() -> None:
    (ours, theirs), (reader, writer) = os.pipe(), os.pipe()
    inbox, outbox = Inbox(ours, "control"), Outbox(writer, "control")
    os.close(theirs)
    os.close(reader)
    assert inbox.poll() == [] and inbox.gone == "it has ended"
    outbox.flush()
    assert outbox.gone
    outbox.put({"number": 1})
    outbox.flush()
    assert not outbox._waiting and outbox.dropped == 1
    os.close(ours)
    os.close(writer)
