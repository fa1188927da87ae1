"""The real LeRobot behind the link: its families play as in its own loop, whoever plays beside them."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.policy import State
from vla_rl.policies.lerobot.policy import POLICIES, LeRobotPolicy
from vla_rl.policies.pretrained import load_policy

INSTALLED = POLICIES.one("lerobot").state()
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(INSTALLED != "ready", reason=f"LeRobot is {INSTALLED}: vla-rl policies install lerobot"),
]
# What is drawn by others than randn and rand, or not for the batch first, depends on who is beside.
OWN_NOISE = ("act", "act_ensemble", "act_pictures", "diffusion", "tdmpc")
AT_ONCE = {"act": 6, "act_ensemble": 1, "act_pictures": 6, "diffusion": 1, "tdmpc": 2, "tdmpc_planned": 2, "vqbet": 1}
SPEC = EnvSpec(
    name="recorded",
    images={"front": ArraySpec((32, 32, 3), "uint8", 0, 255)},
    state=ArraySpec((5,), "float32", -9, 9),
    action=ArraySpec((2,), "float32", -9, 9),
    tasks=("go",),
    control_dt=0.1,
    time_limit=22,
    max_chunk=16,
    extras={"environment_state": ArraySpec((3,), "float32", -9, 9)},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Small policies of LeRobot's families, and what its own loop does with each."""
    folder = tmp_path_factory.mktemp("lerobot")
    command = [str(POLICIES.find("lerobot").python), str(Path(__file__).with_name("alone.py")), str(folder)]
    variables = {**POLICIES.child_environment("lerobot"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def decided(policy: LeRobotPolicy, shown: dict[str, np.ndarray], state: State, seed: int) -> np.ndarray:
    """One action [E,D] for ``shown``; noise by the seeds ``seed``, ``seed + 1``, ..., one for each environment."""
    count = len(state["step"])
    own = {"session": state["session"].numpy(), "step": state["step"].numpy(), "task": np.zeros(count, np.int64)}
    arrays = {**own, "seed": seed + np.arange(count), **shown}
    actions: np.ndarray = policy._ask("act", {"horizon": 1}, arrays)[1]["action"][:, 0].copy()
    return actions


@pytest.mark.parametrize("name", AT_ONCE)
def test_every_environment_plays_as_in_lerobots_own_loop(folders, name):
    with np.load(folders / f"{name}.npz") as file:
        seen = {key: file[key] for key in file.files}
    alone, begins = seen.pop("actions"), seen.pop("begins")
    with closing(load_policy(f"lerobot:{folders / name}", SPEC)) as policy:
        assert isinstance(policy, LeRobotPolicy) and policy.horizon == AT_ONCE[name]
        assert list(policy.inputs) == list(seen)
        state, found = policy.initial_state(alone.shape[1]), []
        for at in range(len(alone)):
            state = policy.reset_state(state, np.flatnonzero(begins[at]))
            found.append(decided(policy, {key: item[at] for key, item in seen.items()}, state, 100 * at))
            state = {**state, "step": state["step"] + 1}
    assert np.isfinite(found).all()
    if name in OWN_NOISE:
        np.testing.assert_allclose(np.stack(found), alone, atol=2e-5)
    else:
        assert not np.allclose(np.stack(found)[:, 0], np.stack(found)[:, 1])


def test_another_process_of_lerobot_goes_on(folders):
    with closing(load_policy(f"lerobot:{folders / 'diffusion'}", SPEC)) as policy:
        policy.save_pretrained(folders / "saved")
        features, state = policy.encode(SPEC.zeros(3)), policy.initial_state(3)
        for _ in range(3):
            _, state = policy.act(features, state, "eval", torch.Generator().manual_seed(0))
        saved = policy.saved_state(state)
        expected = policy.act(features, state, "eval", torch.Generator().manual_seed(1))[0].action
    with closing(load_policy(folders / "saved", SPEC)) as other:
        found = other.act(features, other.restored_state(saved), "eval", torch.Generator().manual_seed(1))[0].action
    assert torch.equal(found, expected)
