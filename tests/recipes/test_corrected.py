"""A run that improves a policy by a person's corrections, from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.commands import save_untrained
from tests.recipes import quick as configs
from vla_rl.cli import main
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.intervention import Escalation
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.building import build
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.imitating import Corrected
from vla_rl.recipes.trainers import RunContext


def test_a_person_corrects_and_the_weights_follow(untrained, quick, tmp_path) -> None:
    policy = untrained()
    main(["train", quick.replace(":improve", ":corrected"), "--policy", str(policy), "--out", str(tmp_path / "run")])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    learnt = [row for row in rows if row["stage"] == "rl" and row["step"]]
    assert len(learnt) == 4 and learnt[-1]["replay/corrections"] > learnt[0]["replay/corrections"] > 0
    assert 0 < learnt[-1]["rollout/intervened"] < 0.6 and "policy/correction_loss" in learnt[-1]
    assert "policy/demonstration_loss" not in learnt[-1], "none were given"
    before, after = (load_policy(path).trainable() for path in (policy, tmp_path / "run/checkpoints/best"))
    assert before.keys() == after.keys()


def test_a_person_who_helps_by_degrees_is_learnt_from_and_asked_for(untrained, quick, tmp_path) -> None:
    main(["train", quick.replace(":improve", ":helped"), "--policy", str(untrained()), "--out", str(tmp_path / "run")])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    learnt = [row for row in rows if row["stage"] == "rl" and row["step"]]
    assert learnt[-1]["replay/corrections"] > 0 and "policy/correction_loss" in learnt[-1]
    assert trainer().help is None, "nobody gets it who has not asked for it"
    assert load_config("configs/tabletop.py:helped").rl.help == Escalation()


def trainer() -> Corrected:
    found = configs.corrected().rl
    assert isinstance(found, Corrected)
    return found


def test_demonstrations_are_imitated_beside_corrections(tmp_path: Path) -> None:
    env = EnvConfig("lift", options={"deadline": 5})
    policy = load_policy(save_untrained(tmp_path / "policy"))
    save_demonstrations(collect(EnvConfig("lift"), 2, 1, 2), tmp_path / "shown", video="never")
    context = RunContext(env, policy, 1, OneProcess(), str(tmp_path / "shown"))
    setup = build(trainer(), context)
    before = {name: item.detach().clone() for name, item in policy.trainable().items()}
    metrics = setup.learner.update(setup.source.next())
    setup.close()
    assert metrics["policy/demonstration_loss"] > 0
    assert any(not torch.equal(before[name], item) for name, item in policy.trainable().items())


def test_what_nobody_can_correct_is_refused_in_one_sentence(tmp_path: Path) -> None:
    policy = load_policy(save_untrained(tmp_path / "policy"))
    context = RunContext(EnvConfig("lift"), policy, 1, OneProcess())
    with pytest.raises(UserError, match="one process"):
        build(trainer(), replace(context, group=SimpleNamespace(rank=0, size=2)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no scripted expert"):
        trainer().build_env(replace(context, env=Bare()))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no flow policy"):
        trainer().build_policy(replace(context, base=Bare()), None)  # type: ignore[arg-type]


class Bare:
    """Has what every policy has, and no more."""

    spec = feature_sizes = encode = None
