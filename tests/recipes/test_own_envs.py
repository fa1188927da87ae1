"""What cannot be right about an environment of one's own is one sentence, whichever command plays it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from sims.toy.point_mass import PointMassEnv
from tests.commands import save_untrained
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import ContractError
from vla_rl.experience.intervention import PersonConfig, SupervisedEnv
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.inspect import _entries

HERE = __name__


class Advancing(PointMassEnv):
    """The point mass whose ``_advance`` returns something else."""

    def __init__(self, num_envs, change):
        super().__init__(num_envs)
        self.change = change

    def _advance(self, env_ids, action):
        return self.change(*super()._advance(env_ids, action))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda reward, success, late: (reward[:, None], success, late), r"returned \[\[2, 1\], \[2\], \[2\]\]"),
        (lambda reward, success, late: (np.zeros(3), success, late), r"returned \[\[3\], \[2\], \[2\]\]"),
        (lambda reward, success, late: (reward, success), r"returned \[\[2\], \[2\]\]"),
        (lambda reward, success, late: None, "returned NoneType"),
    ],
    ids=("column", "all", "two", "none"),
)
def test_an_advance_of_another_shape_says_so(change, said):
    env = Advancing(2, change)
    env.reset(np.arange(2), np.arange(2))
    with pytest.raises(ContractError, match=f"_advance of 2 environments {said}.*return three arrays of shape"):
        env.step(np.zeros((2, 1, 2)))


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


def test_one_inside_another_is_checked_too():
    with pytest.raises(ContractError, match=r"reward is float32\[2\]"):
        EnvConfig("randomize", {"env": f"{HERE}:flat"}).check()


def test_a_critic_that_reads_what_is_not_there_names_it(tmp_path, complaint):
    said = complaint("train", "gym.py:asymmetric_hopper", "--env", "point_mass", "--out", tmp_path / "run")
    assert "'point_mass' delivers no 'privileged/speed' (--experience.privileged), so the critic cannot read it" in said


def _reads_a_camera(obs):
    return obs.images["front"]


def test_a_function_for_another_environment_is_named_with_its_mistake():
    with closing(PointMassEnv(2)) as env:
        policy = FunctionPolicy(env.spec, _reads_a_camera, f"{HERE}:_reads_a_camera")
        features = policy.encode(env.reset(np.arange(2), np.arange(2)))
        with pytest.raises(ContractError, match=r"' failed \(KeyError: 'front', at test_own_envs.py:\d+"):
            policy.act(features, {}, "eval", None)
        watched = SupervisedEnv(env, lambda obs: np.zeros((2, 1, 2)), _reads_a_camera, PersonConfig())
        with pytest.raises(ContractError, match=r"how far the task of 'point_mass' has come cannot be said \(KeyError"):
            watched.reset(np.arange(2), np.arange(2))


def test_a_range_that_many_entries_share_is_said_once():
    spec = ArraySpec((5,), "float32", (-1.0, -1.0, -1.0, 0.0, -1.0), (1.0,) * 5)
    assert [row[:2] for row in _entries(spec)] == [("0 to 2", "-1 .. 1"), ("3", "0 .. 1"), ("4", "-1 .. 1")]
    assert len(_entries(replace(spec, names=tuple("abcde")))) == 5
