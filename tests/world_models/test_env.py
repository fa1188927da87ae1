"""The imagined environment keeps the contract of a simulator and truncates uncertain rollouts."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.world_models.small_models import SMALL, imagined_env, initial_states, model, spec
from vla_rl.contract.check import check_env, random_actions
from vla_rl.contract.env import ArraySpec, Observation
from world_models.config import ImaginationConfig, Limits, WorldModelConfig
from world_models.env import ImaginedEnv
from world_models.initial_states import InitialStatePool, InitialStates
from world_models.model import WorldModel


def test_an_imagined_rollout_with_ends_keeps_the_contract_of_a_simulator():
    """Whatever ends it, also inside a call, however its actions are cut into chunks."""
    check_env(imagined_env(6, resamples=0, outcome_every=1, success_threshold=0.62, failure_threshold=0.62), seed=11)
    usual = imagined_env(6)
    usual.reset(np.arange(6), np.arange(6))
    usual.step(random_actions(usual, 3, np.random.default_rng(0)))
    limit = float(np.median(usual.uncertainty))
    limits, bars = Limits((1.05 * limit, limit, limit, limit)), {"success_threshold": 0.6, "failure_threshold": 0.6}
    env = imagined_env(6, deadline=9, limits=limits, **bars)
    check_env(env, seed=11)
    causes = set()
    for seed in range(0, 60, 6):
        env.reset(np.arange(6), seed + np.arange(6))
        for _ in range(4):
            step = env.step(random_actions(env, 3, np.random.default_rng(seed)))
        causes |= set(step.cause) & {"success", "failed", "too_late", "uncertainty"}
        if len(causes) > 1:
            return
    pytest.fail(f"nothing but {causes} ended them")


def same(a: Observation, b: Observation) -> bool:
    return all(np.array_equal(a.images[name], b.images[name]) for name in a.images) and np.array_equal(a.state, b.state)


def test_a_reset_of_one_row_touches_no_other():
    """In the middle of a call, too: the others are not affected."""
    courses, sizes = [], set()
    for interrupted in (False, True):
        env, env_ids = imagined_env(5), np.arange(5)
        env.model.video.register_forward_pre_hook(lambda module, given: sizes.add(len(given[0])))
        env.reset(env_ids, 20 + env_ids)
        actions = random_actions(env, 7, np.random.default_rng(1))
        env.step(actions[:, :4])
        if interrupted:
            env.reset(np.array([2]), np.array([99]))
        courses.append(env.step(actions[:, 4:]).obs)
    others = np.array([0, 1, 3, 4])
    assert sizes == {4}, "kernels differ with the size of a batch, so there is one size only"
    assert same(courses[0].select(others), courses[1].select(others))
    assert courses[1].time.tolist() == [7, 7, 3, 7, 7]
    assert not same(courses[0].select(np.array([2])), courses[1].select(np.array([2])))


def test_a_frame_depends_on_the_actions_before_it_alone():
    env, env_ids = imagined_env(4), np.arange(4)
    actions = random_actions(env, 6, np.random.default_rng(3))
    other = actions.copy()
    other[:, 4:] = random_actions(env, 2, np.random.default_rng(4))
    env.reset(env_ids, env_ids)
    first = env.step(actions, observe="all").frames
    env.reset(env_ids, env_ids)
    second = env.step(other, observe="all").frames
    assert all(same(a, b) for a, b in zip(first[:4], second[:4], strict=True))
    assert not same(first[4], second[4]) and not same(first[3], first[4])
    env.reset(env_ids, env_ids)
    for i, frame in enumerate(first):  # one action after the other
        assert same(env.step(actions[:, i : i + 1]).obs, frame), i


def test_pictures_only_looked_at_are_denoised_in_one_step():
    """In the middle of a call; where it ends, also because time is up, all steps are taken (0: as configured)."""
    calls, whole = [], model().config.frames
    env = imagined_env(4, deadline=2 * whole - 1)
    predict = env.model.predict

    def counted(*given):
        calls.append((int(given[2][0]), given[4]))
        return predict(*given)

    env.model.predict = counted
    env.reset(np.arange(4), np.arange(4))
    for action in np.moveaxis(random_actions(env, 2 * whole - 1, np.random.default_rng(3)), 1, 0):
        env.step(action[:, None])
    middle = [(known, 1) for known in range(1, whole)]
    assert calls == [*middle, (whole, 0), *middle[:-1], (whole - 1, 0)]


@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.full)])
def test_outcomes_inside_a_call_end_it_where_they_are_looked_at(every):
    """As the outcome at every, or every second, of its three control steps has it; and it is paid there."""
    count = 24
    watched, outcomes = imagined_env(count, resamples=0), []
    actions = random_actions(watched, 9, np.random.default_rng(0))
    watched.reset(np.arange(count), np.arange(count))
    for t in range(9):
        watched.step(actions[:, t : t + 1])
        outcomes.append(watched.outcome.copy())
    due = np.array([(t % 3) % every == 0 for t in range(1, 10)])
    # Between two values, since a rollout whose neighbours are over may round the last bit differently.
    bars = [float(np.sort(np.stack(outcomes)[..., i], None)[172:174].mean()) for i in (0, 1)]
    ending = imagined_env(count, resamples=0, outcome_every=every, success_threshold=bars[0], failure_threshold=bars[1])
    ending.reset(np.arange(count), np.arange(count))
    success, failed = (np.stack(outcomes, 1)[:, :, i] >= bars[i] for i in (0, 1))
    over = (success | failed) & due
    last = np.where(over.any(1), over.argmax(1), 8)
    step = ending.step(actions, observe="all")
    assert step.valid.sum(1).tolist() == (last + 1).tolist() == ending.snapshot(range(count))["time"].tolist()
    won = success[np.arange(count), last] & over.any(1)
    assert [cause == "success" for cause in step.cause] == won.tolist()
    assert [cause == "failed" for cause in step.cause] == (over.any(1) & ~won).tolist()
    assert step.reward.sum(1).tolist() == step.reward[np.arange(count), last].tolist() == won.tolist()
    inside = over.any(1) & ((last + 1) % 3 > 0)
    assert (inside & won).any() and (inside & ~won).any() and not over.all(1).any()


def test_calls_have_their_own_noise_and_the_first_frame():
    env, other, env_ids = imagined_env(2), imagined_env(2, noise_seed=1), np.arange(2)
    assert same(env.reset(env_ids, env_ids), other.reset(env_ids, env_ids))
    saved, actions = env.snapshot(env_ids), random_actions(env, 3, np.random.default_rng(8))
    initial, first = saved["rollout/context_frames"], env.step(actions).obs
    assert not same(first, other.step(actions).obs)
    env.restore(env_ids, saved | {"rollout/depth": saved["rollout/depth"] + 1})  # deeper in its rollout
    assert not same(first, env.step(actions).obs)
    for i in range(2):
        env.step(random_actions(env, 3, np.random.default_rng(i)))
    context, shown = (env.snapshot(env_ids)[f"rollout/{name}"] for name in ("context_frames", "picture"))
    assert np.array_equal(context[:, 0], initial[:, 0])
    assert np.array_equal(context[:, -1], shown) and not np.array_equal(context[:, 1], initial[:, 1])


def test_what_is_uncertain_is_truncated_and_not_shown():
    """No rollout goes on from there, so no data would correct a critic: it is asked about what was trusted last."""
    free, env_ids = imagined_env(6), np.arange(6)
    free.reset(env_ids, env_ids)
    actions = random_actions(free, 3, np.random.default_rng(5))
    first, second = free.step(actions).obs, free.step(actions).obs
    limit = float(np.median(free.uncertainty))
    env = imagined_env(6, limits=Limits((1e9, limit, limit, limit)))
    env.reset(env_ids, env_ids)
    env.step(actions)
    step = env.step(actions)
    uncertain = np.array(step.cause) == "uncertainty"
    assert 0 < uncertain.sum() < 6 and not (first.images["front"] == second.images["front"]).all((1, 2, 3)).any()
    expected = first.select(np.arange(6))
    for shown, after in ((expected.images["front"], second.images["front"]), (expected.state, second.state)):
        shown[~uncertain] = after[~uncertain]
    assert same(step.obs, expected) and np.array_equal(step.truncated, uncertain)
    assert not step.terminated.any() and not step.success.any() and not step.reward.any()


def test_uncertainty_comes_before_success():
    """A success of an uncertain prediction earns no reward."""
    env, env_ids = imagined_env(3, success_threshold=0.0, limits=Limits((-1.0,) * 4)), np.arange(3)
    env.reset(env_ids, env_ids)
    step = env.step(random_actions(env, 3, np.random.default_rng(5)))
    assert set(step.cause) == {"uncertainty"} and not step.success.any() and not step.reward.any()
    env = imagined_env(3, success_threshold=0.0)
    env.reset(env_ids, env_ids)
    step = env.step(random_actions(env, 3, np.random.default_rng(5)))
    assert set(step.cause) == {"success"} and step.reward.tolist() == [[0, 0, 1]] * 3


@pytest.mark.parametrize("deadline, cause, time", [(None, "time_limit", 8), (5, "too_late", 5)])
def test_time_is_up_in_the_middle_of_a_call(deadline, cause, time):
    env, env_ids = imagined_env(2, horizon=8, deadline=deadline), np.arange(2)
    env.reset(env_ids, env_ids)
    step = env.step(random_actions(env, 8, np.random.default_rng(6)))
    assert set(step.cause) == {cause} and step.obs.time.tolist() == [time] * 2
    assert step.truncated.all() == (deadline is None)
    late = imagined_env(2, horizon=8, deadline=deadline, success_threshold=0.0)
    late.reset(env_ids, env_ids)
    assert late.step(random_actions(late, 2, np.random.default_rng(6))).success.sum() == 0
    assert late.step(random_actions(late, 6, np.random.default_rng(6))).terminated.all()


@pytest.mark.parametrize("share, kinds", [(1.0, {1}), (0.5, {0, 1})])
def test_seeds_choose_where_imagined_rollouts_begin(share, kinds):
    env = imagined_env(64, keyframe_share=share)
    obs = env.reset(np.arange(64), np.arange(64))
    pools = [part.pictures[:, -1] for part in (env.initial_states.first, env.initial_states.keyframes)]
    initial = np.moveaxis(obs.images["front"], -1, 1)
    found = {kind for kind, pool in enumerate(pools) for row in initial if (row == pool).all((1, 2, 3)).any()}
    assert found == kinds


@pytest.mark.parametrize("horizon, calibrated, warned", [(12, 4, False), (13, 4, True), (12, 3, True), (99, 0, False)])
def test_a_horizon_beyond_the_calibrated_one_is_warned_of(horizon, calibrated, warned):
    """Calls of three control steps; the environments that resample successes have no limits and do not warn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        imagined_env(2, horizon=horizon, limits=Limits((1.0,) * calibrated) if calibrated else None)
    messages = [str(item.message) for item in caught if item.category is UserWarning]
    assert len(messages) == warned
    if warned:
        longest = 3 * calibrated
        wanted = f"horizon of {horizon} control steps is beyond the {longest} .* at most {longest}, or calibrate"
        assert re.search(wanted, messages[0]) and caught[-1].filename.endswith("small_models.py")


