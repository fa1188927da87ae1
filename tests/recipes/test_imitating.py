"""Runs that imitate while they play, from the command line: a person's corrections, and their own successes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vla_rl.recipes.improve
from tests.commands import save_untrained
from tests.recipes import quick as configs
from vla_rl.cli import main
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.improve import build
from vla_rl.recipes.trainers import RunContext


@pytest.fixture
def learnt(untrained, quick, tmp_path) -> Callable[[str], list[dict[str, float]]]:
    """``learnt(config)``: the metrics of the iterations of a short run."""

    def of(config: str) -> list[dict[str, float]]:
        given = ["--policy", str(untrained()), "--out", str(tmp_path / "run")]
        main(["train", quick.replace(":improve", f":{config}"), *given])
        rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if row["stage"] == "rl" and row["step"]]

    return of


def test_a_person_corrects_and_the_weights_follow(learnt, untrained, tmp_path):
    rows = learnt("corrected")
    assert len(rows) == 4 and rows[-1]["replay/corrections"] > rows[0]["replay/corrections"] > 0
    assert 0 < rows[-1]["rollout/intervened"] < 0.6 and "policy/correction_loss" in rows[-1]
    assert "policy/demonstration_loss" not in rows[-1], "none were given"
    before, after = (load_policy(path).trainable() for path in (untrained(), tmp_path / "run/checkpoints/best"))
    assert before.keys() == after.keys()


@pytest.mark.full
def test_a_person_who_helps_by_degrees_is_learnt_from(learnt):
    last = learnt("helped")[-1]
    assert last["replay/corrections"] > 0 and "policy/correction_loss" in last


def test_demonstrations_are_imitated_beside_corrections(tmp_path):
    policy = load_policy(save_untrained(tmp_path / "policy"))
    save_demonstrations(collect(EnvConfig("lift"), 2, 1, 2), tmp_path / "shown", video="never")
    env = EnvConfig("lift", options={"deadline": 5})
    setup = build(configs.corrected().rl, RunContext(env, policy, 1, OneProcess(), str(tmp_path / "shown")))
    before = {name: item.detach().clone() for name, item in policy.trainable().items()}
    metrics = setup.learner.update(setup.source.next())
    setup.close()
    assert metrics["policy/demonstration_loss"] > 0
    assert any(not torch.equal(before[name], item) for name, item in policy.trainable().items())


def test_successes_are_imitated_after_every_second_rollout(learnt, monkeypatch):
    """And an improvement that takes long says how far it is."""
    remarks: list[tuple[int, str]] = []

    @contextmanager
    def listening(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
        yield lambda done, remark="": remarks.append((done, remark))

    monkeypatch.setattr(vla_rl.recipes.improve, "bar", listening)
    rows = learnt("self_imitated")
    kept = [row["replay/successes"] for row in rows]
    assert len(kept) == 4 and kept == sorted(kept) and kept[-1] > kept[1] > 0
    assert ["policy/success_loss" in row for row in rows] == [False, True, False, True]
    assert all(row["rollout/successes"] > 0 for row in rows) and "policy/demonstration_loss" not in rows[-1]
    steps = [(done, remark) for done, remark in remarks if remark.startswith("learning")]
    assert {done for done, _ in steps} == {1, 3}, "before the second and the fourth iteration are done"
    assert steps[-1][1] == "learning from successes, 100%" != steps[0][1]


@pytest.mark.full
def test_a_backbone_learns_too_if_it_should_foresee_states(learnt):
    losses = [row["policy/future_state_loss"] for row in learnt("self_imitated_foreseeing")[1::2]]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)


class Bare:
    """Has what every policy has, and no more."""

    spec = feature_sizes = encode = None


def test_what_cannot_imitate_is_refused_in_one_sentence(tmp_path: Path):
    policy = load_policy(save_untrained(tmp_path / "policy"))
    context: Any = RunContext(EnvConfig("lift"), policy, 1, OneProcess())
    corrected, own = configs.corrected().rl, configs.self_imitated().rl
    for trainer in (corrected, own):
        with pytest.raises(UserError, match="one process"):
            build(trainer, replace(context, group=SimpleNamespace(rank=0, size=2)))
        with pytest.raises(UserError, match="no flow policy"):
            trainer.build_policy(replace(context, base=Bare()), None)
    with pytest.raises(UserError, match="no scripted expert"):
        corrected.build_env(replace(context, env=Bare()))
    foreseeing: Any = configs.self_imitated_foreseeing().rl
    assert foreseeing.build_policy(context, None).trainable().keys() == dict(policy.named_parameters()).keys()
    with pytest.raises(UserError, match="no backbone would foresee"):
        foreseeing.build_policy(replace(context, base=SmolVLA.new(policy.spec, policy.proprioception)), None)
