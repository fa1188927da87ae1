"""The episodes of a run: the latest are the last bought, in the order of their purchase."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.world_models import pushing, small_models
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel, ImaginedEnvFactory
from vla_rl.recipes.imagine.plan import CollectedEpisodes, RunEpisodes
from world_models.config import ImaginationConfig, Limits


def collected() -> CollectedEpisodes:
    return CollectedEpisodes(
        *(pushing.played(2, seed=seed) for seed in (1, 2, 3)), policy_success=0.5, policy_episodes=4
    )


def test_bought_episodes_are_read_in_the_order_of_their_purchase(tmp_path):
    bought = {number: pushing.played(1, seed=10 + number) for number in (2, 10, 1)}
    for number, trajectories in bought.items():
        trajectories.save(tmp_path / f"bought-{number}.npz")
    episodes = RunEpisodes(tmp_path, collected(), [pushing.played(1, seed=4)])
    assert (episodes.purchases, episodes.bought, episodes.learnt.count) == (3, 3, 6)
    for i, number in enumerate((1, 2, 10)):
        latest = episodes.learnt.select([3 + i])
        np.testing.assert_array_equal(latest.state, bought[number].state)
    np.testing.assert_array_equal(episodes.latest(1).state, bought[10].state)
    assert episodes.latest(2).count == 2 and episodes.latest(99).count == 6


def test_a_purchase_that_an_interrupted_run_has_played_is_learnt_from_in_its_turn_and_not_played_again(
    tmp_path,
):
    bought = [pushing.played(number, seed=10 + number) for number in (1, 2)]
    for number, trajectories in enumerate(bought, 1):
        trajectories.save(tmp_path / f"bought-{number}.npz")
    episodes, before = RunEpisodes(tmp_path, collected(), []), collected().learnt
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
