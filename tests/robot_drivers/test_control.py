"""The control process: whatever becomes of the others, the arm comes to rest within the watchdog's time.

What is asserted are the commands that the arm has got, counted in control steps by their own stamps.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from robot_drivers.control import Control, Inbox, Outbox, Rate
from robot_drivers.executor import Executor, RecedingHorizon
from robot_drivers.record import Decision, Query
from robot_drivers.runtime import ControlProcess, Moment, Runtime
from robot_drivers.safety import Supervisor
from tests.patience import PATIENCE
from tests.robot_drivers.file_arm import SPEED, FileArm, config
from tests.robot_drivers.owner import FAR
from tests.robot_drivers.toy_arm import DT, HZ, LIMITS, ToyArm, observation, towards
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


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.02)


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


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[bool], list[int]]]:
    """Starts an owner of an arm, which writes to "commands"; says the ids of owner, control and teleoperator."""
    started: list[subprocess.Popen[str]] = []

    def start(leader: bool) -> list[int]:
        command = [sys.executable, "-m", "tests.robot_drivers.owner", str(tmp_path / "commands"), "leader" * leader]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[0].stdout is not None
        return [started[0].pid, *map(int, started[0].stdout.readline().split())]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    wait_until(lambda: ended(tmp_path / "commands"))


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("who", ["owner", "teleoperator"])
def test_when_somebody_is_killed_or_hangs_the_arm_holds(who: str, signal_number: int, owner, tmp_path: Path) -> None:
    path = tmp_path / "commands"
    pids = owner(who == "teleoperator")
    wait_until(lambda: moving(path))
    os.kill(pids[0 if who == "owner" else 2], signal_number)
    assert_holds_after(path, time.monotonic())
    if (who, signal_number) == ("owner", signal.SIGKILL):
        wait_until(lambda: ended(path))  # the arm is disconnected


def test_a_policy_that_hangs_leaves_the_arm_holding(tmp_path: Path) -> None:
    path, hung, release = tmp_path / "commands", threading.Event(), threading.Event()
    first = towards([FAR, 0.5], 400, SPEED)

    def decide(query: Query) -> Decision:
        if query.step > 30:
            hung.set()
            release.wait()
        return first(query)

    with ControlProcess(config(str(path))) as control, Runtime(control, decide, observation, patience=0.1) as runtime:
        running = runtime.episode(1, 1 << 30)  # is not ended when nobody looks on
        for _ in running:
            if hung.is_set():
                break
        assert_holds_after(path, time.monotonic() + 0.1)
        release.set()
        running.close()


def test_a_policy_that_hangs_for_long_ends_the_episode_in_one_sentence(tmp_path: Path) -> None:
    compiled, release, asked = threading.Event(), threading.Event(), []
    first = towards([FAR, 0.5], 20, SPEED)

    def decide(query: Query) -> Decision:
        asked.append(query.step)
        (release if len(asked) > 1 else compiled).wait()  # the first one may take longer
        return first(query)

    with (
        ControlProcess(config(str(tmp_path / "commands"))) as control,
        Runtime(control, decide, observation, patience=0.1) as runtime,
    ):
        with pytest.raises(UserError, match=r"has not decided for 0.5 s, so the arm is held"):
            for number, _ in enumerate(runtime.episode(1, 1 << 30)):
                if number > 40:
                    compiled.set()
        assert compiled.is_set() and len(asked) == 2
        release.set()


def test_a_camera_that_hangs_leaves_the_arm_holding(tmp_path: Path) -> None:
    path, stuck = tmp_path / "commands", [np.inf]
    decide = towards([FAR, 0.5], 400, SPEED)

    def pictured() -> float:
        return min(stuck[0], time.monotonic())

    with (
        ControlProcess(config(str(path))) as control,
        Runtime(control, decide, observation, pictured=pictured) as runtime,
    ):
        running = runtime.episode(1, 1 << 30)  # is not ended when nobody looks on
        for _ in running:
            if moving(path):
                stuck[0] = time.monotonic()
                break
        assert_holds_after(path, stuck[0])
        running.close()


@pytest.mark.parametrize("silent", [False, True])
def test_control_ends_once_the_arm_is_at_rest_when_its_owner_is_gone_and_not_while_it_is_silent(silent: bool) -> None:
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


def undisturbed(runtime: Runtime) -> Iterator[list[Moment]]:
    """Episodes, one of which is not held up by what this machine does beside it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        yield list(runtime.episode(4, 60))


def of_policy(moment: Moment) -> bool:
    return moment.record.source == "policy"


