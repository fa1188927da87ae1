"""The same environment over a socket: equal bit for bit, as robust, and closed to strangers."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from sims.catalog import make
from sims.isolation import remote as server_module
from sims.isolation.remote import Security, Server
from tests.patience import PATIENCE, wait_until
from tests.sims.isolation.test_isolated import require_equal, require_nothing_lost
from tests.tls import CERTIFICATE, private_key, secret_file
from tests.worker_pids import worker_pids
from vla_rl.contract.errors import UserError
from vla_rl.contract.wire import MAGIC, SocketStream, handshake, pack

ROOT = Path(__file__).resolve().parents[3]
TROUBLED = "tests.sims.isolation.troubled:{}"
LIFT = {"image_size": 16, "threads": 1}
pytestmark = pytest.mark.filterwarnings("ignore:the worker at:UserWarning")


@pytest.fixture
def serve():
    """A function that serves an environment and returns its address."""
    servers = []

    def started(name, security=None):
        servers.append(Server(name, 0, security=security))
        threading.Thread(target=servers[-1].run, daemon=True).start()
        return f"127.0.0.1:{servers[-1].port}"

    yield started
    for one in servers:
        one.close()
    wait_until(lambda: not worker_pids())  # which the threads of their sessions end


def remote(address, num_envs=3, **options):
    return closing(make("remote", num_envs=num_envs, address=address, **options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("isolated", {"env": "point_mass", "python": "touch"}),
        ("gym", {"id": "CartPole-v1", "wrappers": {"posix:getpid": {}}}),
        ("multi_task", {"tasks": [{"env": "posix:getpid"}]}),
        ("warp", {"model": "../../x"}),
    ],
)
def test_a_client_names_no_code_programs_or_files(name, options, serve):
    with pytest.raises(UserError, match=r"a client names the .*--trust"):
        make("remote", num_envs=1, address=serve(name), options=options)


@pytest.mark.parametrize(("name", "options"), [("counting", {}), pytest.param("lift", LIFT, marks=pytest.mark.full)])
def test_it_equals_the_environment_here_bit_for_bit(name, options, serve):
    with remote(serve(name), options=options, workers=2) as far:
        require_equal(far, make(name, num_envs=3, **options), 20)


def test_nothing_is_lost_doubled_or_reordered(serve):
    with remote(serve("counting"), num_envs=5, workers=2) as env:
        require_nothing_lost(env, rollouts=1)


@pytest.mark.parametrize(
    ("trouble", "said", "seconds"),
    [
        ("killed", r"was killed by SIGKILL(.|\n)*the last words step", 60.0),
        pytest.param("hung", "did not answer in time", 6.0, marks=pytest.mark.full),
    ],
)
def test_a_worker_there_that_fails_is_replaced_and_quoted(trouble, said, seconds, serve, tmp_path):
    options = {"method": "step", "trouble": trouble, "folder": str(tmp_path), "times": 1}
    with remote(serve(TROUBLED.format("make")), 2, options=options, deadline_s=seconds) as env:
        env.reset([0, 1], [2, 3])
        with pytest.warns(UserWarning, match=said):
            step = env.step(np.ones((2, 1, 2)))
        assert step.cause == ("worker", "worker")
        env.reset([0, 1], [2, 3])
        assert env.step(np.ones((2, 1, 2))).valid.all()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 1
    wait_until(lambda: not Path(f"/proc/{pids[0]}").exists())  # a hung one, too


def test_a_client_that_goes_ends_its_worker(serve):
    env = make("remote", num_envs=1, address=serve("counting"))
    env.reset([0], [0])
    workers = worker_pids()
    assert workers
    env.workers[0].link._stream.socket.close()  # as when its machine loses power
    wait_until(lambda: not worker_pids() & workers)
    env.close()


def test_a_client_whose_machine_is_gone_is_noticed(serve, monkeypatch):
    """The system asks it for a sign of life, and ends the connection without an answer."""
    servers = []
    monkeypatch.setattr(server_module, "_relay", lambda stream, *_: servers.append(stream.socket) or stream.read(1))
    address = serve("counting")
    with socket.create_connection(address.split(":"), PATIENCE) as client:
        client.sendall(Security().digest())
        handshake(SocketStream(client.dup()), SocketStream(client.dup()), "test")
        wait_until(lambda: servers)
        assert servers[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert servers[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


def test_a_server_without_free_files_goes_on_later(capfd):
    class Exhausted:
        """A listener that fails once."""

        def __init__(self, listener):
            self.listener, self.accept = listener, self.fail

        def __getattr__(self, name):
            return getattr(self.listener, name)

        def fail(self):
            self.accept = self.listener.accept
            raise OSError(errno.EMFILE, "Too many open files")

    with closing(Server("counting", 0)) as server:
        server._listener = Exhausted(server._listener)
        serving = threading.Thread(target=server.run, daemon=True)
        serving.start()
        with remote(f"127.0.0.1:{server.port}", num_envs=1) as env:
            assert env.reset([0], [3]).time.tolist() == [0]
    serving.join(PATIENCE)
    assert not serving.is_alive() and "could not be accepted" in capfd.readouterr().err


# -- strangers ---------------------------------------------------------------------------------------------------------


def secured(tmp_path, secret="open sesame, please", certificate=True):
    key = secret_file(tmp_path / f"{secret.replace(' ', '_')}.key", secret.encode() + b"\n")
    files = (CERTIFICATE, private_key()) if certificate else ("", "")
    return Security(str(key), *files)


def test_with_certificate_and_key_it_is_encrypted_and_works(serve, tmp_path):
    security = secured(tmp_path)
    address = serve("counting", security)
    with remote(address, key=security.key, certificate=security.certificate) as env:
        assert env.reset([0, 1, 2], [4, 5, 6]).state[:, 0].tolist() == [4, 5, 6]
    plain = socket.create_connection(address.split(":"), PATIENCE)
    plain.sendall(security.digest())
    with suppress(ConnectionResetError):
        assert plain.recv(100)[:1] != MAGIC[:1], "the server answers in the clear"
    plain.close()


@pytest.mark.parametrize("secret", ["", "open sesame, pleas"])
def test_without_the_key_nothing_is_served(serve, tmp_path, secret, capfd):
    address = serve("counting", secured(tmp_path, certificate=False))
    wrong = secured(tmp_path, secret, certificate=False).key if secret else ""
    with pytest.warns(UserWarning, match="cannot be reached"), pytest.raises(UserError, match="with this key"):
        make("remote", num_envs=1, address=address, key=wrong)
    assert "without the key was refused" in capfd.readouterr().err and not worker_pids()


def test_a_certificate_of_somebody_else_is_not_trusted(serve, tmp_path):
    other = tmp_path / "other.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "9"]
    if subprocess.run([*made, "-keyout", os.devnull, "-out", other], capture_output=True).returncode:
        pytest.fail("openssl is needed to make a second certificate; install it")
    security = secured(tmp_path)
    with pytest.warns(UserWarning, match="CERTIFICATE_VERIFY_FAILED"), pytest.raises(UserError):
        make("remote", num_envs=1, address=serve("counting", security), key=security.key, certificate=str(other))


STRANGE = (
    b"x" * 10,
    Security().digest() + b"GET / HTTP/1.1\r\n\r\n",
    Security().digest() + MAGIC + (1 << 40).to_bytes(8, "little"),
    Security().digest() + MAGIC + len(pack("hello")).to_bytes(8, "little") + pack("hello"),
)


def test_strangers_are_refused_and_the_server_goes_on(serve, monkeypatch):
    monkeypatch.setattr(server_module, "GREETING_S", 1.0)
    address = serve("counting")
    for sent in STRANGE:
        received = bytearray()
        with socket.create_connection(address.split(":"), PATIENCE) as stranger:
            stranger.sendall(sent)
            with suppress(ConnectionError):  # what the server has not read is thrown away
                while piece := stranger.recv(1 << 16):  # until the server closes
                    received += piece
        assert len(received) < 200 and not worker_pids()
    monkeypatch.setattr(server_module, "GREETING_S", PATIENCE)
    with remote(address, num_envs=1) as env:
        assert env.reset([0], [3]).time.tolist() == [0]


def test_a_request_that_is_too_large_ends_the_session(serve, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_REQUEST", 2000)
    with remote(serve("counting"), num_envs=2) as env:
        env.reset([0, 1], [4, 6])
        assert env.step(np.ones((2, 2, 2))).valid.all()
        saved = {**env.snapshot([0, 1]), "worker/large": np.zeros((2, 5000))}
        with pytest.warns(UserWarning, match="cannot be reached"), pytest.raises(UserError, match="during 'restore'"):
            env.restore([0, 1], saved)


def test_a_client_cannot_choose_the_program(serve):
    address = serve("counting")
    with remote(address, num_envs=1) as env:
        env.workers[0]._make["env"] = TROUBLED.format("unmade")
        env.workers[0].link.kill()
        env.reset([0], [1])
        assert env.spec.name == "counting" and env.restarts == 1


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: make("remote", num_envs=1), "no address was given"),
        (lambda: make("remote", num_envs=1, address="here"), "'here' is no address"),
        (lambda: make("remote", num_envs=1, address="10.0.0.1:80", key="k"), "give a certificate and a key"),
        (lambda: Server("counting", 0, "0.0.0.0"), r"'0\.0\.0\.0' is another machine"),
        (lambda: Security("no/such/file").digest(), "'no/such/file' cannot be read"),
    ],
)
def test_what_is_not_safe_or_makes_no_sense_is_refused(act, sentence):
    with pytest.raises(UserError, match=sentence):
        act()


@pytest.mark.parametrize("ending", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_the_command_serves_until_it_is_interrupted(ending):
    command = [sys.executable, "-m", "vla_rl.cli", "sims", "serve", "counting", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "counting is served on 127.0.0.1:" in line
        with remote(line.split()[4].rstrip(";"), num_envs=1) as env:
            assert env.reset([0], [7]).state[0, 0] == 7
        process.send_signal(ending)
        assert process.wait(PATIENCE) == 0
