"""The trainer of a latent model: single decisions in the replay's shares, values of the critics, finite losses only."""

from __future__ import annotations

import pytest
import torch

from sims.catalog import make
from tests.recipes.test_few_uses import GAMMA, learner, residual, seeded
from vla_rl.contract.errors import NonFiniteError
from vla_rl.experience.mixture import Mixture
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.training.latent_model import LatentModelTrainer, one_decision_ahead
from world_models.latent import LatentConfig, LatentModel


def filled(n_step: int, seed: int = 300) -> Replay:
    replay = Replay(500, GAMMA, n_step)
    source = RolloutSource(make("point_mass", num_envs=4), residual(), 10, SeedStream(seed, 10**9), seeded(1))
    replay.add(source.next())
    return replay


def test_decisions_are_single_whatever_the_buffer_looks_ahead():
    far, near = filled(3), filled(1)
    found, expected = one_decision_ahead(far, 200, seeded(4)), one_decision_ahead(near, 200, seeded(4))
    assert torch.equal(found.reward, expected.reward) and torch.equal(found.discount, expected.discount)
    for name, item in expected.next_features.items():
        assert torch.equal(found.next_features[name], item)
    assert not torch.equal(far.transitions(far.decisions()).discount, near.transitions(near.decisions()).discount)


def test_batches_have_the_shares_of_the_replay():
    parts = {"online": filled(2, 300), "demonstrations": filled(2, 900)}
    mixture = Mixture(parts, {"online": 0.75, "demonstrations": 0.25})
    found = one_decision_ahead(mixture, 80, seeded())
    recorded = {tuple(one.tolist()) for one in parts["demonstrations"].columns["features/state"]}
    assert sum(tuple(one.tolist()) in recorded for one in found.features["state"]) == 20


class Noting:
    """A model that notes what it is shown."""

    def __init__(self, factor: float = 1.0) -> None:
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.factor, self.calls, self.calibrated = factor, [], 0

    def calibrate(self, features) -> None:
        self.calibrated += 1

    def losses(self, features, action, reward, ended, next_features, value, next_value):
        self.calls.append((features, action, reward, ended, next_features, value, next_value))
        return {"value": self.weight * self.factor}

    def total(self, losses):
        return losses["value"]

    def update_slow_encoder(self) -> None:
        self.calls.append("slow")


def test_values_are_those_of_the_critics_for_the_actor():
    policy = residual()
    td3 = learner(policy)
    torch.nn.init.normal_(td3.critic.last.weight)
    model = Noting()
    trainer = LatentModelTrainer(model, [model.weight], policy, td3.critic, 0.1, seeded(3))
    replay = filled(2)
    assert trainer.step(replay, 32) == {"model/value": 1.0} and trainer.step(replay, 32)["model/value"] < 1
    assert model.calibrated == 1 and model.calls[1] == "slow"
    features, action, reward, ended, next_features, value, next_value = model.calls[0]
    for known, found in ((features, value), (next_features, next_value)):
        expected = td3.critic(known, policy.rsample(known, seeded()).action).mean(0)
        torch.testing.assert_close(found, expected.detach())
    assert action.shape == (32, policy.corrections) and ended.dtype == torch.bool
    assert torch.equal(ended, reward > 0) or ended.any() or (reward <= 1).all()


def test_a_loss_that_is_not_finite_moves_nothing():
    model = Noting(float("nan"))
    trainer = LatentModelTrainer(model, [model.weight], residual(), learner(residual()).critic, 0.1, seeded(3))
    with pytest.raises(NonFiniteError, match="latent model is not finite at step 0"):
        trainer.step(filled(2), 8)
    assert model.weight == 1 and trainer.steps == 0


def test_it_learns_what_decisions_of_a_real_environment_lead_to():
    policy = residual()
    td3 = learner(policy)
    torch.manual_seed(0)
    model = LatentModel({**policy.feature_sizes, "time": 1}, policy.corrections, LatentConfig(width=32))
    trainer = LatentModelTrainer(model, list(model.parameters()), policy, td3.critic, 3e-3, seeded(3))
    replay = filled(2)
    losses = [trainer.step(replay, 32) for _ in range(60)]
    assert losses[-1]["model/self_prediction"] < 0.5 * losses[0]["model/self_prediction"]
    assert losses[-1]["model/reward"] < losses[0]["model/reward"]
