"""The memory of a run is known before it is spent, and is what the run then takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.benchmarks.memory import ENV, Case, cases, live_peak, made_envs
from vla_rl.algorithms.group_relative import GRPOConfig
from vla_rl.algorithms.guard import FallbackConfig, ReleaseConfig
from vla_rl.contract.errors import UserError
from vla_rl.experience.groups import GroupConfig
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.memory import MemoryEstimate, estimate, memory_of
from vla_rl.training.out_of_memory import COLLECT, LEARN, VALIDATE
from vla_rl.training.shapes_only import META

CASES = cases(quick=True)


def of(case: Case) -> MemoryEstimate:
    return estimate(case.trainer, ENV, case.evaluation, case.start)


@cache
def of_case(name: str) -> MemoryEstimate:
    return of(CASES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_estimate_is_what_the_run_takes(name):
    with made_envs(CASES[name]) as envs:
        live = live_peak(CASES[name], envs)
    found = of_case(name)
    assert found.learnt and found.peak == pytest.approx(live, rel=0.1)


@pytest.mark.full
def test_what_lasts_is_what_it_should_be():
    found, policy = of_case("tiny_ppo"), CASES["tiny_ppo"].start(ENV.spec())
    trained = sum(item.numel() for item in policy.trainable().values())
    assert found.trained == 4 * trained
    assert found.gradients > 4 * trained and found.optimizer == pytest.approx(2 * found.gradients, rel=1e-3)
    assert all(item.is_meta for item in found.policy.parameters())
    assert found.decision["points"] == 4 * 5 * 20 and found.observation["state"] == 4 * 8  # K + 1 points of H x D
    assert found.rollout > 4 * 2 * sum(found.decision.values())


@pytest.mark.full
def test_smaller_micro_batches_take_less():
    case = CASES["smolvla_prefix"]
    trainer = replace(case.trainer, experience=replace(case.trainer.experience, num_envs=8))
    whole = replace(trainer, algorithm=replace(trainer.algorithm, minibatch=16))
    parts = replace(whole, algorithm=replace(whole.algorithm, micro_batch=4))
    most, least = (of(replace(case, trainer=trainer)).phases[LEARN].peak for trainer in (whole, parts))
    assert least < 0.9 * most


@pytest.mark.full
def test_a_replay_buffer_on_the_disk_takes_no_memory(tmp_path):
    case = CASES["residual_td3"]
    there = replace(case.trainer, replay=replace(case.trainer.replay, folder=str(tmp_path / "replay")))
    inside, outside = of_case("residual_td3"), of(replace(case, trainer=there))
    assert outside.replay == 0 and outside.on_disk == inside.replay > 1_000_000
    for name in (COLLECT, LEARN, VALIDATE):
        assert outside.phases[name].peak <= inside.phases[name].peak
    assert not (tmp_path / "replay").exists()


@pytest.mark.full
def test_what_changes_when_something_is_learnt_changes_nothing():
    """A source that is ahead, an actor that would be held, groups of whole episodes."""
    ppo, td3 = CASES["tiny_ppo"], CASES["residual_td3"]
    ahead = replace(ppo.trainer, loop=replace(ppo.trainer.loop, staleness=2))
    assert of(replace(ppo, trainer=ahead)).phases == of_case("tiny_ppo").phases
    held = {"release": ReleaseConfig(), "fallback": FallbackConfig(), "burst": 1000}
    guarded = of(replace(td3, trainer=replace(td3.trainer, algorithm=replace(td3.trainer.algorithm, **held))))
    assert guarded.learnt and guarded.peak == of_case("residual_td3").peak
    groups = GroupConfig(groups=2, size=2, ahead=0, limit=2, num_envs=4)
    grouped = of(replace(ppo, trainer=replace(ppo.trainer, experience=groups, algorithm=GRPOConfig())))
    assert grouped.learnt and grouped.phases[LEARN].peak > grouped.phases[LEARN].before


class Headers:
    """An open safetensors file whose tensors cannot be read."""

    def __init__(self, path, framework) -> None:
        self._file = safe_open(path, framework)

    def __enter__(self) -> Headers:
        return self

    def __exit__(self, *given) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name):
        return self._file.get_slice(name)


@pytest.mark.full
def test_the_weights_of_a_checkpoint_are_not_read(tmp_path, monkeypatch):
    """Their headers are: a file whose shapes do not fit is refused as ever."""
    case = CASES["tiny_ppo"]
    case.start(ENV.spec()).save_pretrained(tmp_path / "policy")
    monkeypatch.setattr("vla_rl.pretrained.safe_open", Headers)
    config = Improve(case.trainer, str(tmp_path / "policy"), env=ENV, evaluation=case.evaluation)
    assert memory_of(config).peak == of_case("tiny_ppo").peak
    with torch.device(META):
        policy = load_policy(tmp_path / "policy")
    assert all(item.is_meta for item in policy.parameters())
    tensors = {name: torch.zeros(1) for name in policy.state_dict()}
    save_file(tensors, tmp_path / "policy" / "model.safetensors")
    with pytest.raises(UserError, match="does not fit the model"):
        memory_of(config)