def keyframes_at(time: int, **numbers: Any) -> ImaginedEnv:
    """Every rollout begins at a keyframe, ``time`` control steps into its episode."""
    made = model()
    pool = initial_states(made)
    pool = replace(pool, keyframes=replace(pool.keyframes, time=np.full(len(pool.keyframes), time)))
    numbers = {"batch_size": 4, "success_threshold": 2.0, "failure_threshold": 2.0, "keyframe_share": 1.0, **numbers}
    return ImaginedEnv(made, pool, 3, None, ImaginationConfig(**numbers))


@pytest.mark.parametrize("deadline, cause, lasts", [(None, "time_limit", 8), (9, "too_late", 2), (30, "time_limit", 8)])
def test_a_rollout_from_a_keyframe_keeps_its_episodes_clock(deadline, cause, lasts):
    """The horizon counts from where it begins; the deadline is the episode's."""
    env, env_ids = keyframes_at(7, horizon=8, deadline=deadline), np.arange(3)
    assert env.reset(env_ids, env_ids).time.tolist() == [7] * 3
    step = env.step(random_actions(env, 8, np.random.default_rng(3)))
    assert set(step.cause) == {cause} and step.obs.time.tolist() == [7 + lasts] * 3
    assert step.valid.sum(1).tolist() == [lasts] * 3 and env.spec.time_limit >= 7 + lasts


