"""A small demo from demonstrations to the report: its files, and that its policy uses pictures and instruction."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.commands import save_untrained
from vla_rl.cli.inspect import inspect
from vla_rl.contract.check import check_policy
from vla_rl.contract.config import from_json
from vla_rl.contract.env import PRIVILEGED
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.demo import Demo, record_clips
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import NewTiny
from vla_rl.recipes.recipe import run
from vla_rl.training.fit import FitConfig, GroundingConfig
from vla_rl.training.loop import LoopConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SMALL = load_config("demo.py:small")
# It sees and reads as much from fewer episodes, in one process.
FEWER = replace(
    SMALL,
    rl=replace(SMALL.rl, experience=WindowConfig(num_envs=16), loop=LoopConfig(4, validate_every=2)),
    evaluation=EvaluationConfig(validation=8, test=32, ablation=64),
)
# It leaves the same files and learns next to nothing.
TINY = replace(
    FEWER,
    rl=replace(FEWER.rl, experience=WindowConfig(num_envs=4, decisions=6), loop=LoopConfig(2, validate_every=2)),
    env=EnvConfig("lift", {"deadline": 20}),
    new=NewTiny(width=32, blocks=1),
    grounding=GroundingConfig(64, FitConfig(10, batch=16)),
    imitation=replace(SMALL.imitation, demonstrations=8, fit=FitConfig(40, batch=16, lr=4e-3)),
    evaluation=EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4),
)
LEARNS = pytest.mark.parametrize("config", [FEWER, SMALL], ids=["fewer", "small"], indirect=True, scope="module")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(TINY, id="tiny"),
        pytest.param(FEWER, id="fewer", marks=pytest.mark.full),
        pytest.param(SMALL, id="small", marks=pytest.mark.full),
    ],
)
def config(request) -> Demo:
    return request.param


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "run"
    run(config, str(out))
    return out


@pytest.fixture(scope="module")
def summary(folder):
    return json.loads((folder / "summary.json").read_text())


# -- what it leaves behind --------------------------------------------------------------------------------------------


def test_the_summary_has_rates_with_intervals_and_what_it_took(summary, config):
    for rate in (summary["imitation"], summary["rl"]):
        assert 0 <= rate["low"] <= rate["success"] <= rate["high"] <= 1
        assert rate["episodes"] == config.evaluation.test
    assert summary["seed"] == config.seed
    assert set(summary["seconds"]) == {"collect", "grounding", "imitation", "rl", "evaluation", "report"}
    window = config.rl.experience
    decisions = config.rl.loop.iterations * window.num_envs * window.decisions
    assert decisions < summary["env_steps"] <= decisions * config.new.horizon
    assert summary["env_steps_at_best"] <= summary["env_steps"]
    assert 0 < summary["episodes"] <= decisions


def test_metrics_hold_every_stage_of_the_run(folder, summary, config):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["elapsed_s"] for line in lines] == sorted(line["elapsed_s"] for line in lines)
    rl = [line for line in lines if line["stage"] == "rl"]
    assert [line["step"] for line in rl] == list(range(config.rl.loop.iterations + 1))
    assert "eval/score" in rl[0] and "eval/score" in rl[-1]
    assert all(line["policy/logprob_gap"] < 1e-3 for line in rl[1:])
    assert rl[-1]["env/steps_total"] == summary["env_steps"] == sum(line["env/steps"] for line in rl[1:])
    losses = [line["loss"] for line in lines if line["stage"] == "imitation"]
    assert losses and (config is TINY or losses[-1] < 0.5 * losses[0])


def test_the_config_rebuilds_itself_and_inspect_shows_the_run(folder, config, capsys):
    assert from_json(json.loads((folder / "config.json").read_text())) == config
    inspect(str(folder))
    printed = capsys.readouterr().out
    assert "imitation: " in printed and "env_steps: " in printed


def test_checkpoints_load_and_act(folder, config):
    """And nothing privileged is read: the policy acts the same without it."""
    env = config.env.make(3)
    for name in ("imitation", "best"):
        policy = TinyVLA.from_pretrained(folder / "checkpoints" / name, env.spec)
        assert check_policy(policy, env, torch.Generator().manual_seed(0))[-1].name == "log-prob gap"
    obs = env.reset([0, 1, 2], [1, 2, 3])
    assert any(name.startswith(PRIVILEGED) for name in obs.extras)
    assert not any(name.startswith(PRIVILEGED) for name in obs.public().extras)
    shown, hidden = policy.encode(obs), policy.encode(obs.public())
    env.close()
    assert all(torch.equal(shown[name], hidden[name]) for name in shown)


@pytest.mark.full
@LEARNS
def test_rl_changed_what_it_may_and_nothing_else(folder, summary):
    first, best = (TinyVLA.from_pretrained(folder / "checkpoints" / name) for name in ("imitation", "best"))
    changed = {name for name, value in best.state_dict().items() if not value.equal(first.state_dict()[name])}
    assert bool(changed) == (summary["best_iteration"] > 2)  # the first two iterations train the critic only
    assert not any(name.startswith("backbone.") for name in changed)


def test_demonstrations_are_kept_and_used_training_seeds(folder, config):
    episodes = load_demonstrations(folder / "demonstrations")
    assert episodes.count <= config.imitation.demonstrations
    assert set(episodes.seed) <= set(seed_ranges.training_seeds(1, "demonstrations"))


def test_the_page_shows_numbers_and_films_and_needs_nothing_else(folder, summary):
    page = (folder / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']+""", page)
    assert f"{summary['imitation']['success']:.1%}" in page and f"{summary['rl']['success']:.1%}" in page
    assert page.count("<table") == 2 and page.count("<svg") >= 6
    assert page.count("data:video/") + page.count("data:image/") >= 3
    for check in ("images black", "swapped: original target", "training seed", "vla-rl demo --seed 1"):
        assert check in page


