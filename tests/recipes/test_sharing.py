"""Runs that share a folder read each other's rollouts; what would be misread, and several processes, are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sims.catalog import make
from tests.recipes.test_trainers import Process
from tests.toys import FlowToy
from vla_rl.cli import main
from vla_rl.contract.batch import OneProcess, Rollout
from vla_rl.contract.errors import UserError
from vla_rl.experience.board import Board, SharedSource
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.policies.normalization import Affine
from vla_rl.policies.residual import GaussianResidual, ResidualConfig
from vla_rl.recipes.context import RunContext
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.policies import NewPolicy
from vla_rl.recipes.recipe import resume, run
from vla_rl.recipes.stages import EvaluationConfig
from vla_rl.recipes.state_ppo import StateBased
from vla_rl.recipes.trainers import OnPolicyRL, SharingConfig, common
from vla_rl.recipes.training_setup import build
from vla_rl.training.loop import LoopConfig

POINT_MASS = EnvConfig("point_mass")


def rows(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == "rl" and line["step"]]


def test_a_run_reads_what_another_left_and_counts_its_own_steps(quick, untrained, tmp_path):
    few = ["--rl.loop.iterations", "2", "--rl.loop.validate-every", "0", "--evaluation.validation", "1"]
    command = ["train", quick, "--policy", str(untrained()), *few, "--evaluation.test", "1"]
    for name in ("first", "second"):
        main([*command, "--out", str(tmp_path / name), "--shared", str(tmp_path / "shared")])
    first, second = (rows(tmp_path / name) for name in ("first", "second"))
    assert [row["rollout/shared"] for row in first] == [0, 0] and first[0]["rollout/stale"] == 0
    assert second[0]["rollout/shared"] == 0.5 and second[0]["rollout/stale"] == 0.5
    assert second[1]["rollout/shared"] == 0, "what is older than what was read is not read"
    for name in ("env/steps", "env/steps_total", "rollout/episodes", "rollout/successes"):
        assert first[0][name] == second[0][name]
    assert len(list((tmp_path / "shared").iterdir())) == 4


def test_a_resumed_run_of_the_state_based_recipe_is_the_same_learner(tmp_path, monkeypatch):
    recipe = StateBased(
        POINT_MASS,
        experience=WindowConfig(num_envs=2, decisions=4),
        loop=LoopConfig(iterations=3, validate_every=0),
        evaluation=EvaluationConfig(validation=1, test=1, num_envs=1),
        shared=SharingConfig(str(tmp_path / "shared")),
    )
    run(replace(recipe, seed=2), str(tmp_path / "other"))
    publish = Board.publish

    def interrupted(board: Board, rollout: Rollout) -> None:
        publish(board, rollout)
        if len(board._numbers()[board.learner]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Board, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, str(tmp_path / "run"))
    monkeypatch.undo()
    resume(str(tmp_path / "run"))
    assert [row["rollout/shared"] for row in rows(tmp_path / "run")] == [0.5, 0, 0]
    left = [path.name.partition("-")[0] for path in (tmp_path / "shared").iterdir()]
    assert sorted(map(left.count, set(left))) == [3, 4], "two learners: the interrupted iteration was published twice"


def trainer(**changes) -> OnPolicyRL:
    policy = NewPolicy("tests.recipes.outside.straight:Straight")
    return OnPolicyRL(policy, WindowConfig(2, 2), shared=SharingConfig(**changes))


def test_several_processes_of_one_run_are_refused(tmp_path):
    context = RunContext(POINT_MASS, None, 1, Process(0))
    with pytest.raises(UserError, match="2 processes learn from one batch already") as caught:
        build(trainer(folder=str(tmp_path)), context)
    assert str(caught.value).count(". ") == 0
    SharingConfig(str(tmp_path)).require_one_process(OneProcess())
    SharingConfig().require_one_process(Process(0))


def test_without_a_folder_there_is_no_source_around_the_own_one(tmp_path):
    source, policy = object(), FlowToy()
    assert SharingConfig().around(source, policy) is source
    shared = SharingConfig(str(tmp_path / "new"), rollouts=3, keep=2).around(source, policy)
    assert isinstance(shared, SharedSource) and shared.source is source and shared.policy is policy
    assert shared.rollouts == 3 and shared.board.keep == 2 and (tmp_path / "new").is_dir()


def test_numbers_without_a_meaning_are_refused():
    for wrong in ({"rollouts": -1}, {"keep": 0}):
        with pytest.raises(UserError, match="has no meaning"):
            SharingConfig(**wrong)


def gaussian(seed: int, **changes) -> GaussianPolicy:
    torch.manual_seed(seed)
    return GaussianPolicy(make("point_mass", num_envs=1).spec, config=GaussianConfig(2, **changes))


class HalfFrozen(GaussianPolicy):
    """Only the last layer learns."""

    def trainable(self):
        return {"weight": self.last.weight}


def test_learners_have_in_common_what_does_not_learn():
    assert common(gaussian(1)) == common(gaussian(2)) == common(gaussian(3, width=16)), "everything learns"
    other = gaussian(1)
    other.action_scale = Affine((0.0, 0.0), (2.0, 2.0))
    assert common(other) != common(gaussian(1)), "a sample means another action"
    spec = make("point_mass", num_envs=1).spec
    torch.manual_seed(1)
    one = HalfFrozen(spec)
    twin = HalfFrozen(spec)
    assert common(one) != common(twin)
    twin.load_state_dict(one.state_dict())
    assert common(one) == common(twin)
    with torch.no_grad():
        twin.last.weight.add_(1.0)
        assert common(one) == common(twin)
        twin.network[0].weight.add_(1.0)
    assert common(one) != common(twin)


def test_a_frozen_base_is_in_common_too():
    def residual(seed: int, head: int) -> GaussianResidual:
        base = gaussian(seed)
        torch.manual_seed(head)
        return GaussianResidual(base, config=ResidualConfig())

    assert common(residual(1, 1)) == common(residual(1, 2)) != common(residual(2, 1))