def test_every_whole_and_certain_call_is_told_of_in_any_chunks():
    told: dict[int, list[Any]] = {}
    for chunk in (1, 2, 3, 6):
        env, env_ids, calls = imagined_env(2, horizon=7), np.arange(2), []
        env.on_call = lambda *call, calls=calls: calls.append([item.clone() for item in call])
        env.reset(env_ids, env_ids)
        actions = random_actions(env, 6, np.random.default_rng(5))
        for first in range(0, 6, chunk):
            env.step(actions[:, first : first + chunk])
        env.step(actions[:, :1])  # the seventh, which is no whole call
        told[chunk] = calls
    for calls in told.values():
        assert len(calls) == 2
        for call, other in zip(calls, told[3], strict=True):
            assert all(torch.equal(one, two) for one, two in zip(call, other, strict=True))
    (before, after, executed), (then, _, _) = told[3]
    assert torch.equal(after, then) and not torch.equal(before, after)
    np.testing.assert_allclose(executed.numpy(), actions[:, :3])
    env, calls = imagined_env(2, limits=Limits((-1.0,) * 4)), []
    env.on_call = lambda *call: calls.append(call)
    env.reset(env_ids, env_ids)
    assert set(env.step(actions[:, :3]).cause) == {"uncertainty"} and not calls


