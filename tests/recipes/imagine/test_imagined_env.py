"""From simulator episodes to RL in a world model, with the same learner."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.commands import save_untrained
from tests.recipes.imagine.runs import small_recipe
from tests.world_models import pushing, small_models
from vla_rl.contract.errors import UserError
from vla_rl.experience.collect import collect_trajectories
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine.calibrated_model import (
    CalibratedModel,
    ImaginedEnvFactory,
    measure_rollouts,
    mine_initial_states,
    replay_trajectories,
    success_probability,
)
from vla_rl.recipes.imagine.plan import CollectConfig, CollectedEpisodes, RunEpisodes, collect_episodes
from vla_rl.recipes.trainers import generator
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import RunFolder
from vla_rl.training.world_model import CoevolutionConfig, statistics
from world_models.config import ImaginationConfig, Limits, WorldModelConfig
from world_models.env import ImaginedEnv
from world_models.initial_states import KeyframeConfig
from world_models.model import WorldModel

ENV = EnvConfig("lift", options={"deadline": 7})
COLLECT = CollectConfig(
    policy_episodes=4, epsilon_random_episodes=2, random_episodes=2, calibration=1, held_out=2, num_envs=4
)


@pytest.fixture(scope="module")
def collected(policy) -> CollectedEpisodes:
    return collect_episodes(ENV, policy, COLLECT, seed=1)


def world_model(trajectories: Trajectories) -> WorldModel:
    env = ENV.make(1)
    torch.manual_seed(0)
    made = WorldModel(env.spec, WorldModelConfig(backbone=small_models.SMALL), *statistics(trajectories))
    env.close()
    return made.eval()


def test_every_kind_has_its_own_seeds_and_some_are_held_out(collected):
    parts = collected.learnt, collected.calibration, collected.held_out
    assert [part.count for part in parts] == [5, 1, 2]
    assert (collected.policy_success, collected.policy_episodes) == (0.0, 4)
    seeds = [int(part.seed[begin]) for part in parts for begin, _ in part.spans()]
    assert len(set(seeds)) == 8 and min(seeds) == 18_000_000 and max(seeds) == 18_000_007


def test_episodes_of_other_policies_are_learnt_from_too(policy, tmp_path):
    """And do not count as the policy's own."""
    other = TinyVLA.from_pretrained(save_untrained(tmp_path / "other"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    other.save_pretrained(tmp_path / "other")
    config = replace(COLLECT, other_policies=(str(tmp_path / "other"),), other_episodes=3)
    found = collect_episodes(ENV, policy, config, seed=1)
    assert config.episodes == 11 and found.policy_episodes == 4
    every = Trajectories.joined([found.learnt, found.calibration, found.held_out])
    begins = {int(every.seed[begin]): (begin, end) for begin, end in every.spans()}
    env = ENV.make_training(COLLECT.num_envs)
    theirs = collect_trajectories(env, other, [18_000_008, 18_000_009, 18_000_010], generator(1, 30), "sample")
    env.close()
    for begin, end in theirs.spans():
        first, last = begins.pop(int(theirs.seed[begin]))
        assert np.array_equal(every.action[first:last], theirs.action[begin:end])
    assert set(begins) == set(range(18_000_000, 18_000_008))


def test_collected_episodes_come_back_bit_for_bit_or_are_refused(collected, tmp_path):
    assert CollectedEpisodes.load(tmp_path) is None
    collected.save(tmp_path)
    restored = CollectedEpisodes.load(tmp_path)
    assert restored is not None and restored.policy_success == collected.policy_success
    assert restored.policy_episodes == collected.policy_episodes
    for name in ("learnt", "calibration", "held_out"):
        one, other = getattr(collected, name), getattr(restored, name)
        assert all(np.array_equal(one.images[camera], other.images[camera]) for camera in one.images)
        assert np.array_equal(one.action, other.action) and np.array_equal(one.seed, other.seed)
    (tmp_path / "learnt.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match="no episodes could be read"):
        CollectedEpisodes.load(tmp_path)


def test_a_policy_without_episodes_has_no_known_success(policy, tmp_path, monkeypatch):
    """And not that of the policy with random actions, every one of whose episodes succeeds here."""

    def won(*given: Any) -> Trajectories:
        played = collect_trajectories(*given)
        return replace(played, success=np.ones_like(played.success))

    monkeypatch.setattr("vla_rl.recipes.imagine.plan.collect_trajectories", won)
    collected = collect_episodes(ENV, policy, replace(COLLECT, policy_episodes=0), seed=1)
    assert (collected.policy_success, collected.policy_episodes) == (None, 0)
    collected.save(tmp_path)
    restored = CollectedEpisodes.load(tmp_path)
    assert restored is not None and (restored.policy_success, restored.policy_episodes) == (None, 0)


def test_the_success_of_a_replay_is_the_least_of_its_samples(collected):
    """The other noise is that of resampling; pictures are those of the first."""
    made, learnt = world_model(collected.learnt), collected.learnt
    imagination = ImaginationConfig(batch_size=4, resamples=1)
    single = (replace(imagination, noise_seed=noise, resamples=0) for noise in (0, 1))
    one, other = (replay_trajectories(made, learnt, config) for config in single)
    both = replay_trajectories(made, learnt, imagination)
    assert (one.success < other.success).any() and (one.success > other.success).any(), (
        "so either may have the lower probability"
    )
    np.testing.assert_array_equal(both.success, np.minimum(one.success, other.success))
    np.testing.assert_array_equal(both.pictures, one.pictures)


def test_success_probabilities_are_interpolated_between_calls(collected):
    learnt = collected.learnt
    value = success_probability(world_model(learnt), learnt)
    assert value.shape == learnt.success.shape and ((value >= 0) & (value <= 1)).all()
    begin, end = learnt.spans()[1]
    if end - begin > 7:  # between the first two calls, a straight line
        np.testing.assert_allclose(np.diff(value[begin + 5 : begin + 8]), (value[begin + 6] - value[begin + 5]))


def test_imagined_environments_have_the_spec_that_their_factory_declares(collected):
    made, config = world_model(collected.learnt), ImaginationConfig(horizon=3, batch_size=4)
    starts = mine_initial_states(made, collected.learnt, np.zeros(len(collected.learnt.state)), KeyframeConfig())
    env_factory = ImaginedEnvFactory(made, starts, Limits((np.inf,)), config)
    for env in (env_factory.make(1), env_factory.make_training(2)):
        assert env.spec == env_factory.spec()
    assert (env.spec.time_limit, env.spec.max_chunk) == (3, 3) and env.spec.name == "imagined lift"


@pytest.mark.parametrize("limit, uncertainty", [(np.inf, 0.0), (-1.0, 1.0)])
def test_truncated_calls_count_in_no_inverse_dynamics_error(policy, collected, limit, uncertainty):
    """It shows last what it showed before, and so would seem not to have moved at all."""
    made = world_model(collected.learnt)
    initial = mine_initial_states(made, collected.learnt, np.zeros(len(collected.learnt.state)), KeyframeConfig())
    env = ImaginedEnv(
        made,
        initial,
        4,
        Limits((limit,)),
        ImaginationConfig(horizon=5, batch_size=4, failure_threshold=2.0, success_threshold=2.0),
    )
    signals = measure_rollouts(env, made, policy, range(4), torch.Generator().manual_seed(1))
    assert signals.uncertain == uncertainty and (signals.inverse_dynamics_error > 0) == (uncertainty == 0)


@pytest.mark.full
def test_a_policy_improves_in_imagination(tmp_path):
    """The whole recipe; without demonstrations, an untrained policy's episodes teach nothing about success."""
    shown = small_recipe(
        tmp_path,
        10,
        LoopConfig(3, validate_every=1),
        decisions=2,
        collect=COLLECT,
        coevolution=CoevolutionConfig(budget=3, batch=2, every=1, uncertainty_rise=-1.0),  # this signal always fires
    )
    recipe = replace(shown, plan=replace(shown.plan, demonstrations=""))
    with pytest.raises(UserError, match="none of 5 episodes succeeded"):
        recipe.run(RunFolder(tmp_path / "failures", recipe))
    folder = RunFolder(tmp_path / "run", shown)
    found = shown.run(folder)
    assert found["simulator_episodes"] == 8 + 3 and found["bought"] == 3  # all that was allowed
    decisions = json.loads((folder.path / "coevolution.json").read_text())
    assert [one["buy"] for one in decisions] == [0, 2, 1] and decisions[1]["reasons"]
    assert sorted(path.name for path in (folder.path / "episodes").glob("bought-*")) == ["bought-1.npz", "bought-2.npz"]
    played = [Trajectories.load(folder.path / "episodes" / f"{name}.npz") for name in ("bought-1", "bought-2")]
    seeds = [int(part.seed[begin]) for part in played for begin, _ in part.spans()]
    assert seeds == [18_000_008, 18_000_009, 18_000_010], "scenes that no other episode had"
    assert found["imitation"]["episodes"] == found["imagined_rl"]["episodes"] == 4
    assert found["gain"]["low"] <= found["gain"]["mean"] <= found["gain"]["high"]
    decisions[0]["signals"] |= {"imagined": 0.0, "rollouts": 128, "real": 0.9, "real_episodes": 400}
    (folder.path / "coevolution.json").write_text(json.dumps(decisions))
    with pytest.raises(UserError, match=r"0 of 128 imagined rollouts and in 360 of 400 real ones.*--plan.init-from"):
        shown.prepare(folder)


# -- the episodes of a run ---------------------------------------------------------------------------------------------


def two_of_each() -> CollectedEpisodes:
    return CollectedEpisodes(
        *(pushing.played(2, seed=seed) for seed in (1, 2, 3)), policy_success=0.5, policy_episodes=4
    )


def test_bought_episodes_are_read_in_the_order_of_their_purchase(tmp_path):
    bought = {number: pushing.played(1, seed=10 + number) for number in (2, 10, 1)}
    for number, trajectories in bought.items():
        trajectories.save(tmp_path / f"bought-{number}.npz")
    episodes = RunEpisodes(tmp_path, two_of_each(), [pushing.played(1, seed=4)])
    assert (episodes.purchases, episodes.bought, episodes.learnt.count) == (3, 3, 6)
    for i, number in enumerate((1, 2, 10)):
        latest = episodes.learnt.select([3 + i])
        np.testing.assert_array_equal(latest.state, bought[number].state)
    np.testing.assert_array_equal(episodes.latest(1).state, bought[10].state)
    assert episodes.latest(2).count == 2 and episodes.latest(99).count == 6


def test_a_played_purchase_is_learnt_from_in_turn_and_not_replayed(tmp_path):
    bought = [pushing.played(number, seed=10 + number) for number in (1, 2)]
    for number, trajectories in enumerate(bought, 1):
        trajectories.save(tmp_path / f"bought-{number}.npz")
    episodes, before = RunEpisodes(tmp_path, two_of_each(), []), two_of_each().learnt
    whole = episodes.learnt
    episodes.use(0)
    assert (episodes.purchases, episodes.bought) == (0, 0)
    np.testing.assert_array_equal(episodes.learnt.state, before.state)
    for number, total in ((1, 1), (2, 3)):
        success = episodes.buy(None, None, 1, None, 1)  # type: ignore[arg-type]  # nothing is played
        assert success == (bought[number - 1].outcomes.mean(), number)
        assert (episodes.purchases, episodes.bought, episodes.learnt.count) == (number, total, before.count + total)
    np.testing.assert_array_equal(episodes.learnt.state, whole.state)


def test_every_environment_that_is_in_use_is_renewed():
    model = small_models.model()
    first, second = (small_models.initial_states(model, seed=seed) for seed in (0, 1))
    config = ImaginationConfig(horizon=12, batch_size=4, keyframe_share=1.0)
    factory = ImaginedEnvFactory(model, first, Limits((1.0,) * 4), config)
    used, evaluation = factory.make_training(2), factory.make(2)
    assert (used.config.keyframe_share, evaluation.config.keyframe_share) == (1.0, 0.0)  # type: ignore[attr-defined]
    factory.renew(second, Limits((2.0,) * 4), config)
    for env in (used, evaluation, factory.make(2)):
        assert env.initial_states is second and env.limits.values == (2.0,) * 4  # type: ignore[attr-defined]
    assert evaluation.config.keyframe_share == 0.0  # type: ignore[attr-defined]


def test_the_trusted_horizon_may_grow_to_that_of_the_plan(tmp_path):
    """Environments that were made with a short one play the long one from then on, and declare it."""
    model, plan = small_models.model(), ImaginationConfig(horizon=12, batch_size=4)
    initial, limits = small_models.initial_states(model), Limits((1.0,) * 4)
    for horizon in (6, 12):
        CalibratedModel(model, limits, replace(plan, horizon=horizon)).save(tmp_path / str(horizon))
    short, long = (CalibratedModel.load(tmp_path / name, plan).imagination for name in ("6", "12"))
    assert (short.horizon, long.horizon) == (6, 12)
    factory = ImaginedEnvFactory(model, initial, limits, short)
    used, evaluation = factory.make_training(2), factory.make(2)
    factory.renew(initial, limits, long)
    for env in (used, evaluation):
        assert env.config.horizon == env.spec.time_limit == 12 and env.spec == factory.spec()  # type: ignore[attr-defined]
