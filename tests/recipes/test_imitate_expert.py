"""Imitation of an environment's expert from pixels alone: record, learn perception too, validate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vla_rl.contract.errors import UserError
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes import imitate, imitate_dataset
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import NewTiny
from vla_rl.recipes.imitate_dataset import ImitateExpert
from vla_rl.recipes.recipe import run
from vla_rl.training.fit import FitConfig, ImitationConfig


def recipe(count: int = 2, **options: int) -> ImitateExpert:
    return ImitateExpert(
        seed=3,
        env=EnvConfig("lift", options),
        new=NewTiny(width=32, blocks=1),
        imitation=ImitationConfig(count, stride=1, draws=1, fit=FitConfig(steps=3, batch=8)),
        evaluation=EvaluationConfig(validation=4, num_envs=2),
    )


def test_the_expert_is_recorded_imitated_and_the_policy_validated(tmp_path, monkeypatch):
    played, play = [], imitate.play
    monkeypatch.setattr(imitate, "play", lambda *given: played.extend(given[2]) or play(*given))
    run(recipe(), str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes"] == 2 and summary["validation"]["episodes"] == 4
    assert played == list(seed_ranges.VALIDATION[:4])
    assert {"collect", "imitation", "evaluation"} <= summary["seconds"].keys()
    episodes = load_demonstrations(tmp_path / "run" / "demonstrations")
    assert set(episodes.seed) == set(seed_ranges.training_seeds(3, "demonstrations")[:2])
    policy = TinyVLA.from_pretrained(tmp_path / "run" / "checkpoints" / "imitation")
    assert policy.spec == EnvConfig("lift").spec()
    torch.manual_seed(3)  # as the run began
    initial = TinyVLA(policy.spec, policy.vocabulary, policy.proprioception, policy.config)
    change = {
        name: float((policy.state_dict()[name] - item).abs().max()) for name, item in initial.state_dict().items()
    }
    assert change["backbone.conv.0.weight"] > 0, "perception did not learn"
    assert max(change.values()) < 0.01, "three small steps led far away"


def test_demonstrations_of_an_expert_that_fails_are_left_out(tmp_path):
    run(recipe(4, deadline=14), str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 1 <= summary["episodes"] < 4


@pytest.mark.parametrize("name", ["residual_td3"])
def test_what_improves_metaworlds_policy_starts_where_imitation_ends(name):
    imitation, improved = (load_config(f"configs/metaworld.py:{function}") for function in ("imitate", name))
    assert imitation.env == improved.env and improved.env.spec().families == ("drawer-open",)
    assert not improved.env.options["shaped"], "success is worth 1, as the critics' bounds say"
    assert Path(improved.policy).parts[:2] == ("runs", "imitate")


def test_a_joint_at_rest_in_the_demonstrations_is_not_blown_up():
    """so101's wrist does not roll in them: one that rolls by a tenth of a radian later is no huge input."""
    env = EnvConfig("so101")
    episodes = imitate_dataset.collect(env, 2, seed=1)
    roll = env.spec().state.names.index("wrist_roll.pos")
    assert episodes.state[:, roll].std() < 1e-2
    state = torch.as_tensor(episodes.state[:1])
    turned = state.clone()
    turned[0, roll] += 0.1
    for smallest, bounds in ((0.1, (0.9, 1.1)), (1e-3, (10.0, 200.0))):
        policy = NewTiny(width=32, blocks=1, smallest_scale=smallest).build(env.spec(), episodes, seed=1)
        moved = policy.proprioception.normalize(turned) - policy.proprioception.normalize(state)
        assert bounds[0] <= float(moved[0, roll]) <= bounds[1]
    with pytest.raises(UserError, match="smallest_scale is 0"):
        NewTiny(smallest_scale=0.0)
