"""``vla-rl serve-policy``: a checkpoint answers benchmarks until it is stopped."""

from __future__ import annotations

import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from sims.catalog import make
from sims.toy import point_mass
from tests.docs.conftest import ROOT
from tests.elsewhere import ELSEWHERE, elsewhere
from tests.patience import PATIENCE, wait_until
from tests.policies.vla.tiny_folders import smolvla
from tests.serving.openpi_style import OpenpiStyle
from tests.serving.served import Benchmark, homewards, serving
from tests.serving.test_access import FILES, SECRET, trusting
from vla_rl.cli import main
from vla_rl.policies.function import FunctionPolicy
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.vla_eval import PolicyServer, observation_payload


@contextmanager
def started(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the address that it prints; it is killed in the end if it still runs."""
    command = [sys.executable, "-m", "vla_rl.cli", "serve-policy", *map(str, arguments)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_ctrl_c) as process:
        assert process.stderr is not None
        try:
            printed = ""
            while not (found := re.search(r"wss?://127\.0\.0\.1:\d+", printed)):
                printed = process.stderr.readline()
                assert printed, "it ended without an address"
            yield process, found[0]
        finally:
            process.kill()


def _hear_ctrl_c() -> None:
    """Jobs in the background of a shell ignore SIGINT, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.full
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_checkpoint_acts_until_it_is_stopped(untrained, number, status):
    env = make("lift", num_envs=1)
    obs = env.reset([0], [7])
    payload = observation_payload(SingleObservation.of(obs, 0, env.spec))
    env.close()
    with started(untrained(), "--port", 0) as (process, url):
        with Benchmark(url) as benchmark:
            assert benchmark.hello.payload["model_server"] == "TinyVLA"
            benchmark.start()
            action = benchmark.act(payload)
            assert action.shape == (env.spec.action_dim,)
        process.send_signal(number)
        said = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == status and "stopped serving." in said and "connected" in said


def test_openpis_clients_with_the_key_are_served_over_tls(untrained, tmp_path):
    env = make("lift", num_envs=1)
    seen = SingleObservation.of(env.reset([0], [7]), 0, env.spec)
    env.close()
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "key").chmod(0o600)
    picture = np.repeat(np.repeat(next(iter(seen.images.values())), 2, 0), 3, 1)  # of another size than the policy's
    request = {"observation/image": picture, "observation/state": seen.state, "prompt": seen.instruction}
    guard = ("--tls-cert", FILES[0], "--tls-key", FILES[1], "--api-key-file", tmp_path / "key")
    with started(untrained(), "--protocol", "openpi", "--port", 0, "--batch.size", 4, *guard) as (process, url):
        with OpenpiStyle(url, SECRET, ssl=trusting()) as client:
            assert client.metadata["policy"] == "TinyVLA" and client.metadata["images"] == {"front": [64, 64, 3]}
            chunk = client.infer(request)["actions"]
            assert chunk.ndim == 2 and chunk.shape[1] == env.spec.action_dim
            np.testing.assert_allclose(client.infer(request)["actions"], chunk, atol=1e-6)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 130 and "stopped serving." in said and SECRET not in said


def test_a_policy_is_served_from_the_device_of_the_command(untrained, monkeypatch):
    folder, env = untrained(), make("lift", num_envs=1)
    seen = SingleObservation.of(env.reset([0], [7]), 0, env.spec)
    env.close()
    found = {}

    def answer_once(server):
        device = next(server.served.policy.parameters()).device
        found[device.type] = server.served.begin({}).act(seen)
        raise KeyboardInterrupt

    monkeypatch.setattr(PolicyServer, "serve_forever", answer_once)
    with elsewhere():
        for device in ("cpu", ELSEWHERE.type):
            with pytest.raises(SystemExit):
                main(["serve-policy", str(folder), "--port", "0", "--device", device])
    np.testing.assert_allclose(found["cpu"], found[ELSEWHERE.type], atol=1e-5)


def test_an_address_is_evaluated_like_a_checkpoint(capsys, caplog, tmp_path):
    caplog.set_level(logging.INFO, "vla_rl.serving")
    with serving(FunctionPolicy(point_mass.spec(), homewards)) as server:
        address = f"vla-eval+{server.url}"
        main(["eval", address, "--env", "point_mass", "--episodes", "6", "--num-envs", "4"])
        assert json.loads(capsys.readouterr().out)["success"] == 1.0
        suite = ["--suite", "tests/serving/suite.py:origin", "--policy", address, "--out", str(tmp_path / "out")]
        main(["eval", *suite, "--num-envs", "3", "--videos", "0"])
        wait_until(lambda: caplog.text.count(" left") == 4 + 3)
    said = [record.getMessage().split(maxsplit=1)[1] for record in caplog.records]
    assert said.count("connected") == said.count("left") == 4 + 3 and len(said) == 14, "all said goodbye"
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["policy"]["name"] == address and results["score"]["success"] == 1.0


def test_a_downloaded_folder_is_served_for_an_environment(tmp_path, monkeypatch):
    env, found = make("lift", num_envs=1), []
    seen = SingleObservation.of(env.reset([0], [7]), 0, env.spec)
    folder = smolvla(tmp_path / "folder", env.spec)
    env.close()

    def answer_once(server):
        found.append((server.served.policy.horizon, server.served.begin({}).act(seen).shape))
        raise KeyboardInterrupt

    monkeypatch.setattr(PolicyServer, "serve_forever", answer_once)
    with pytest.raises(SystemExit):
        main(["serve-policy", str(folder), "--env", "lift", "--vla.horizon", "3", "--port", "0"])
    assert found == [(3, (4,))]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--port 1", "serve-policy needs CHECKPOINT"),
        ("{} --port 70000", "port is 70000, which has no meaning"),
        ("{} --host 0.0.0.0", "is reached by other machines"),
        ("{} --api-key-file nowhere", "the key file 'nowhere' cannot be read"),
        ("{} --batch.size 4", "--batch is for --protocol openpi"),
        ("{} --layout tests.serving.served:nothing", "has no 'nothing', so it cannot be loaded"),
    ],
)
def test_what_does_not_fit_is_said(complaint, untrained, arguments, sentence):
    assert sentence in complaint("serve-policy", *arguments.replace("{}", str(untrained())).split())
