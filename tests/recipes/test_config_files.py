"""Config files and what they say: the files that are found, the environment that is named, the checkpoint of a run."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

from tests.commands import save_untrained
from vla_rl.cli.inspect import inspect as inspect_folder
from vla_rl.cli.override import override
from vla_rl.contract.config import to_json
from vla_rl.contract.errors import UserError
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import checkpoint_of, is_run
from vla_rl.recipes.config_files import env_config_of, find_file, load_config
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import call
from vla_rl.recipes.sims import make_env
from vla_rl.recipes.train_rewards import TrainSuccess
from vla_rl.rewards.reward_model import load_reward

# -- files -------------------------------------------------------------------------------------------------------------


def test_a_shipped_config_is_found_by_its_name_or_in_configs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_file("demo.py") == find_file("configs/demo.py")
    for name in ("suites/demo.py", "../demo.py", "/suites/demo.py"):
        with pytest.raises(UserError, match="there is no config file"):
            find_file(name)


@pytest.mark.parametrize("name", ["pi0_fast.py:ppo", "configs/pi0_fast.py:imitate"])
def test_a_model_that_is_not_supported_is_not_taken_for_another(name):
    with pytest.raises(UserError, match=r"is a model of its own, which is not supported.*choose one of .*pi0\.py"):
        load_config(name)


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "field"), [(EnvConfig, "name"), *((c, "env") for c in (Demo, Imitate, Improve, Imagine))]
)
def test_a_config_names_its_environment(config, field):
    assert inspect.signature(config).parameters[field].default is inspect.Parameter.empty


@pytest.mark.parametrize("given", [["--env", "place"], ["--env=place"], ["--env.name", "place"]])
def test_env_is_short_for_its_name(given):
    recipe: Improve = override(load_config("demo.py:last_step"), given, "test")
    assert recipe.env.name == "place" and recipe.env.training_options == {}  # those are of lift


def test_options_belong_to_the_environment_they_were_written_for(capsys):
    config = load_config("demo.py:last_step")
    assert override(config, ["--env", "point_mass"], "vla-rl train").env == EnvConfig("point_mass")
    said = " ".join(capsys.readouterr().err.split())
    assert "the options deadline were written for 'lift' and are left out in 'point_mass'." in said
    given = ["--env.name=own:make", "--env.training-options", '{"deadline": 9}']
    assert override(config, given, "vla-rl train").env == EnvConfig("own:make", {}, {"deadline": 9})
    for same in (["--env", "lift", "--seed", "3"], []):
        assert override(config, same, "vla-rl train").env == config.env


def test_an_environment_may_be_any_function():
    env = EnvConfig("sims.toy.point_mass:make").make(3)
    assert env.num_envs == 3 and env.spec.name == "point_mass"


def test_frames_are_labelled_by_the_task_or_by_a_named_function(monkeypatch):
    recipe, labels = TrainSuccess(env=EnvConfig("lift"), training=1, num_envs=1), []
    monkeypatch.setattr("vla_rl.recipes.train_rewards.label_frames", lambda env, claims, *given: labels.append(claims))
    recipe.labelled()
    TrainSuccess(env=EnvConfig("lift"), claims=f"{__name__}:other_claims").labelled()
    assert labels == [EnvConfig("lift").claims()] * 3 + [other_claims] * 3


def other_claims(obs):
    return []


# -- what is called ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_called_as_it_is_named_is_said():
    with pytest.raises(UserError, match="has no option 'image_sise'"):
        make_env("tests.recipes.outside.rail:make", 2, image_sise=3)
    with pytest.raises(UserError, match=r"'tests.recipes.outside.rail:Rail' does not take \(int, colour=...\)"):
        call("tests.recipes.outside.rail:Rail", 2, colour=3)
    with pytest.raises(UserError, match="is a int, so it cannot be called"):
        call("vla_rl.contract:CONTRACT_VERSION")
    with pytest.raises(TypeError, match="unsupported operand"):  # inside what was called: it keeps its traceback
        call(f"{__name__}:broken")


def broken():
    return 1 + "2"


# -- runs and checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose config has a field ``policy``, without a checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(to_json(load_config("demo.py:last_step"))))
    return tmp_path


def checkpoint(run, name):
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"contract_version": 2, "policy": "x:Y"}')
    return folder


def test_a_run_with_a_policy_field_is_a_run(run, capsys):
    assert is_run(run) and not is_run(checkpoint(run, "best")) and not is_run(run / "nowhere")
    inspect_folder(str(run))
    assert "has no summary yet" in " ".join(capsys.readouterr().out.split())


def test_a_run_is_evaluated_by_its_best_checkpoint(run):
    checkpoint(run, "grounded")
    with pytest.raises(UserError, match="has no checkpoint best or imitation"):
        checkpoint_of(run)
    imitation = checkpoint(run, "imitation")
    assert checkpoint_of(run) == imitation
    best = checkpoint(run, "best")
    assert checkpoint_of(run) == best and checkpoint_of(imitation) == imitation


def test_a_checkpoint_belongs_to_the_environment_of_its_run(run, tmp_path_factory):
    assert env_config_of(checkpoint(run, "best")) == load_config("demo.py:last_step").env
    assert env_config_of(checkpoint(tmp_path_factory.mktemp("alone"), "best")) is None


def test_a_run_is_a_policy_wherever_one_is_loaded(run):
    expected = load_policy(save_untrained(run / "checkpoints" / "best")).state_dict()
    assert read_config(run) == read_config(run / "checkpoints" / "best")
    assert all(torch.equal(item, expected[name]) for name, item in load_policy(run).state_dict().items())
    with pytest.raises(UserError, match="no checkpoint progress or success or judge, so there is no reward to use"):
        load_reward(run)
