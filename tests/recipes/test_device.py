"""Recipes on a device that is not the host learn what they learn on the host."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import save_untrained
from tests.elsewhere import ELSEWHERE, elsewhere
from tests.recipes import quick
from vla_rl.cli import eval, main
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.recipes import imitate
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.metrics import rows
from vla_rl.recipes.train_rewards import TrainProgress
from vla_rl.rewards.progress import ProgressConfig
from vla_rl.rewards.reward_model import RewardModel
from vla_rl.training.fit import FitConfig
from vla_rl.training.tracking import RunFolder


def trained(recipe, out, checkpoint="imitation"):
    folder = RunFolder(out, recipe)
    recipe.run(folder)
    return load_file(folder.checkpoint(checkpoint) / "model.safetensors")


def require_equal(on_host, on_device):
    assert on_host.keys() == on_device.keys()
    for name, item in on_host.items():
        torch.testing.assert_close(item, on_device[name], rtol=1e-4, atol=1e-5, msg=name)


def test_imitation_on_the_device_of_the_config(tmp_path, monkeypatch):
    recipe, devices = replace(quick.imitate_lift(), env=EnvConfig("lift", options={"deadline": 20})), set()
    on_host = trained(recipe, tmp_path / "host")
    imitate_policy = imitate.imitate_policy

    def noted(policy, *given):
        devices.update(item.device for item in policy.parameters())
        imitate_policy(policy, *given)

    monkeypatch.setattr(imitate, "imitate_policy", noted)
    with elsewhere():
        on_device = trained(replace(recipe, device="meta"), tmp_path / "elsewhere")
    assert devices == {ELSEWHERE}
    require_equal(on_host, on_device)


@pytest.mark.full
@pytest.mark.parametrize("keep", ["", "replay"], ids=["in memory", "on disk"])
def test_off_policy_rl_with_its_replay_on_the_device_of_the_config(keep, tmp_path):
    """Half of a batch are demonstrations; a replay on disk stays on the host and its batches go to the device."""
    recipe = quick.mixed()
    policy, recorded = save_untrained(tmp_path / "policy"), tmp_path / "recorded"
    save_demonstrations(collect(EnvConfig("lift"), 2, seed=1), recorded, video="never")

    def run(where: str, device: str):
        folder = str(tmp_path / where / keep) if keep else ""
        rl = replace(recipe.rl, replay=replace(recipe.rl.replay, folder=folder))
        mine = replace(recipe, rl=rl, policy=str(policy), demonstrations=str(recorded), device=device)
        return trained(mine, tmp_path / where / "run", "best")

    on_host = run("host", "cpu")
    with elsewhere():
        require_equal(on_host, run("elsewhere", "meta"))
    expected, found = (rows(tmp_path / where / "run", "rl")[-1] for where in ("host", "elsewhere"))
    assert found["critic/value"] == pytest.approx(expected["critic/value"], abs=1e-4) and expected["critic/value"] != 0


@pytest.mark.full
def test_reward_models_on_the_device_of_the_config(tmp_path, monkeypatch):
    counts = {"training": 4, "calibration": 2, "test": 2, "num_envs": 4, "random_action_prob": 0.0, "precision": 0.05}
    env, fit = EnvConfig("lift", options={"image_size": 24}), FitConfig(steps=3, batch=12)
    recipe = TrainProgress(network=ProgressConfig(8, 4), env=env, fit=fit, **counts)
    on_host, devices, evaluate = trained(recipe, tmp_path / "host", recipe.name), set(), TrainProgress.evaluate

    def noted(recipe, model: RewardModel, frames):
        devices.update(item.device for item in model.parameters())
        return evaluate(recipe, model, frames)

    monkeypatch.setattr(TrainProgress, "evaluate", noted)
    with elsewhere():
        on_device = trained(replace(recipe, device="meta"), tmp_path / "elsewhere", recipe.name)
    assert devices == {ELSEWHERE}
    require_equal(on_host, on_device)


def test_a_checkpoint_on_the_device_of_the_command(tmp_path, monkeypatch):
    folder, devices, play = save_untrained(tmp_path / "policy"), set(), eval.play_seeds

    def noted_play(env, policy, *given, **options):
        devices.update(item.device for item in policy.parameters())
        return play(env, policy, *given, **options)

    monkeypatch.setattr(eval, "play_seeds", noted_play)
    arguments = ["eval", str(folder), "--env", "lift", "--env.options", '{"deadline": 5}', "--episodes", "4"]
    with elsewhere():
        for device in ("cpu", ELSEWHERE.type):
            main([*arguments, "--device", device, "--out", str(tmp_path / f"{device}.json")])
    assert devices == {torch.device("cpu"), ELSEWHERE}
    on_host, on_device = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("cpu", ELSEWHERE.type))
    assert on_device == on_host and on_host["episodes"] == 4
