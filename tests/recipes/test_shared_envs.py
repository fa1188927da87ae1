"""Training and validation in one set of environments: neither notices the other."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import CountingEnv, episode_length
from tests.auditing import AuditingPolicy
from vla_rl.cli import main
from vla_rl.contract.env import Snapshots
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.background import BackgroundSource
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.recipes import sims
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import SharedEnvs
from vla_rl.recipes.stages import EvaluationConfig

SMALL = {
    "loop.iterations": 2,
    "loop.validate-every": 1,
    "experience.num_envs": 2,
    "experience.decisions": 16,
    "algorithm.minibatch": 16,
    "evaluation.validation": 3,
    "evaluation.test": 2,
    "evaluation.num_envs": 2,
}
ARGUMENTS = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
HELD_OUT = [5000, 5001, 5002, 5003, 5004, 5005]


def source(env) -> RolloutSource:
    return RolloutSource(env, AuditingPolicy(4), 7, SeedStream(300, 4000), torch.Generator())


def test_validation_in_between_leaves_training_as_it_is_and_sees_its_own_seeds():
    lending, alone = source(make("counting", num_envs=5)), source(make("counting", num_envs=5))
    for _ in range(4):
        with lending.lent():
            outcomes = evaluate(lending.env, AuditingPolicy(3), HELD_OUT)
        assert outcomes.length.tolist() == episode_length(np.array(HELD_OUT)).tolist()
        assert outcomes.seeds.tolist() == HELD_OUT and outcomes.success.tolist() == [True, False] * 3
        one, other = lending.next(), alone.next()
        for name in ("seeds", "reward", "valid", "terminated", "truncated", "executed", "final_index"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert all(torch.equal(one.features[name], other.features[name]) for name in one.features)


class Forgetful:
    """The counting environment without snapshots."""

    def __init__(self, num_envs: int) -> None:
        self.env = CountingEnv(num_envs)
        self.spec, self.num_envs = replace(self.env.spec, can_snapshot=False), num_envs
        self.reset, self.step, self.close = self.env.reset, self.env.step, self.env.close


def test_episodes_that_cannot_be_put_aside_are_broken_off_and_the_next_seeds_begin():
    lending = source(Forgetful(5))
    assert not isinstance(lending.env, Snapshots)
    first = lending.next()
    begun = 300 + lending.seeds.drawn
    with lending.lent():
        evaluate(lending.env, AuditingPolicy(3), HELD_OUT)
    second = lending.next()
    assert second.seeds[0].tolist() == list(range(begun, begun + 5))
    assert second.features["counters"][0, :, 1].tolist() == [0] * 5
    assert not set(second.seeds.unique().tolist()) & set(first.seeds.unique().tolist())


def test_nobody_borrows_in_an_unfinished_window():
    lending = source(make("counting", num_envs=5))
    lending.start()
    lending._keep(lending.driver.step(), lending._window)
    with pytest.raises(ContractError, match="unfinished window"), lending.lent():
        pass


def test_groups_lend_their_environments_too():
    config = GroupConfig(groups=2, size=2, ahead=0, limit=2, num_envs=4)
    made = [
        config.build(make("counting", num_envs=4), AuditingPolicy(4), SeedStream(300, 4000), torch.Generator())
        for _ in range(2)
    ]
    for _ in range(3):
        with made[0].lent():
            evaluate(made[0].env, AuditingPolicy(3), HELD_OUT)
        assert made[0].driver.obs is None, "every environment is reset before it is stepped again"
        one, other = made[0].next(), made[1].next()
        assert torch.equal(one.seeds, other.seeds) and torch.equal(one.reward, other.reward)
        assert torch.equal(one.features["counters"], other.features["counters"])


def kept(out: Path) -> tuple[str, list[dict[str, float]]]:
    """Digest of the best weights, and the metrics without seconds."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    numbers = [{name: value for name, value in line.items() if not name.endswith("_s")} for line in lines]
    weights = next((out / "checkpoints" / "best").glob("*.safetensors")).read_bytes()
    return hashlib.sha256(weights).hexdigest(), numbers


@pytest.fixture
def made(monkeypatch):
    """The sizes of all sets of environments that are made."""
    sizes, real = [], sims.make_env

    def counted(name, num_envs, **options):
        sizes.append(num_envs)
        return real(name, num_envs, **options)

    monkeypatch.setattr(sims, "make_env", counted)
    return sizes


@pytest.mark.parametrize("recipe", ["improve", pytest.param("residual", marks=pytest.mark.full)])
def test_a_run_is_the_same_with_one_set_of_environments_as_with_two(recipe, untrained, quick, tmp_path, made):
    policy = str(untrained())
    for name, share in (("two", []), ("one", ["--evaluation.share-env"])):
        learning = ["--rl.loop.iterations", "3", "--evaluation.num-envs", "4"]
        command = ["train", quick.replace(":improve", f":{recipe}"), "--policy", policy, "--out", str(tmp_path / name)]
        main([*command, *learning, *share])
    assert kept(tmp_path / "one") == kept(tmp_path / "two")
    two, one = made[: len(made) // 2 + 1], made[len(made) // 2 + 1 :]
    assert sorted(two) == sorted([*one, 4]), "one set of four environments less"


def test_a_state_based_run_is_the_same_too(tmp_path, made):
    for name, share in (("two", []), ("one", ["--evaluation.share-env"])):
        main(["train", "gym.py:inverted_pendulum", "--out", str(tmp_path / name), *ARGUMENTS, *share])
    assert kept(tmp_path / "one") == kept(tmp_path / "two") and made == [2, 2, 2]


def test_what_cannot_be_shared_is_refused_in_one_sentence():
    with pytest.raises(UserError, match="2 processes cannot evaluate in the training's environments"):
        EvaluationConfig(processes=2, share_env=True)
    with pytest.raises(UserError, match="trains in other environments than it validates in"):
        SharedEnvs(EnvConfig("lift", training_options={"deadline": 5}))
    shared = SharedEnvs(EnvConfig("counting"))
    with (
        closing(BackgroundSource([source(make("counting", num_envs=2))], AuditingPolicy(4))) as background,
        pytest.raises(UserError, match=r"BackgroundSource cannot lend.*staleness at 0"),
    ):
        shared.lend(background)