def test_two_sizes_and_no_proprioception_keep_the_contract():
    """A grey picture of 20 x 20 and one of 12 x 16 in colour; policies get what the simulator gives them."""
    images = {"board": ArraySpec((20, 20, 1), "uint8", 0, 255), "wrist": ArraySpec((12, 16, 3), "uint8", 0, 255)}
    given = replace(spec(), images=images, state=ArraySpec((0,), "float32", (), ()))
    torch.manual_seed(0)
    made = WorldModel(given, WorldModelConfig(3, backbone=SMALL, robot_crop=0)).eval()
    chooser, count = np.random.default_rng(0), 4
    pictures = chooser.integers(0, 256, (count, 3, *made.picture), np.uint8)
    moments = InitialStates(pictures, np.zeros((count, 1), np.float32), np.zeros(count, int), np.zeros(count, int))
    pool = InitialStatePool(moments, moments.select(np.zeros(0, int)))
    env = ImaginedEnv(made, pool, 3, Limits((1e9,) * 4), ImaginationConfig(horizon=12, batch_size=4))
    check_env(env, seed=3)
    obs = env.reset(np.arange(3), np.arange(3))
    assert {name: item.shape for name, item in obs.images.items()} == {"board": (3, 20, 20, 1), "wrist": (3, 12, 16, 3)}
    step = env.step(random_actions(env, 3, np.random.default_rng(1)))
    assert step.obs.state.shape == (3, 0) and np.isfinite(env.uncertainty).all()
