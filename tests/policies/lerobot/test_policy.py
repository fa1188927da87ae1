"""A policy in a process of its own, behind the link to LeRobot: small policies with LeRobot's interface run there."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sims import catalog
from tests.policies.lerobot.small import STATE, load
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.check import check_policy
from vla_rl.contract.child import SharingChild, read_answer
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.wire import Arrays, arrays_in, pack, unpack
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.driver import Driver
from vla_rl.experience.rollout import RolloutSource
from vla_rl.policies.lerobot.policy import POLICIES, LeRobotPolicy
from vla_rl.policies.lerobot.worker import PolicyServer
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.residual import DeterministicResidual, ResidualConfig
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.policies import StartFrom, start_policy
from vla_rl.recipes.trainers import OnPolicyRL, RunContext

ROOT = Path(__file__).resolve().parents[3]
SPEC = catalog.spec_of("point_mass")
SEEDS = list(range(2_000_000_000, 2_000_000_012))


class ElsewherePolicy(LeRobotPolicy):
    """One whose process runs a policy of ``small.py``, in this installation."""

    def start_process(self) -> SharingChild:
        command = (sys.executable, "-m", "tests.policies.lerobot.small")
        return SharingChild(command, {**os.environ, "PYTHONPATH": str(ROOT)}, "policy")


class _Here:
    """What answers in the process, without one: for tests of what crosses, not of the crossing."""

    def __init__(self) -> None:
        self._server, self._answer = PolicyServer(load), dict[str, Any]()

    def send(self, message: dict[str, Any], deadline: float) -> None:
        self._answer = unpack(pack(self._server.answer(unpack(pack(message)))))

    def receive(self, deadline: float) -> tuple[dict[str, Any], Arrays]:
        return read_answer(self._answer, arrays_in)

    def close(self) -> None:
        """Nothing to end."""


class SmallPolicy(LeRobotPolicy):
    """One of ``small.py``."""

    def start_process(self) -> Any:
        return _Here()


def folder(path: Path, kind: str = "Queued", **more: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"type": kind, **more}))
    return path


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """In a process; the one test that ends it is the last of this file."""
    with closing(ElsewherePolicy(SPEC, folder(tmp_path_factory.mktemp("elsewhere") / "it"))) as policy:
        yield policy


@pytest.fixture
def queued(tmp_path):
    return SmallPolicy(SPEC, folder(tmp_path / "queued"))


@pytest.fixture
def chunked(tmp_path):
    return SmallPolicy(SPEC, folder(tmp_path / "chunked", "Chunked"))


def test_it_keeps_the_contract(queued, chunked):
    with closing(catalog.make("point_mass", num_envs=3)) as env:
        for policy in (queued, chunked):
            check_policy(policy, env, torch.Generator().manual_seed(0))
    assert (queued.horizon, chunked.horizon) == (1, 4)  # one that reads earlier observations has to see them


def test_an_evaluation_does_not_depend_on_the_process_or_on_who_is_beside(elsewhere, queued):
    found = []
    for policy, num_envs in ((elsewhere, 1), (elsewhere, 5), (queued, 12)):
        with closing(catalog.make("point_mass", num_envs=num_envs)) as env:
            found.append(evaluate(env, policy, SEEDS, 1).returns)
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)
    assert np.std(found[0]) > 0.01


def test_an_episode_begins_anew_where_its_environment_does(chunked):
    """A chunk of four is corrected one by one, and two of three environments begin in its middle."""
    residual = DeterministicResidual(chunked, config=ResidualConfig())
    with closing(catalog.make("point_mass", num_envs=3)) as env:
        driver = Driver(env, residual, torch.Generator().manual_seed(0), mode="eval")
        driver.start([1, 2, 3])
        for _ in range(2):
            driver.step()
        driver.reset(np.array([0, 2]), np.array([8, 9]))
        out = driver.step().out.action[:, 0].numpy()
        fresh = Driver(env, residual, torch.Generator().manual_seed(0), mode="eval")
        fresh.start([8, 2, 9])
        np.testing.assert_array_equal(out[[0, 2]], fresh.step().out.action[[0, 2], 0].numpy())


def source(residual: DeterministicResidual, env: object) -> RolloutSource:
    return RolloutSource(env, residual, 3, SeedStream(0, 1000, 1), torch.Generator().manual_seed(4))


@pytest.mark.parametrize("kind", ["Queued", "Chunked"])
def test_a_run_goes_on_bit_for_bit_in_another_process(kind, tmp_path):
    """Saved in the middle of episodes and of chunks; the residual and its base are loaded again."""
    with closing(SmallPolicy(SPEC, folder(tmp_path / "it", kind))) as base:
        residual = DeterministicResidual(base, config=ResidualConfig())
        residual.save_pretrained(tmp_path / "saved")
        with closing(catalog.make("point_mass", num_envs=4)) as env:
            whole = source(residual, env)
            for _ in range(3):
                whole.next()
            saved = whole.state_dict()
            expected = whole.next()
    again = load_policy(tmp_path / "saved", SPEC)
    with closing(again.base), closing(catalog.make("point_mass", num_envs=4)) as env:
        other = source(again, env)
        other.load_state_dict(saved)
        found = other.next()
    assert torch.equal(found.executed, expected.executed) and torch.equal(found.reward, expected.reward)
    assert again.base.horizon == base.horizon and again.base.folder == base.folder


def test_what_does_not_fit_is_refused(tmp_path):
    camera = {"observation.images.top": {"type": "VISUAL", "shape": [3, 8, 8]}}
    state = {STATE: {"type": "STATE", "shape": [2]}}
    cases = {
        r"was trained for 'observation.state' of shape \[3\] and the environment 'point_mass' has \[2\]": {
            STATE: {"type": "STATE", "shape": [3]}
        },
        r"reads 'observation.environment_state' and the extras of the environment 'point_mass' are none": {
            **state,
            "observation.environment_state": {"type": "ENV", "shape": [3]},
        },
        r"has the cameras top and the environment 'point_mass' has none": {**state, **camera},
    }
    for number, (message, inputs) in enumerate(cases.items()):
        with pytest.raises(UserError, match=message):
            SmallPolicy(SPEC, folder(tmp_path / str(number), "Chunked", inputs=inputs))
    with pytest.raises(UserError, match=r"a Hidden keeps layer.last"):
        SmallPolicy(SPEC, folder(tmp_path / "hidden", "Hidden"))
    with pytest.raises(UserError, match=r"of the options --vla only cameras and horizon have a meaning"):
        SmallPolicy(SPEC, folder(tmp_path / "options"), options=VLAOptions(dtype="bfloat16"))
    with pytest.raises(UserError, match=r"holds no config.json, so LeRobot finds no policy there"):
        SmallPolicy.open(str(tmp_path), SPEC)


def test_extras_and_cameras_are_shown_under_lerobots_names(tmp_path):
    spec = replace(
        SPEC,
        images={"front": ArraySpec((8, 6, 3), "uint8", 0, 255)},
        extras={
            "environment_state": ArraySpec((3,), "float32", -1, 1),
            "privileged/x": ArraySpec((1,), "float32", 0, 1),
        },
    )
    inputs = {
        "observation.images.top": {"type": "VISUAL", "shape": [3, 8, 6]},
        STATE: {"type": "STATE", "shape": [2]},
        "observation.environment_state": {"type": "ENV", "shape": [3]},
    }
    made = folder(tmp_path / "it", "Chunked", inputs=inputs)
    with closing(SmallPolicy(spec, made, options=VLAOptions(cameras={"top": "front"}, horizon=3))) as policy:
        assert policy.inputs == {
            "observation.images.top": "images/front",
            STATE: "state",
            "observation.environment_state": "extras/environment_state",
        }
        assert policy.horizon == 3 and policy.feature_sizes == {"state": 2, "extras/environment_state": 3}
        features = policy.encode(spec.zeros(2).public())
        assert policy.act(features, policy.initial_state(2), "eval", torch.Generator())[0].action.shape == (2, 3, 2)
        with pytest.raises(ContractError, match="an observation has no 'extras/environment_state'"):
            policy.encode(replace(spec.zeros(2), extras={}))


def test_what_needs_a_density_or_a_gradient_names_the_residual(queued):
    context = RunContext(EnvConfig("point_mass"), queued, 1, OneProcess())
    flows = load_config("smolvla.py:ppo").rl
    for trainer in (flows, OnPolicyRL(StartFrom()), load_config("smolvla.py:dsrl").rl):
        with (
            closing(trainer.build_env(replace(context))) as env,
            pytest.raises(UserError, match=r"lerobot.py:residual"),
        ):
            policy = trainer.build_policy(context, env)
            trainer.build_learner(context, env, policy)


def test_an_installation_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_RL_HOME", str(tmp_path))
    name = f"lerobot:{folder(tmp_path / 'it')}"
    with pytest.raises(
        UserError, match="lerobot is not installed, so it cannot run; run 'vla-rl policies install lerobot"
    ):
        start_policy(name, EnvConfig("point_mass"), 1)
    with pytest.raises(UserError, match=r"'LeRobot' checkpoint .* belongs to no environment, .*; name one with --env"):
        load_policy(name)
    assert POLICIES.one("lerobot").pins.is_file()


def test_a_processor_that_names_code_of_others_is_refused(tmp_path):
    made = folder(tmp_path / "it")
    steps = [{"registry_name": "device_processor"}, {"class": "lerobot.processor.X"}, {"class": "theirs.Step"}]
    (made / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    with pytest.raises(UserError, match=r"names the code 'theirs.Step', which LeRobot would run, .*; add --trust"):
        SmallPolicy(SPEC, made)
    (made / "policy_preprocessor.json").write_text("[")
    with pytest.raises(UserError, match=r"policy_preprocessor.json' is damaged"):
        SmallPolicy(SPEC, made)


def test_a_process_that_dies_ends_in_one_sentence(elsewhere):
    features, state = elsewhere.encode(SPEC.zeros(2)), elsewhere.initial_state(2)
    assert elsewhere.act(features, state, "eval", torch.Generator())[0].action.shape == (2, 1, 2)
    os.killpg(elsewhere._link.pid, signal.SIGKILL)
    with pytest.raises(
        UserError, match=r"process of the LeRobot policy '.*it' was killed by SIGKILL, so it chooses no"
    ):
        elsewhere.act(features, state, "eval", torch.Generator())
