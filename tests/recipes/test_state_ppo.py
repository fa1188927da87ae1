"""Policies from nothing, by PPO or SAC: from scratch to an evaluated checkpoint, and on after a stop."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sims.toy import point_mass
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.policies.feed_forward import CategoricalPolicy, GaussianConfig, GaussianPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.recipe import run

SMALL = {
    "rl.loop.iterations": 4,
    "rl.loop.validate-every": 2,
    "rl.loop.save-every": 1,
    "rl.experience.num_envs": 4,
    "rl.experience.decisions": 16,
    "rl.algorithm.minibatch": 32,
    "evaluation.validation": 2,
    "evaluation.test": 3,
    "evaluation.num_envs": 2,
}
ARGUMENTS = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]


@pytest.mark.full
def test_it_learns_to_balance(tmp_path):
    """Three seeds, because one seed's curve is luck: rounding that differs between processors changes it.

    Over ten seeds the logarithm of the best validation return to the first one was 2.3 on average with a standard
    deviation of .8, so the mean of three lies below .7 (twice the first return) once in three thousand times.
    """
    gains = []
    for seed in (1, 2, 3):
        recipe = load_config("gym.py:inverted_pendulum")
        recipe = replace(
            recipe,
            seed=seed,
            rl=replace(recipe.rl, loop=replace(recipe.rl.loop, iterations=20, validate_every=5)),
            evaluation=EvaluationConfig(4, 4, num_envs=4),
        )
        folder = tmp_path / str(seed)
        summary = run(recipe, str(folder))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        validations = [line["eval/score"] for line in lines if "eval/score" in line]
        assert len(validations) == 5 and validations[0] < 50 and summary["return"]["episodes"] == 4
        gains.append(math.log(max(validations) / validations[0]))
        assert load_policy(folder / "checkpoints" / "best").standardize.count > 0
    assert sum(gains) / len(gains) > 0.7, gains


@pytest.mark.full
def test_it_learns_discrete_actions(tmp_path):
    """CartPole: the pole of a random policy falls over after about 22 steps."""
    shorter = ["--rl.loop.iterations", "20", "--evaluation.validation", "4", "--evaluation.test", "16"]
    main(["train", "gym.py:cartpole", "--out", str(tmp_path / "run"), *shorter])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["return"]["mean"] > 60
    assert isinstance(load_policy(tmp_path / "run" / "checkpoints" / "best"), CategoricalPolicy)


@pytest.mark.full
def test_it_learns_from_pixels_alone(tmp_path):
    """Catch: a random policy has a return of about -0.8, and staying in the middle as well."""
    shorter = ["--rl.loop.iterations", "30", "--evaluation.validation", "16", "--evaluation.test", "64"]
    main(["train", "gym.py:pixels", "--out", str(tmp_path / "run"), *shorter])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["return"]["mean"] > 0.2


def digests(out: Path) -> list[str]:
    files = ["checkpoints/best/model.safetensors", "state/00000004/tensors.safetensors"]
    return [hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files]


def test_a_policy_to_start_from_is_refused(tmp_path, complaint):
    GaussianPolicy(point_mass.spec(), None, GaussianConfig(width=8, depth=1)).save_pretrained(tmp_path / "policy")
    arguments = ["--env", "point_mass", "--policy", tmp_path / "policy", "--out", tmp_path / "run"]
    assert "the given GaussianPolicy would learn nothing" in complaint("train", "gym.py:task", *arguments)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    main(["train", "gym.py:inverted_pendulum", "--out", str(one), *ARGUMENTS])
    shutil.copytree(one, two)
    (two / "summary.json").unlink()
    shutil.rmtree(two / "state" / "00000004")  # as if it had been killed in the last iteration
    main(["train", "--resume", str(two)])
    assert digests(one) == digests(two)
    assert json.loads((two / "summary.json").read_text())["env_steps"] == 4 * 4 * 16


@pytest.mark.parametrize(
    "name", ["half_cheetah", "inverted_pendulum", "asymmetric_hopper", "cartpole", "pendulum", "task"]
)
def test_every_config_can_be_loaded_and_built(name):
    recipe = load_config(f"gym.py:{name}")
    env = recipe.env.make(1)
    assert set(recipe.rl.experience.privileged) == set(env.spec.extras)
    env.close()


# -- SAC -------------------------------------------------------------------------------------------------------------

SHORT = ["--rl.loop.iterations", "2", "--rl.algorithm.learning-starts", "64", "--evaluation.validation", "2"]


@pytest.mark.full
def test_it_reaches_the_optimum_of_the_point_mass(tmp_path):
    """In 2,048 control steps; the policy is then evaluated as any other."""
    main(["train", "gym.py:sac", "--env", "point_mass", "--rl.loop.env-steps", "2048", "--out", str(tmp_path / "run")])
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["rl"]["success"] > 0.9 and not (tmp_path / "run/checkpoints/start").exists()
    main(["eval", str(tmp_path / "run"), "--episodes", "8", "--num-envs", "8"])


def test_it_is_built_without_a_policy_and_refuses_discrete_actions(tmp_path):
    given = ["--env", "point_mass", "--evaluation.test", "2", "--out", str(tmp_path / "run")]
    main(["train", "gym.py:sac", *SHORT, *given])
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["env_steps"] == 128 and summary["rl"]["episodes"] == 2
    discrete = replace(load_config("gym.py:sac"), env=EnvConfig("gym", {"id": "CartPole-v1"}))
    with pytest.raises(UserError, match=r"those of 'CartPole-v1' are discrete.*choose PPO"):
        run(discrete, str(tmp_path / "discrete"))
