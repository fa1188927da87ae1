"""A head for rewards: what it learns of a toy with a dense reward, and what imagined rollouts are paid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.world_models.pushing import played
from tests.world_models.small_models import initial_states, model, spec
from tests.world_models.test_env import random_actions
from tests.world_models.test_model import FIT, FRAMES, UNET, predicted, windows
from vla_rl.contract.check import check_env
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import UserError
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.training.fit import FitConfig
from vla_rl.training.world_model import (
    WorldModelFit,
    fit_world_model,
    load_world_model,
    save_world_model,
    statistics,
)
from world_models.config import (
    ImaginationConfig,
    Limits,
    PredictedReward,
    RewardHeadConfig,
    SuccessReward,
    WorldModelConfig,
)
from world_models.env import ImaginedEnv
from world_models.model import WorldModel

HEAD = RewardHeadConfig()
BRIEF = WorldModelFit(*[FitConfig(steps=2, batch=4)] * 4)


def seen_alone(trajectories: Trajectories) -> Trajectories:
    """The same episodes without proprioception: where the square is can be seen and is not among the numbers."""
    return replace(trajectories, state=trajectories.state[:, :0])


def rewards_of(made: WorldModel, batch: dict[str, torch.Tensor], known: int = FRAMES) -> torch.Tensor:
    reward = predicted(made, batch, known).reward
    assert reward is not None
    return reward


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


EPISODES = 40


@pytest.fixture(scope="module")
def begun() -> WorldModel:
    """It has hardly learnt."""
    return taught(EPISODES, FitConfig(2, 8))


@pytest.fixture(scope="module")
def learnt() -> WorldModel:
    return taught(300, FIT.video)


def taught(episodes: int, video: FitConfig) -> WorldModel:
    torch.manual_seed(0)
    trajectories = seen_alone(played(episodes, seed=1))
    config = WorldModelConfig(FRAMES, FRAMES, robot_crop=0, backbone=UNET, reward=HEAD)
    blind = replace(spec(), state=ArraySpec((0,), "float32", (), ()))
    made, brief = WorldModel(blind, config, *statistics(trajectories)), FitConfig(2, 8)
    fit = WorldModelFit(brief, brief, video, brief)
    fit_world_model(made, trajectories, fit, torch.Generator().manual_seed(1))
    return made.eval()


@pytest.mark.full
def test_rewards_of_new_episodes_are_predicted_from_what_is_seen(learnt):
    """Of every control step and of whole calls, in the environment's units; a constant leaves the whole variance.

    From the pictures of other episodes, under the same actions, they are not.
    """
    batch = windows(learnt, seen_alone(played(150, seed=2)))
    reward, guess = batch["reward"][:, :FRAMES], rewards_of(learnt, batch)
    assert correlation(guess, reward) > 0.75 and correlation(guess.sum(1), reward.sum(1)) > 0.85
    assert (guess - reward).square().mean() < 0.4 * reward.var()
    others = rewards_of(learnt, dict(batch, pictures=batch["pictures"].flip(0)))
    assert correlation(others, reward) < 0.5


def test_unknown_actions_earn_nothing_and_change_no_reward(begun):
    batch = windows(begun, seen_alone(played(20, seed=3)))
    other = dict(batch, actions=batch["actions"].clone())
    other["actions"][:, 2:] = 0.3
    one, two = rewards_of(begun, batch, 2), rewards_of(begun, other, 2)
    assert torch.equal(one, two) and one[:, :2].all() and not one[:, 2:].any()


def test_the_loss_is_the_error_of_the_known_actions_rewards(begun):
    """In units of the variance that was recorded; a reward beyond the known actions does not count."""
    head, batch = begun.reward, windows(begun, seen_alone(played(20, seed=3)))
    count, known = len(batch["task"]), torch.full((len(batch["task"]),), 2)
    cells = begun.video.latent[1] * begun.video.latent[2]
    chooser = torch.Generator().manual_seed(0)
    features = torch.randn(count, cells, begun.video.width, generator=chooser)
    call = torch.zeros(count, 1), torch.zeros(count, FRAMES, 1), batch["actions"][:, :FRAMES]
    reward = batch["reward"][:, :FRAMES].clone()
    with torch.no_grad():
        error = (head.predict(features, call, batch["task"], known) - reward)[:, :2].square().mean() / head.std**2
        reward[:, 2] = 1e9
        torch.testing.assert_close(head.loss(features, call, batch["task"], known, reward), error)


def test_the_scale_of_rewards_is_kept_in_the_checkpoint(begun, tmp_path):
    """A model that is trained further means the same by what its head says."""
    rewards = played(EPISODES, seed=1).recorded_rewards()
    assert float(begun.reward.mean) == pytest.approx(rewards.mean(), abs=1e-5)
    assert float(begun.reward.std) == pytest.approx(rewards.std(), abs=1e-5)
    save_world_model(begun, tmp_path / "world")
    again, _ = load_world_model(tmp_path / "world", begun.spec)
    assert again.config.reward == HEAD and bool(again.reward.fitted)
    again.reward.fit(torch.full((4,), 1e6))
    fresh = model(reward=HEAD).reward
    fresh.fit(torch.full((4,), -2.0))  # equal ones have a scale all the same
    assert float(fresh.mean) == -2.0 and float(fresh.std) == 1.0
    batch = windows(begun, seen_alone(played(20, seed=3)))
    assert torch.equal(rewards_of(again, batch), rewards_of(begun, batch))


def test_without_the_head_all_else_is_the_same_bit_for_bit():
    """The head is made last and draws nothing in training: what else is learnt from a batch has the same loss."""
    config, pair = model().config, []
    for reward in (None, HEAD):
        torch.manual_seed(0)
        pair.append(WorldModel(spec(), replace(config, reward=reward)))
    plain, headed = pair
    weights, more = plain.state_dict(), headed.state_dict()
    assert all(torch.equal(item, more[name]) for name, item in weights.items())
    assert all(name.startswith("reward.") for name in more.keys() - weights.keys()) and len(more) > len(weights)
    batch = windows(plain, played(20, seed=3))
    losses = [made.loss(batch, torch.Generator().manual_seed(1))[1] for made in (plain, headed)]
    assert losses[1].keys() - losses[0].keys() == {"reward"} and losses[1].items() >= losses[0].items()
    unrewarded = {name: item for name, item in batch.items() if name != "reward"}
    assert plain.loss(unrewarded, torch.Generator().manual_seed(1))[1] == losses[0]


def test_episodes_without_rewards_teach_no_head():
    """Before anything is trained; a model without one learns from them."""
    episodes = played(12, seed=1)
    unrewarded = episodes.select([0, 1, 2])
    mixed = Trajectories.joined([replace(unrewarded, reward=np.full_like(unrewarded.reward, np.nan)), episodes])
    made = model(reward=HEAD)
    with pytest.raises(UserError, match=r"3 of 15 episodes have no rewards recorded.*collect them again.*plan\.model"):
        fit_world_model(made, mixed, BRIEF, torch.Generator().manual_seed(0))
    fit_world_model(model(), mixed, BRIEF, torch.Generator().manual_seed(0))


# -- what imagined rollouts are paid -----------------------------------------------------------------------------------


def paid_env(num_envs: int = 6, limits: Limits | None = None, **numbers: object) -> ImaginedEnv:
    made = model(reward=HEAD)
    numbers = {"success_threshold": 2.0, "failure_threshold": 2.0, "reward": PredictedReward(), **numbers}
    config = ImaginationConfig(horizon=12, batch_size=4, **numbers)  # type: ignore[arg-type]
    return ImaginedEnv(made, initial_states(made), num_envs, limits, config)


def calls_of(env: ImaginedEnv) -> list[torch.Tensor]:
    """What the model will predict of rewards [R,F], call by call."""
    rewards: list[torch.Tensor] = []
    predict = env.model.predict

    def note(*given: torch.Tensor):
        future = predict(*given)
        rewards.append(future.reward)
        return future

    env.model.predict = note  # type: ignore[method-assign]
    return rewards


def test_a_complete_call_is_paid_what_the_head_says():
    """The sum over its actions, also over the two that are left when time is up."""
    env, env_ids = paid_env(3, deadline=5), np.arange(3)
    rewards = calls_of(env)
    env.reset(env_ids, env_ids)
    step = env.step(random_actions(env, 5, np.random.default_rng(0)))
    assert len(rewards) == 2 and rewards[0][:3].abs().min() > 0 and not rewards[1][:, 2].any()
    np.testing.assert_allclose(step.reward[:, [2, 4]], torch.stack([one[:3].sum(1) for one in rewards], 1), rtol=1e-6)
    assert not step.reward[:, [0, 1, 3]].any() and set(step.cause) == {"too_late"}


@pytest.mark.full
def test_a_paid_rollout_keeps_the_contract_of_a_simulator():
    """Rewards do not depend on how an episode is cut into chunks, on what is observed or on a snapshot in between."""
    env = paid_env(success_threshold=0.6, failure_threshold=0.6, deadline=9)
    check_env(env, seed=11)
    env_ids, rewards = np.arange(6), []
    for chunk in (1, 2, 6):
        env.reset(env_ids, env_ids)
        actions = random_actions(env, 6, np.random.default_rng(1))
        steps = [env.step(actions[:, first : first + chunk], "all") for first in range(0, 6, chunk)]
        rewards.append(np.concatenate([step.reward for step in steps], 1))
    assert rewards[0].any() and all(np.array_equal(one, rewards[0]) for one in rewards)


def test_success_ends_a_paid_rollout_and_earns_what_is_said():
    """Without the wish it earns 1."""
    env_ids = np.arange(6)
    for reward in (PredictedReward(), SuccessReward()):
        env = paid_env(success_threshold=0.0, reward=reward)
        rewards = calls_of(env)
        env.reset(env_ids, env_ids)
        step = env.step(random_actions(env, 3, np.random.default_rng(5)))
        assert set(step.cause) == {"success"} and step.terminated.all()
        said = torch.cat([rewards[0], rewards[1][:2]]).sum(1).numpy()
        wanted = said if isinstance(reward, PredictedReward) else np.ones(6)
        np.testing.assert_allclose(step.reward[:, 2], wanted, rtol=1e-6)
    env = paid_env(6, limits=Limits((-1.0,) * 4))  # an uncertain call earns nothing
    env.reset(env_ids, env_ids)
    step = env.step(random_actions(env, 3, np.random.default_rng(5)))
    assert set(step.cause) == {"uncertainty"} and not step.reward.any() and not env.earned.any()


def test_a_reward_that_nobody_predicts_is_refused():
    made = model()
    with pytest.raises(UserError, match=r"has no head for rewards.*train one with plan\.model\.reward"):
        ImaginedEnv(made, initial_states(made), 2, None, ImaginationConfig(reward=PredictedReward()))