def test_an_episode_in_real_time_is_recorded_step_by_step(tmp_path: Path) -> None:
    decide = towards([0.5, 0.5], 30, 0.5)
    with (
        ControlProcess(config(str(tmp_path / "commands"))) as control,
        Runtime(control, decide, observation) as runtime,
    ):
        moments = next(one for one in undisturbed(runtime) if sum(map(of_policy, one)) > 30)
        again = list(runtime.episode(5, 20))
    records = [moment.record for moment in moments]
    assert len(moments) == 60 and len(again) == 20 and records[-1].outcome == "time_limit"
    assert np.diff([record.step for record in records]).tolist() == [1] * 59
    assert {record.episode for record in records} == {4}
    report = [record for record in records if record.source == "policy"]
    assert {record.policy_version for record in report} == {7}
    ahead = {(record.chunk, record.step - record.chunk - record.step_in_chunk) for record in report}
    assert len(ahead) == len({chunk for chunk, _ in ahead}), "the actions of a chunk follow on each other"
    assert all(steps >= 0 for _, steps in ahead)
    for moment, following in pairwise(moments):
        step = moment.step
        assert step.executed[0, 0] == pytest.approx(moment.record.executed) and step.valid.all()
        assert step.obs is following.obs and step.frames == (step.obs,)
        assert not step.done.any()
    last = moments[-1].step
    assert last.truncated[0] and last.cause == ("time_limit",) and not last.success[0]
    assert [int(moment.obs.time[0]) for moment in moments] == list(range(60))
    assert runtime.delay >= 1


def test_a_chunk_that_no_arm_should_execute_is_refused_and_control_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "commands"
    with ControlProcess(config(str(path))) as control:
        control.begin(1, 100)
        running = control.receive()
        assert running is not None
        control.decided(Decision(np.full((4, 2), np.nan)), running.record.step + 1)
        with pytest.raises(UserError, match="finite numbers"):
            while control.receive():
                pass
        before = len(commands(path))
        wait_until(lambda: len(commands(path)) > before + 5)
    assert ended(path)


def test_what_does_not_fit_is_refused_before_anything_moves(tmp_path: Path) -> None:
    sound, (lift, gripper) = config(str(tmp_path / "commands")), LIMITS.to_json()["joints"]
    for joints, says in (
        ([lift], "The limits are of the joints ['lift'], but toy has ['lift', 'gripper']"),
        ([{**lift, "high": 114.6}, gripper], "allows 2 (rad), so the arm is not moved (are these degrees?)"),
    ):
        wrong = {**asdict(sound), "limits": {**LIMITS.to_json(), "joints": joints}}
        with pytest.raises(UserError, match=re.escape(says)):
            ControlProcess(type(sound)(**wrong))
    assert not len(commands(tmp_path / "commands"))


def test_a_control_process_that_is_killed_is_told_to_whoever_waits(tmp_path: Path) -> None:
    with ControlProcess(config(str(tmp_path / "commands"))) as control:
        os.kill(control.pid, signal.SIGKILL)
        with pytest.raises(UserError, match="was killed by SIGKILL, so the arm is where its last command left it"):
            while control.receive():
                pass


def test_the_control_path_runs_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\n" + "\n".join(
        f"import robot_drivers.{name}" for name in ("control", "executor", "simulated", "runtime")
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_one_arm_is_driven_by_one_program(tmp_path: Path) -> None:
    """Whatever else their files say; the arm is free again when the first has ended, however that was."""
    first, second = (
        replace(config(str(tmp_path / name)), driver=f"{__name__}:Ported", driver_options={**options, "path": name})
        for name, options in (("a", {"port": str(tmp_path)}), ("b", {"port": f"{tmp_path}/../{tmp_path.name}"}))
    )
    with ControlProcess(first) as control:
        for other in (second, replace(second, driver="robot_drivers.driver:DryRun", driver_options=dry(second))):
            with pytest.raises(UserError, match="another program on this computer drives the arm at"):
                ControlProcess(other)
        os.kill(control.pid, signal.SIGKILL)
    ControlProcess(second).close()


def dry(config) -> dict[str, object]:
    return {"driver": config.driver, "options": config.driver_options}


class Ported(FileArm):
    """An arm at a port."""

    def __init__(self, port: str, path: str) -> None:
        super().__init__(f"{port}/{path}")


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


def test_a_peer_that_has_ended_is_gone() -> None:
    reader, writer = os.pipe()
    inbox = Inbox(reader, "control")
    os.close(writer)
    assert inbox.poll() == [] and inbox.gone == "it has ended"
    os.close(reader)


def test_what_waits_for_a_peer_that_hangs_is_bounded_and_whole(pipe: list[int]) -> None:
    outbox = Outbox(pipe[1], "control", room=1 << 16)
    for number in range(3000):
        outbox.put({"number": number, "data": bytes(200)})
        outbox.flush()
    assert outbox.dropped > 1000 and outbox.waiting
    os.set_blocking(pipe[0], False)
    pieces, received = Pieces(), []
    while outbox.waiting:
        received += pieces.add(os.read(pipe[0], 1 << 16))
        outbox.flush()
    received += pieces.add(os.read(pipe[0], 1 << 20))
    numbers = [message["number"] for message in received[1:]]
    assert received[0] == greeting("control") and numbers[-1] == 2999 and sorted(set(numbers)) == numbers
    assert len(numbers) + outbox.dropped == 3000


def test_a_peer_that_reads_gets_everything_however_large_and_however_much(pipe: list[int]) -> None:
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
    reader, writer = os.pipe()
    outbox = Outbox(writer, "control")
    os.close(reader)
    outbox.flush()
    assert outbox.gone
    outbox.put({"number": 1})
    outbox.flush()
    assert not outbox._waiting and outbox.dropped == 1
    os.close(writer)
