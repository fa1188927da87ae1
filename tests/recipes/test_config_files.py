"""Config files: the folders that are searched, the copy in a run, and short flags."""

from __future__ import annotations

import pytest

from vla_rl.cli.override import override
from vla_rl.cli.train import train
from vla_rl.contract.errors import UserError
from vla_rl.recipes.config_files import find_file, load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import call
from vla_rl.recipes.sims import make_env


def test_a_shipped_config_is_found_by_its_name_or_in_configs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_file("demo.py") == find_file("configs/demo.py")


@pytest.mark.parametrize("name", ["suites/demo.py", "../demo.py", "/suites/demo.py"])
def test_a_file_in_another_folder_is_never_taken_for_a_shipped_one(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no config file"):
        find_file(name)


@pytest.mark.parametrize("given", [["--env", "place"], ["--env=place"], ["--env.name", "place"]])
def test_env_is_short_for_its_name(given):
    recipe: Improve = override(load_config("demo.py:last_step"), given, "test")
    assert recipe.env.name == "place" and recipe.env.training_options == {}  # those are of lift


def test_an_environment_may_be_any_function():
    env = EnvConfig("sims.toy.point_mass:make").make(3)
    assert env.num_envs == 3 and env.spec.name == "point_mass"


def test_options_that_an_environment_does_not_take_are_named():
    with pytest.raises(UserError, match="has no option 'image_sise'"):
        make_env("tests.recipes.outside.rail:make", 2, image_sise=3)


def test_a_type_error_inside_what_was_called_keeps_its_traceback():
    with pytest.raises(TypeError, match="unsupported operand"):
        call("tests.recipes.test_config_files:broken")


def test_arguments_that_a_class_does_not_take_are_named():
    with pytest.raises(UserError, match=r"'tests.recipes.outside.rail:Rail' does not take \(int, colour=...\)"):
        call("tests.recipes.outside.rail:Rail", 2, colour=3)


def test_what_cannot_be_called_is_said():
    with pytest.raises(UserError, match="is a int, so it cannot be called"):
        call("vla_rl.contract:CONTRACT_VERSION")


def broken():
    return 1 + "2"


def test_the_help_of_train_names_its_own_options(capsys):
    train(["--help"])
    said = capsys.readouterr().out
    assert all(option in said for option in ("--out FOLDER", "--seeds N", "--resume RUN", "--env NAME"))


@pytest.mark.parametrize("name", ["pi05.py:ppo", "configs/pi0_fast.py:imitate"])
def test_a_model_that_is_not_supported_is_not_taken_for_another(name):
    with pytest.raises(UserError, match=r"is a model of its own, which is not supported.*choose one of .*pi0\.py"):
        load_config(name)
