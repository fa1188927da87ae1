"""Which policy a text means, and in which environments one with several tasks can act."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.elsewhere import ELSEWHERE, elsewhere
from vla_rl.contract.errors import UserError
from vla_rl.experience.collect import ExpertPolicy
from vla_rl.policies.feed_forward import GaussianPolicy
from vla_rl.policies.function import Renumbered
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.policies import deployed_policy, fingerprint

SMALL = TinyConfig(2, queries=1, condition=8, width=16, blocks=1)


def new_policy(spec):
    """An untrained policy."""
    return TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), SMALL)


@pytest.fixture
def mixed(tmp_path):
    """A checkpoint of a policy for lift, place and push."""
    spec = EnvConfig("mixed").spec()
    torch.manual_seed(0)
    new_policy(spec).save_pretrained(tmp_path / "mixed")
    return tmp_path / "mixed"


def test_a_policy_of_several_tasks_reads_the_instruction_of_the_environment(mixed):
    """``mixed`` has place's instructions at other numbers than ``place`` has."""
    policy = deployed_policy(str(mixed), EnvConfig("place"))
    own = deployed_policy(str(mixed), EnvConfig("mixed"))
    assert isinstance(policy, Renumbered) and isinstance(own, TinyVLA)
    place, table = EnvConfig("place").make(3), EnvConfig("mixed").spec().tasks
    obs = place.reset(np.arange(3), np.array([5, 6, 9]))
    numbers = np.array([table.index(place.spec.tasks[task]) for task in obs.task])
    assert (numbers != obs.task).all() and len(set(numbers)) > 1
    place.close()
    found = policy.encode(obs)
    wanted = own.encode(type(obs)(obs.images, obs.state, numbers, obs.time, obs.extras))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    state = policy.reset_state(policy.initial_state(3), np.arange(3))
    out, _ = policy.act(*policy.context(found, state, None), "eval", torch.Generator().manual_seed(1))
    same, _ = own.act(wanted, {}, "eval", torch.Generator().manual_seed(1))
    assert torch.equal(out.action, same.action)


@pytest.mark.parametrize("name", ["mixed", "tests.recipes.test_deployed:new_policy"])
def test_a_policy_computes_on_the_device_that_is_named(mixed, name):
    with elsewhere():
        policy = deployed_policy(str(mixed) if name == "mixed" else name, EnvConfig("place"), ELSEWHERE.type)
        network = policy.policy if isinstance(policy, Renumbered) else policy
        assert {item.device for item in network.parameters()} == {ELSEWHERE}
    with pytest.raises(UserError, match="there is no device 'gpu'"):
        deployed_policy(str(mixed), EnvConfig("place"), "gpu")


def test_a_class_and_the_expert_are_named():
    env = EnvConfig("point_mass")
    assert isinstance(deployed_policy("vla_rl.policies.feed_forward:GaussianPolicy", env), GaussianPolicy)
    assert isinstance(deployed_policy("expert", EnvConfig("lift")), ExpertPolicy)
    with pytest.raises(UserError, match="declares no scripted expert"):
        deployed_policy("expert", env)


def test_a_fingerprint_is_that_of_the_weights_wherever_they_lie(mixed, tmp_path):
    found = fingerprint(str(mixed))
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in mixed.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert fingerprint(str(copy)) == found and len(found) == 64
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert fingerprint(str(copy)) != found
    assert fingerprint("module:Class") == fingerprint("expert") == ""
    assert not Path("expert").exists()
