"""A run that improves a policy by its own successes, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import vla_rl.recipes.improve
from tests.commands import save_untrained
from tests.recipes import quick as configs
from vla_rl.cli import main
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import UserError
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.recipes.building import build
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitating import SelfImitated
from vla_rl.recipes.trainers import RunContext


def test_its_successes_are_gathered_and_imitated_after_every_second_rollout(untrained, quick, tmp_path) -> None:
    policy, run = untrained(), tmp_path / "run"
    main(["train", quick.replace(":improve", ":self_imitated"), "--policy", str(policy), "--out", str(run)])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learnt = [row for row in rows if row["stage"] == "rl" and row["step"]]
    kept = [row["replay/successes"] for row in learnt]
    assert len(kept) == 4 and kept == sorted(kept) and kept[-1] > kept[1] > 0
    assert ["policy/success_loss" in row for row in learnt] == [False, True, False, True]
    assert all(row["rollout/successes"] > 0 for row in learnt) and "policy/demonstration_loss" not in learnt[-1]


def test_its_backbone_learns_too_if_it_should_foresee_states(untrained, quick, tmp_path) -> None:
    policy, run = untrained(), tmp_path / "run"
    foreseeing = quick.replace(":improve", ":self_imitated_foreseeing")
    main(["train", foreseeing, "--policy", str(policy), "--out", str(run)])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    foreseen = [row["policy/future_state_loss"] for row in rows if "policy/future_state_loss" in row]
    assert len(foreseen) == 2 and all(loss > 0 for loss in foreseen)


def test_an_improvement_that_takes_long_says_how_far_it_is(untrained, quick, tmp_path, monkeypatch) -> None:
    remarks: list[tuple[int, str]] = []

    @contextmanager
    def listening(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
        yield lambda done, remark="": remarks.append((done, remark))

    monkeypatch.setattr(vla_rl.recipes.improve, "bar", listening)
    config = quick.replace(":improve", ":self_imitated")
    main(["train", config, "--policy", str(untrained()), "--out", str(tmp_path / "run")])
    steps = [(done, remark) for done, remark in remarks if remark.startswith("learning")]
    assert {done for done, _ in steps} == {1, 3}, "before the second and the fourth iteration are done"
    assert steps[-1][1] == "learning from successes, 100%" != steps[0][1]


def trainer() -> SelfImitated:
    found = configs.self_imitated().rl
    assert isinstance(found, SelfImitated)
    return found


def test_what_cannot_imitate_itself_is_refused_in_one_sentence(tmp_path: Path) -> None:
    policy = load_policy(save_untrained(tmp_path / "policy"))
    context = RunContext(EnvConfig("lift"), policy, 1, OneProcess())
    with pytest.raises(UserError, match="one process"):
        build(trainer(), replace(context, group=SimpleNamespace(rank=0, size=2)))  # type: ignore[arg-type]
    foreseeing = configs.self_imitated_foreseeing().rl
    assert isinstance(foreseeing, SelfImitated)
    assert foreseeing.build_policy(context, None).trainable().keys() == dict(policy.named_parameters()).keys()
    with pytest.raises(UserError, match="no backbone would foresee"):
        foreseeing.build_policy(replace(context, base=SmolVLA.new(policy.spec, policy.proprioception)), None)
    with pytest.raises(UserError, match="no flow policy"):
        trainer().build_policy(replace(context, base=Bare()), None)  # type: ignore[arg-type]


class Bare:
    """Has what every policy has, and no more."""

    spec = feature_sizes = encode = None