CLIPPED = EnvConfig("lift", {"deadline": 6})
ISOLATED = EnvConfig("isolated", {"env": "lift", "options": CLIPPED.options})


@pytest.mark.parametrize(("env", "size"), [(CLIPPED, 192), pytest.param(ISOLATED, 64, marks=pytest.mark.full)])
def test_a_clip_has_a_picture_of_every_control_step(env, size, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    policy = TinyVLA.from_pretrained(save_untrained(tmp_path / "untrained"))
    clips = record_clips(env, policy, np.array([3, 4]), seed=1)
    assert [clip.frames.shape for clip in clips] == [(7, size, size, 3)] * 2
    assert all(clip.label.endswith(": too late") for clip in clips)
    assert not np.array_equal(clips[0].frames[0], clips[1].frames[0])
    assert not np.array_equal(clips[0].frames[0], clips[0].frames[-1])


# -- perception ablation ----------------------------------------------------------------------------------------------


@pytest.mark.full
@LEARNS
@pytest.mark.parametrize("who", ["imitation", "RL"])
def test_the_policy_needs_its_pictures(summary, config, who):
    """It succeeds, but neither with blank pictures nor with the pictures of other scenes."""
    rates = success(summary, config, who)
    assert rates["normal"] > 0.4
    assert rates["blank"] <= 0.1
    assert rates["shuffled"] <= 0.1


@pytest.mark.full
@LEARNS
@pytest.mark.parametrize("who", ["imitation", "RL"])
def test_the_policy_follows_the_instruction(summary, config, who):
    """It lifts the cube that the instruction names, not the one that happens to be the seed's target."""
    rates = success(summary, config, who)
    assert abs(rates["swapped_named"] - rates["normal"]) <= 0.15 * math.sqrt(128 / config.evaluation.ablation)
    assert rates["swapped_original"] <= 0.05


def success(summary, config, who) -> dict[str, float]:
    found = summary["perception"][who]
    assert {rate["episodes"] for rate in found.values()} == {config.evaluation.ablation}
    return {name: rate["success"] for name, rate in found.items()}
