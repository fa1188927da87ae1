"""Environments with a reward model: the reward, the ends of episodes, snapshots and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.counting import CountingEnv, episode_length
from tests.elsewhere import elsewhere
from tests.world_models.small_models import imagined_env
from vla_rl.contract.check import check_env, random_actions
from vla_rl.contract.env import Snapshots, VecEnv
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.rewards.env import RewardedEnv, RewardWeights, rewarded
from vla_rl.rewards.progress import ProgressConfig, ProgressCritic
from vla_rl.rewards.reward_model import Reward, RewardOutput, reset_rows

# Progress by actions since the reset: half-way, back, waiting, all of the way; 1 from then on.
COURSE = np.array([0.1, 0.3, 0.6, 0.4, 0.4, 0.9, 1.0], np.float32)
LONG = [seed for seed in range(200) if episode_length(np.array(seed)) > 15]


class ScriptedReward:
    """Progress ``of(pictures)``; done from an episode's ``hold``-th frame on that reaches ``limit`` (a ``Reward``)."""

    def __init__(self, of: Callable[[np.ndarray], np.ndarray], limit: float = 1.0, hold: int = 1) -> None:
        self.of, self.limit, self.hold = of, limit, hold
        self.texts: list[list[str]] = []

    def initial_state(self, num_envs):
        return {"count": np.zeros(num_envs, np.int64)}

    def reset_state(self, state, env_ids):
        return reset_rows(state, self.initial_state(len(state["count"])), env_ids)

    def evaluate(self, frames, text, valid, state):
        self.texts.append(list(text))
        (pictures,) = frames.values()
        progress = self.of(pictures).astype(np.float32)
        count = state["count"][:, None] + ((progress >= self.limit) & valid).cumsum(1)
        return RewardOutput(progress, count >= self.hold), {"count": count[:, -1]}


def course(pictures: np.ndarray) -> np.ndarray:
    """The progress of ``COURSE`` for the counting environment's pictures [E,T,4,4,3] of the number of actions."""
    return COURSE[np.minimum(pictures[:, :, 0, 0, 0], len(COURSE) - 1)]


def brightness(pictures: np.ndarray) -> np.ndarray:
    return pictures.mean((2, 3, 4)) / 255


def counting(num_envs: int = 3, weights: RewardWeights | None = None, limit: float = 1.0, hold: int = 1) -> RewardedEnv:
    return rewarded(CountingEnv(num_envs), ScriptedReward(course, limit, hold), weights)


def zeros(env: VecEnv, actions: int) -> np.ndarray:
    return np.zeros((env.num_envs, actions, env.spec.action_dim), np.float32)


# -- the contract -----------------------------------------------------------------------------------------------------


def displayed(env: VecEnv) -> tuple[dict[str, np.ndarray], list[str]]:
    """Pictures of eight actions in some episodes, and their instructions."""
    frames, every = [], np.arange(env.num_envs)
    for first in range(0, 40, env.num_envs):
        env.reset(every, first + every)
        frames += env.step(random_actions(env, 8, np.random.default_rng(first)), observe="all").frames
    images = {name: np.concatenate([frame.images[name] for frame in frames]) for name in env.spec.images}
    return images, [env.spec.tasks[task] for frame in frames for task in frame.task]


def watched(env: VecEnv, kind: str) -> Reward:
    """Reward models that report three in ten of the frames of ``env`` as done, and wait for two such."""
    images, text = displayed(env)
    if kind == "brightness":
        return ScriptedReward(
            brightness, float(np.quantile(brightness(next(iter(images.values()))[:, None]), 0.7)), hold=2
        )
    cameras, words = {name: item.shape for name, item in env.spec.images.items()}, " ".join(env.spec.tasks).split()
    torch.manual_seed(0)
    config = ProgressConfig(width=8, stem=4, keypoints=2, hold=2, stride=2)
    model = ProgressCritic(cameras, sorted(set(words)), config)
    model.threshold = float(model.score(model.encode(images, text)).detach().quantile(0.7))
    return model.eval()


