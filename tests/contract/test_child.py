"""A child process: deadlines, what becomes of it, its last words, and that it ends with its owner."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE, wait_until
from vla_rl.contract.child import Child, ChildError
from vla_rl.contract.errors import UserError

ROOT = str(Path(__file__).resolve().parents[2])
SERVE = "import sys, os, time, signal, subprocess\nfrom vla_rl.contract.child import serve_owner\n"
ECHO = SERVE + "serve_owner('echo', lambda message, writer: message)"


@pytest.fixture
def child(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    made = Child((sys.executable, "-c", getattr(request, "param", ECHO)))
    yield made
    made.close()


def gone(pid):
    path = Path(f"/proc/{pid}/stat")
    try:
        return path.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_messages_come_back_also_long_ones_and_several_at_once(child):
    sent = [{"number": i, "text": "x" * size} for i, size in enumerate((0, 10, 300_000, 5))]
    child.send(sent[0])
    assert child.receive() == sent[0]
    for message in sent[1:]:
        child.send(message)
    assert [child.receive() for _ in sent[1:]] == sent[1:]
    child.send("before")
    assert select.select([child], [], [], PATIENCE)[0]
    assert child.receive(time.monotonic() - 1) == "before", "an answer in time is read after the deadline too"


@pytest.mark.parametrize("child", [SERVE + "time.sleep(600)"], indirect=True)
def test_silence_and_a_full_pipe_end_at_the_deadline(child, monkeypatch):
    start = time.monotonic()
    child.send("hello")
    for act in (
        lambda: child.receive(time.monotonic() + 0.2),
        lambda: child.send("x" * (1 << 23), time.monotonic() + 0.2),
    ):
        with pytest.raises(ChildError, match="did not answer in time"):
            act()
    assert 0.4 <= time.monotonic() - start < PATIENCE
    monkeypatch.setattr("vla_rl.contract.child._GRACE", 0.2)  # it does not end by itself
    child.close()
    wait_until(lambda: gone(child.pid))
    assert not child.running


@pytest.mark.parametrize(
    ("child", "fate"),
    [
        (SERVE + "serve_owner('x', lambda message, writer: sys.exit(3))", "ended with exit code 3"),
        (SERVE + "serve_owner('x', lambda message, writer: os.abort())", "was killed by SIGABRT"),
        (SERVE + "serve_owner('x', lambda message, writer: os.kill(os.getpid(), 40))", "was killed by signal 40"),
    ],
    indirect=["child"],
)
def test_the_fate_of_a_process_is_told(child, fate):
    child.send("hello")
    with pytest.raises(ChildError, match=fate):
        child.receive()
    child.close()
    with pytest.raises(ChildError, match="was closed"):
        child.send("hello")


SPEAKS = SERVE + "print('\\n'.join(map(str, range(100))), 'end', file=sys.stderr)\nos.write(1, b'')\nsys.exit(1)"


@pytest.mark.parametrize("child", [SPEAKS], indirect=True)
def test_its_last_words_are_kept_and_shown(child, capfd):
    with pytest.raises(ChildError, match="ended with exit code 1"):
        child.receive()
    words = child.last_words().splitlines()
    assert words[-1] == "99 end" and 10 < len(words) < 50
    assert capfd.readouterr().err.splitlines()[0] == "0"


PARENT = SERVE + (
    "other = subprocess.Popen(['sleep', '600'])\nserve_owner('parent', lambda message, writer: other.pid)"
)


@pytest.mark.parametrize("child", [PARENT], indirect=True)
def test_what_it_started_ends_with_it(child):
    child.send("who?")
    pid = child.receive()
    assert not gone(pid)
    child.close()
    wait_until(lambda: gone(pid))


@pytest.mark.parametrize("child", [SERVE + "os.kill(os.getpid(), signal.SIGSTOP)"], indirect=True)
def test_one_that_cannot_be_killed_is_left_behind(child, monkeypatch):
    """As by a driver that hangs in the kernel: the owner goes on."""
    wait_until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    monkeypatch.setattr("vla_rl.contract.child._GRACE", 0.1)
    monkeypatch.setattr(child, "kill", lambda: None)
    closing = threading.Thread(target=child.close, daemon=True)
    closing.start()
    closing.join(60)
    left_behind = not closing.is_alive() and not gone(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    assert left_behind and child.closed and not child.running
    wait_until(lambda: gone(child.pid))


def test_a_process_at_work_ends_with_its_owner(monkeypatch, tmp_path):
    """Its owner is killed while it computes; it reads nothing meanwhile."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    busy = SERVE + (
        f"other = subprocess.Popen(['sleep', '600'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(other.pid))\n"
        "serve_owner('busy', lambda message, writer: time.sleep(600))"
    )
    owner = SERVE + (
        "from vla_rl.contract.child import Child\n"
        f"child = Child((sys.executable, '-c', {busy!r}))\n"
        "child.send('work')\n"
        "from vla_rl.contract.wire import greeted, read_message\n"
        "greeted(read_message(child._stream), 'owner')\n"
        "serve_owner('owner', lambda message, writer: child.pid)"
    )
    child = Child((sys.executable, "-c", owner))
    child.send("who?")
    pids = child.receive(), int((tmp_path / "pid").read_text())
    assert not any(map(gone, pids))
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: all(map(gone, pids)))  # and what it has started
    child.close()


def test_a_command_that_does_not_exist_is_named():
    with pytest.raises(UserError, match="'no/such/python' cannot be started"):
        Child(("no/such/python",))
