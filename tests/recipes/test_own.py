"""What people bring and what is wrong with it: an environment or a policy that breaks the contract is one sentence.

Whichever command plays it, before it collects, trains or leaves a run folder.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sims.toy.point_mass import PointMassEnv
from tests.commands import save_untrained
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError
from vla_rl.contract.trust import mark_file
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.intervention import PersonConfig, SupervisedEnv
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.inspect import _entries

HERE = __name__
OUTSIDE = Path(__file__).parent / "outside"

# -- environments ------------------------------------------------------------------------------------------------------


class Flat(PointMassEnv):
    """Its rewards are those of whole chunks, [E]."""

    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        return replace(step, reward=step.reward.sum(1))


def flat(num_envs):
    return Flat(num_envs)


class _Expert:
    def __init__(self, horizon=1):
        pass


@pytest.mark.parametrize("command", ["collect", "eval", "train"])
def test_rewards_of_whole_chunks_are_refused_by_every_command(command, tmp_path, complaint):
    given = {
        "collect": ["--env", f"{HERE}:flat", "--expert", f"{HERE}:_Expert", "--out", tmp_path / "data"],
        "eval": [save_untrained(tmp_path / "policy"), "--env", f"{HERE}:flat"],
        "train": ["gym.py:pendulum", "--env", f"{HERE}:flat", "--out", tmp_path / "run"],
    }
    assert "reward is float32[2] but float32[2, 2]" in complaint(command, *given[command])
    assert not (tmp_path / "data").exists() and not (tmp_path / "run").exists()


def _reads_a_camera(obs):
    return obs.images["front"]


def test_a_function_for_another_environment_is_named():
    with closing(PointMassEnv(2)) as env:
        policy = FunctionPolicy(env.spec, _reads_a_camera, f"{HERE}:_reads_a_camera")
        features = policy.encode(env.reset(np.arange(2), np.arange(2)))
        with pytest.raises(ContractError, match=r"' failed \(KeyError: 'front', at test_own.py:\d+"):
            policy.act(features, {}, "eval", None)
        watched = SupervisedEnv(env, lambda obs: np.zeros((2, 1, 2)), _reads_a_camera, PersonConfig())
        with pytest.raises(ContractError, match=r"how far the task of 'point_mass' has come cannot be said \(KeyError"):
            watched.reset(np.arange(2), np.arange(2))


def test_a_range_that_many_entries_share_is_said_once():
    spec = ArraySpec((5,), "float32", (-1.0, -1.0, -1.0, 0.0, -1.0), (1.0,) * 5)
    assert [row[:2] for row in _entries(spec)] == [("0 to 2", "-1 .. 1"), ("3", "0 .. 1"), ("4", "-1 .. 1")]
    assert len(_entries(replace(spec, names=tuple("abcde")))) == 5


# -- policies ----------------------------------------------------------------------------------------------------------

BROKEN = """
import torch
from straight import Straight


class Timeless(Straight):
    def encode(self, obs):
        return {"state": torch.as_tensor(obs.state)}


class Misshapen(Straight):
    def encode(self, obs):
        return {**super().encode(obs), "time": torch.as_tensor(obs.time)[:, None].expand(-1, 2)}


class Frozen(Straight):
    trainable = None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder: with a policy, an environment and a config, and what is broken about such."""
    for path in OUTSIDE.glob("*.py"):
        shutil.copyfile(path, tmp_path / path.name)
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item])
    yield tmp_path
    for name in ("broken", "straight", "rail"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Timeless", "encode of policy 'Timeless' gives ['state'] but no 'time', which critics read"),
        ("Misshapen", "encode of policy 'Misshapen' gives 'time' of shape [2, 2], so critics cannot read it"),
        ("Frozen", "policy 'Frozen' has no 'trainable', so it cannot be trained with"),
    ],
)
def test_a_policy_that_breaks_the_contract_leaves_no_run(folder, complaint, kind, sentence):
    """And an earlier run gets its name back."""
    kept = folder / "run" / "checkpoints" / "best"
    kept.mkdir(parents=True)
    (folder / "run" / "config.json").write_text("{}")
    assert sentence in complaint("train", "mine.py:named", "--policy", f"broken:{kind}", "--out", folder / "run")
    assert sentence in complaint("train", "mine.py:named", "--policy", f"broken:{kind}", "--out", folder / "new")
    assert kept.exists() and not (folder / "run.1").exists() and not (folder / "new").exists()


class Leaping(TinyVLA):
    """Its actions leave the bounds."""

    def act(self, features, state, mode, generator):
        out, state = super().act(features, state, mode, generator)
        out.action.add_(10.0)
        return out, state


class Unnumbered(TinyVLA):
    """It does not count its weights."""

    def __init__(self, *given):
        super().__init__(*given)
        del self.version


def of_class(kind: type[TinyVLA], folder: Path) -> Path:
    """An untrained checkpoint that names ``kind`` as its class."""
    path = save_untrained(folder)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace("TinyVLA", f"{HERE}:{kind.__name__}"))
    mark_file(path / "config.json")
    return path


def test_imitation_checks_a_policy_of_ones_own(complaint, tmp_path):
    """In the environment where one is named, otherwise its methods alone."""
    save_demonstrations(collect(EnvConfig("lift"), 2, seed=1), tmp_path / "recorded", video="never")
    given = ("train", "imitate.py:from_dataset", "--dataset", tmp_path / "recorded", "--out", tmp_path / "run")
    leaping = ("--policy", of_class(Leaping, tmp_path / "leaping"), "--env", "lift")
    assert "action holds" in complaint(*given, *leaping)
    unnumbered = ("--policy", of_class(Unnumbered, tmp_path / "unnumbered"))
    assert "policy 'Unnumbered' has no 'version'" in complaint(*given, *unnumbered)
    assert not (tmp_path / "run").exists()


def test_imagination_checks_a_policy_before_it_collects(complaint, monkeypatch, tmp_path):
    monkeypatch.setattr("vla_rl.recipes.imagine.plan.collect_episodes", None)
    leaping = of_class(Leaping, tmp_path / "leaping")
    said = complaint("train", "imagine.py:lift", "--policy", leaping, "--out", tmp_path / "run")
    assert "action holds" in said and not (tmp_path / "run").exists()
