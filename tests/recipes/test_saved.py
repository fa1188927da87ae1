"""Runs and checkpoints are distinguished, also if a config has a field policy."""

from __future__ import annotations

import json

import pytest
import torch

from tests.commands import save_untrained
from vla_rl.cli.inspect import inspect
from vla_rl.contract.config import to_json
from vla_rl.contract.errors import UserError
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import checkpoint_of, is_run
from vla_rl.recipes.config_files import env_config_of, load_config
from vla_rl.rewards.reward_model import load_reward


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose config has a field ``policy``, without a checkpoint."""
    recipe = load_config("demo.py:last_step")
    (tmp_path / "config.json").write_text(json.dumps(to_json(recipe)))
    return tmp_path


def checkpoint(run, name):
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"contract_version": 2, "policy": "x:Y"}')
    return folder


def test_a_run_with_a_policy_field_is_a_run(run, capsys):
    assert is_run(run) and not is_run(checkpoint(run, "best")) and not is_run(run / "nowhere")
    inspect(str(run))
    assert "has no summary yet" in " ".join(capsys.readouterr().out.split())


def test_a_run_is_evaluated_by_its_best_checkpoint(run):
    imitation = checkpoint(run, "imitation")
    assert checkpoint_of(run) == imitation
    best = checkpoint(run, "best")
    assert checkpoint_of(run) == best and checkpoint_of(imitation) == imitation


def test_a_run_without_a_policy_is_said(run):
    checkpoint(run, "grounded")
    with pytest.raises(UserError, match="has no checkpoint best or imitation"):
        checkpoint_of(run)


def test_a_checkpoint_belongs_to_the_environment_of_its_run(run, tmp_path_factory):
    assert env_config_of(checkpoint(run, "best")) == load_config("demo.py:last_step").env
    assert env_config_of(checkpoint(tmp_path_factory.mktemp("alone"), "best")) is None


def test_a_run_is_a_policy_wherever_one_is_loaded(run):
    expected = load_policy(save_untrained(run / "checkpoints" / "best"))
    assert read_config(run) == read_config(run / "checkpoints" / "best")
    for name, item in load_policy(run).state_dict().items():
        torch.testing.assert_close(item, expected.state_dict()[name], rtol=0, atol=0)
    with pytest.raises(UserError, match="no checkpoint progress or success or judge, so there is no reward to use"):
        load_reward(run)
