"""Which environment a run has: the one that somebody named, never one by default."""

from __future__ import annotations

import inspect

import pytest

from vla_rl.cli.eval import Evaluate
from vla_rl.cli.override import override
from vla_rl.cli.train import Collect
from vla_rl.contract.errors import UserError
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.env_config import NO_ENV, EnvConfig
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.imitate import Imitate
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.train_rewards import TrainProgress, TrainSuccess


@pytest.mark.parametrize(
    ("config", "field"), [(EnvConfig, "name"), *((c, "env") for c in (Demo, Imitate, Improve, Imagine))]
)
def test_a_config_names_its_environment(config, field):
    assert inspect.signature(config).parameters[field].default is inspect.Parameter.empty


@pytest.mark.parametrize("config", [Collect(), Evaluate(), TrainSuccess(), TrainProgress()])
def test_where_the_command_line_may_name_it_there_is_none_before(config):
    assert config.env == NO_ENV
    with pytest.raises(UserError, match="this needs an environment and none was named"):
        config.env.required("this")


def test_frames_are_labelled_by_the_task_unless_a_function_is_named(monkeypatch):
    """The claims of lift, and those of another function, for the same observations."""
    recipe, labels = TrainSuccess(env=EnvConfig("lift"), training=1, num_envs=1), []
    monkeypatch.setattr("vla_rl.recipes.train_rewards.label_frames", lambda env, claims, *given: labels.append(claims))
    recipe.labelled()
    other = TrainSuccess(env=EnvConfig("lift"), claims="tests.recipes.test_env_config:other_claims")
    other.labelled()
    assert labels == [EnvConfig("lift").claims()] * 3 + [other_claims] * 3


def other_claims(obs):
    return []


def test_options_of_a_config_belong_to_the_environment_that_they_were_written_for(capsys):
    config = load_config("demo.py:last_step")
    other = override(config, ["--env", "point_mass"], "vla-rl train").env
    assert other == EnvConfig("point_mass")
    assert "the options deadline were written for 'lift' and are left out in 'point_mass'." in " ".join(
        capsys.readouterr().err.split()
    )
    given = ["--env.name=own:make", "--env.training-options", '{"deadline": 9}']
    assert override(config, given, "vla-rl train").env == EnvConfig("own:make", {}, {"deadline": 9})
    assert override(config, ["--env", "lift", "--seed", "3"], "vla-rl train").env == config.env
    assert override(config, [], "vla-rl train").env == config.env