@pytest.mark.parametrize("inner_env", ["counting", pytest.param("imagined", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["brightness", "progress"])
def test_simulators_and_world_models_keep_the_contract(inner_env, kind):
    inner = CountingEnv(4) if inner_env == "counting" else imagined_env(4)
    env = rewarded(inner, watched(inner, kind), RewardWeights(1.0, 0.5, 0.25))
    assert len(check_env(env, seed=11)) == 7 and isinstance(env, Snapshots)
    ends: list[int] = []
    for first in range(0, 40, 4):
        seeds = first + np.arange(4)
        limit = episode_length(seeds) if inner_env == "counting" else np.full(4, 12)
        env.reset(np.arange(4), seeds)
        while not (step := env.step(random_actions(env, 3, np.random.default_rng(first)))).done.all():
            pass
        early = step.obs.time < limit
        assert step.success[early].all() and not step.truncated[early].any()
        ends += step.obs.time[early].tolist()
    assert 3 < len(ends) < 40, "the model ends some episodes, and not all"


def test_a_reward_model_brings_success_to_an_environment():
    inner = CountingEnv(2)
    inner.spec = replace(inner.spec, success=None)
    assert rewarded(inner, ScriptedReward(course)).spec.success == "once"


def test_environments_without_snapshots_or_without_a_camera():
    class Forgetful:
        """The counting environment without snapshots."""

        def __init__(self) -> None:
            self._env = CountingEnv(2)
            self.spec, self.num_envs = replace(self._env.spec, can_snapshot=False), 2
            self.reset, self.step, self.close = self._env.reset, self._env.step, self._env.close

    env = rewarded(Forgetful(), ScriptedReward(course))
    assert not isinstance(env, Snapshots) and len(check_env(env)) == 7
    with pytest.raises(UserError, match="'point_mass' has no camera, so a reward model cannot evaluate it"):
        rewarded(make("point_mass", num_envs=1), ScriptedReward(course))


# -- the reward -----------------------------------------------------------------------------------------------------


def test_progress_is_rewarded_by_its_differences():
    env = counting(limit=2.0)
    env.reset(np.arange(3), LONG[:3])
    assert env.progress.tolist() == pytest.approx([0.1] * 3)
    step = env.step(zeros(env, 4))
    assert step.reward.tolist() == [pytest.approx([0.2, 0.3, -0.2, 0.0])] * 3
    step = env.step(zeros(env, 4))
    assert step.reward.tolist() == [pytest.approx([0.5, 0.1, 0.0, 0.0])] * 3 and not step.done.any()
    assert env.progress.tolist() == [1.0] * 3


def test_weights_of_progress_done_and_the_own_reward():
    """The sixth action reaches 1.0 and ends it; the environment's own reward is the number of the action."""
    env = counting(weights=RewardWeights(progress=2.0, done=5.0, env=10.0))
    env.reset(np.arange(3), LONG[:3])
    first, second = env.step(zeros(env, 4)), env.step(zeros(env, 4))
    assert first.reward.tolist() == [pytest.approx([10.4, 20.6, 29.6, 40.0])] * 3
    assert second.reward.tolist() == [pytest.approx([51.0, 65.2, 0.0, 0.0])] * 3


def test_an_episode_earns_its_progress_from_first_to_last():
    env, rng = rewarded(imagined_env(5), ScriptedReward(brightness, 2.0)), np.random.default_rng(0)
    obs = env.reset(np.arange(5), np.arange(5))
    first, total = brightness(obs.images["front"][:, None])[:, 0], np.zeros(5)
    for _ in range(4):
        step = env.step(random_actions(env, 3, rng))
        total += step.reward.sum(1)
    last = brightness(step.obs.images["front"][:, None])[:, 0]
    assert step.truncated.all() and np.abs(last - first).min() > 1e-4
    np.testing.assert_allclose(total, last - first, atol=1e-6)


def test_a_reset_starts_anew_and_leaves_other_rows_alone():
    env = counting(limit=2.0)
    env.reset(np.arange(3), LONG[:3])
    env.step(zeros(env, 5))
    env.reset([1], [LONG[5]])
    assert env.progress.tolist() == pytest.approx([0.9, 0.1, 0.9])
    assert env.step(zeros(env, 2)).reward.tolist() == [pytest.approx(r) for r in ([0.1, 0.0], [0.2, 0.3], [0.1, 0.0])]


def test_the_instruction_is_that_of_each_row():
    env = counting()
    env.reset(np.arange(3), [LONG[0], LONG[0] + 1, LONG[0]])
    texts = [env.spec.tasks[seed % 2] for seed in (LONG[0], LONG[0] + 1, LONG[0])]
    assert env.reward.texts == [texts]


# -- the ends of episodes ---------------------------------------------------------------------------------------------


def test_done_ends_an_episode_inside_a_chunk_and_the_row_idles():
    env = counting()
    env.reset([0, 1, 2], LONG[:3])
    env.step(zeros(env, 4))
    env.reset([2], LONG[3:4])
    step = env.step(zeros(env, 4), observe="all")
    assert step.valid.tolist() == [[True, True, False, False]] * 2 + [[True] * 4]
    assert step.terminated.tolist() == step.success.tolist() == [True, True, False] and not step.truncated.any()
    assert step.cause == ("success", "success", "") and step.obs.time.tolist() == [6, 6, 4]
    assert [frame.time.tolist() for frame in step.frames] == [[5, 5, 1], [6, 6, 2], [6, 6, 3], [6, 6, 4]]
    assert step.obs.images["audit"][:, 0, 0, 0].tolist() == [6, 6, 4]
    while not (later := env.step(zeros(env, 3))).done.all():  # until the environment's own time limit
        assert not later.valid[:2].any() and not later.reward[:2].any()
    for _ in range(5):
        later = env.step(zeros(env, 8))
    assert later.cause == ("success",) * 3 and not later.truncated.any() and later.obs.time.tolist() == [6, 6, 6]
    obs = env.reset([0], LONG[6:7])
    assert obs.time.tolist() == [0, 6, 6] and env.step(zeros(env, 1)).valid[:, 0].tolist() == [True, False, False]


def test_done_takes_as_many_frames_as_the_model_wants():
    """The sixth action and all after it reach the end; the fourth such frame is the first to be done."""
    env = counting(hold=4)
    env.reset(np.arange(3), LONG[:3])
    env.step(zeros(env, 7))
    env.reset([1], LONG[4:5])
    step = env.step(zeros(env, 8))
    assert step.obs.time.tolist() == [9, 8, 9] and step.terminated.tolist() == [True, False, True]
    step = env.step(zeros(env, 8))
    assert step.valid.sum(1).tolist() == [0, 1, 0] and step.terminated.all()


def test_the_output_for_repeated_frames_is_ignored():
    class Late(ScriptedReward):
        """Reports repeated frames as done."""

        def evaluate(self, frames, text, valid, state):
            output, state = super().evaluate(frames, text, valid, state)
            return replace(output, done=output.done | ~valid), state

    odd = [seed for seed in range(1, 500, 2) if episode_length(np.array(seed)) == 4][:2]
    env = rewarded(CountingEnv(2), Late(course))
    env.reset([0, 1], odd)
    step = env.step(zeros(env, 8))
    assert step.truncated.all() and not step.success.any() and step.cause == ("time_limit",) * 2


def test_done_at_the_time_limit_is_a_success():
    """Odd seeds of the counting environment are cut off, even ones succeed."""
    odd = next(seed for seed in range(1, 500, 2) if episode_length(np.array(seed)) == 6)
    short = next(seed for seed in range(1, 500, 2) if episode_length(np.array(seed)) == 4)
    even = next(seed for seed in range(0, 500, 2) if episode_length(np.array(seed)) == 4)
    env = counting(weights=RewardWeights(0.0, 1.0))
    env.reset(np.arange(3), [odd, short, even])
    step = env.step(zeros(env, 8))
    assert step.cause == ("success", "time_limit", "success") and step.valid.sum(1).tolist() == [6, 4, 4]
    assert step.terminated.tolist() == step.success.tolist() == [True, False, True]
    assert step.truncated.tolist() == [False, True, False]
    assert step.reward.sum(1).tolist() == [1.0, 0.0, 0.0]  # the model reports only one of the two successes


def test_what_was_executed_is_reported_up_to_the_end():
    class Helped(CountingEnv):
        """Every second action is an intervention; ``given`` is the received chunk."""

        def step(self, chunk, observe="last"):
            self.given = np.asarray(chunk).copy()
            step = super().step(chunk, observe)
            return replace(step, intervened=step.valid & (np.arange(step.valid.shape[1]) % 2 == 1))

    inner = Helped(2)
    env = rewarded(inner, ScriptedReward(course))
    env.reset([0, 1], LONG[:2])
    step = env.step(np.full((2, 8, 2), 3.0))
    assert step.executed[0].tolist() == [[3.0, 3.0]] * 6 + [[0.0, 0.0]] * 2
    assert step.intervened[0].tolist() == [False, True] * 3 + [False] * 2
    env.reset([1], LONG[3:4])
    wrong = np.full((2, 1, 2), 3.0)
    wrong[0] = np.nan  # counts in active environments only
    step = env.step(wrong)
    assert inner.given.tolist() == [[[0.0, 0.0]], [[3.0, 3.0]]] and step.valid[:, 0].tolist() == [False, True]
    for shape in ((2, 2), (1, 1, 2), (2, 1, 3), (2, 9, 2)):
        with pytest.raises(ContractError, match="nothing was executed"):
            env.step(np.zeros(shape))


class Failing(CountingEnv):
    """Even seeds end as a failure of the task instead of a success."""

    def step(self, chunk, observe="last"):
        step = super().step(chunk, observe)
        cause = tuple("dropped" if cause == "success" else cause for cause in step.cause)
        return replace(step, success=np.zeros_like(step.success), cause=cause)


def test_the_environments_failure_stays_a_failure():
    """Both episodes last six actions, with the sixth the model is done; only the cut-off one succeeds."""
    lengths = {odd: next(s for s in range(odd, 900, 2) if episode_length(np.array(s)) == 6) for odd in (0, 1)}
    env = rewarded(Failing(2), ScriptedReward(course), RewardWeights(0.0, 1.0))
    env.reset([0, 1], [lengths[0], lengths[1]])
    step = env.step(zeros(env, 8))
    assert step.cause == ("dropped", "success") and step.success.tolist() == [False, True]
    assert step.terminated.all() and step.reward.sum(1).tolist() == [0.0, 1.0]
    later = env.step(zeros(env, 2))
    assert later.cause == step.cause and later.success.tolist() == [False, True]


def test_without_success_the_model_says_how_a_termination_counts():
    inner = Failing(1)
    inner.spec = replace(inner.spec, success=None)
    env = rewarded(inner, ScriptedReward(course))
    env.reset([0], [next(s for s in range(0, 900, 2) if episode_length(np.array(s)) == 6)])
    assert env.step(zeros(env, 8)).cause == ("success",)


def test_an_environment_on_a_device_is_converted_to_numpy():
    """Its actions arrive on the device, and everything that it returns is on the host."""
    with elsewhere() as device:

        class Away(CountingEnv):
            def reset(self, env_ids, seeds):
                return moved(super().reset(env_ids, seeds))

            def step(self, chunk, observe="last"):
                assert chunk.device == device
                step = super().step(chunk.cpu().numpy(), observe).mapped(to_device)
                return replace(step, obs=moved(step.obs), frames=tuple(map(moved, step.frames)))

        def to_device(item):
            return torch.as_tensor(item).to(device)

        def moved(obs):
            images = {name: to_device(image) for name, image in obs.images.items()}
            return replace(
                obs, images=images, state=to_device(obs.state), task=to_device(obs.task), time=to_device(obs.time)
            )

        inner = Away(3)
        inner.spec = replace(inner.spec, device=str(device))
        env, host = rewarded(inner, ScriptedReward(course)), counting()
        assert env.spec.device == "cpu"
        for one in (env, host):
            one.reset(np.arange(3), LONG[:3])
        found, expected = env.step(zeros(env, 8), "all"), host.step(zeros(host, 8), "all")
        for name in ("reward", "valid", "terminated", "success", "executed"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert np.array_equal(found.frames[3].state, expected.frames[3].state) and found.cause == expected.cause


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_continues_in_another_environment():
    """With the model's state and the displayed frame of an environment that is done."""
    env = counting(hold=3)
    env.reset(np.arange(3), LONG[:3])
    env.step(zeros(env, 7))
    env.reset([1], LONG[4:5])
    env.step(zeros(env, 7))  # environments 0 and 2 are done after the first step, environment 1 after the next
    saved = env.snapshot([0, 1])
    assert {item.dtype.kind for item in saved.values()} <= set("biuf")
    expected = env.step(zeros(env, 7), observe="all")
    other = counting(hold=3)
    obs = other.restore([2, 0], saved)
    assert obs.time[[2, 0]].tolist() == [8, 7] and other.progress[[2, 0]].tolist() == [1.0, 1.0]
    other.reset([1], LONG[:1])
    found = other.step(zeros(other, 7), observe="all")
    for name in ("reward", "valid", "terminated", "truncated", "success", "executed"):
        assert np.array_equal(getattr(found, name)[[2, 0]], getattr(expected, name)[[0, 1]]), name
    assert np.array_equal(found.obs.images["audit"][[2, 0]], expected.obs.images["audit"][[0, 1]])
    assert found.obs.time[[2, 0]].tolist() == [8, 8] and found.valid[[2, 0]].sum(1).tolist() == [0, 1]


def test_a_snapshot_that_does_not_fit_changes_nothing():
    env = counting(limit=2.0)
    env.reset(np.arange(3), LONG[:3])
    env.step(zeros(env, 2))
    saved = env.snapshot([0, 1])
    env.step(zeros(env, 3))
    for wrong in (
        {name: item for name, item in saved.items() if name != "reward/count"},
        {name: item for name, item in saved.items() if name != "time"},
        saved | {"reward/other": np.zeros(2)},
    ):
        with pytest.raises(ContractError, match="nothing was restored"):
            env.restore([0, 1], wrong)
        assert env.progress.tolist() == pytest.approx([0.9] * 3)
    assert env.restore([0, 1], saved).time.tolist() == [2, 2, 5]
    assert env.step(zeros(env, 1)).reward[:, 0].tolist() == pytest.approx([-0.2, -0.2, 0.1])
