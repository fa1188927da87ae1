"""The state-based recipe: from nothing to a judged checkpoint, and on after a kill as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from vla_rl.cli.main import main
from vla_rl.cli.train import run
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.stages import EvaluationConfig

SMALL = {
    "loop.iterations": 4,
    "loop.validate-every": 2,
    "loop.save-every": 1,
    "experience.num_envs": 4,
    "experience.decisions": 16,
    "algorithm.minibatch": 32,
    "evaluation.validation": 2,
    "evaluation.test": 3,
    "evaluation.num_envs": 2,
}
ARGUMENTS = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]


def test_it_learns_to_balance(tmp_path):
    recipe = load_config("gym.py:inverted_pendulum")
    recipe = replace(
        recipe,
        loop=replace(recipe.loop, iterations=20, validate_every=10),
        evaluation=EvaluationConfig(4, 4, num_envs=4),
    )
    summary = run(recipe, str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validations = [line["validation"] for line in lines if "validation" in line]
    assert validations[0] < 50 and max(validations) > 400
    assert summary["return"]["mean"] > 400 and summary["return"]["episodes"] == 4
    assert load_policy(tmp_path / "run" / "checkpoints" / "best").standardize.count > 0


def digests(out: Path) -> list[str]:
    files = ["checkpoints/best/model.safetensors", "state/00000004/tensors.safetensors"]
    return [hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files]


def test_a_run_goes_on_where_it_stopped(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    main(["train", "gym.py:inverted_pendulum", "--out", str(one), *ARGUMENTS])
    main(["train", "gym.py:inverted_pendulum", "--out", str(two), *ARGUMENTS])
    assert digests(one) == digests(two)
    (two / "summary.json").unlink()
    shutil.rmtree(two / "state" / "00000004")  # as if it had been killed in the last iteration
    main(["train", "--resume", str(two)])
    assert digests(one) == digests(two)
    assert json.loads((two / "summary.json").read_text())["env_steps"] == 4 * 4 * 16


@pytest.mark.parametrize("name", ["half_cheetah", "inverted_pendulum", "asymmetric_hopper"])
def test_every_config_can_be_loaded_and_built(name):
    recipe = load_config(f"gym.py:{name}")
    env = recipe.env.make(1)
    assert set(recipe.experience.privileged) == set(env.spec.extras)
    env.close()
