"""A latent model of decisions: losses by hand, and on a known system what it must come to know."""

from __future__ import annotations

import pytest
import torch

from vla_rl.contract.errors import UserError
from world_models.latent import LatentConfig, LatentModel

SIZES = {"state": 2, "time": 1}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(**config) -> LatentModel:
    torch.manual_seed(1)
    return LatentModel(SIZES, 2, LatentConfig(width=32, **config))


def decisions(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A point in a square moves by half the action; the reward is 1 right of 1, where the episode ends."""
    state = 2 * torch.rand(size, 2, generator=generator) - 1
    action = 2 * torch.rand(size, 2, generator=generator) - 1
    after = state + 0.5 * action
    ended = after[:, 0] > 1
    return {"state": state, "action": action, "after": after, "ended": ended, "reward": ended.float()}


def features(state: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"state": state, "time": torch.zeros(len(state), 1), "other": torch.ones(len(state), 5)}


def value(state: torch.Tensor) -> torch.Tensor:
    """Of a state: the nearer to the right, the better."""
    return 0.5 + 0.4 * state[:, 0]


def losses(model: LatentModel, batch: dict[str, torch.Tensor], **changed) -> dict[str, torch.Tensor]:
    given = {
        "features": features(batch["state"]),
        "action": batch["action"],
        "reward": batch["reward"],
        "ended": batch["ended"],
        "next_features": features(batch["after"]),
        "value": value(batch["state"]),
        "next_value": value(batch["after"]),
    }
    return model.losses(**given | changed)


def trained(steps: int = 600, **config) -> LatentModel:
    model, generator = made(lr=1e-3, **config), seeded(2)
    model.calibrate(features(decisions(2000, generator)["state"]))
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model.total(losses(model, decisions(128, generator))).backward()
        optimizer.step()
        model.update_slow_encoder()
    return model


@pytest.fixture(scope="module")
def model() -> LatentModel:
    return trained()


@pytest.mark.full
@torch.no_grad()
def test_it_scores_decisions_as_the_system_does(model):
    """Reward and end where it ends, the value of the state that is reached elsewhere."""
    batch = decisions(2000, seeded(9))
    score = model.score(features(batch["state"]), batch["action"], 0.9)
    truth = torch.where(batch["ended"], 1.0, 0.9 * value(batch["after"]))
    assert (score - truth).abs().mean() < 0.05
    spread = (score - truth).square().mean() / truth.var()
    assert spread < 0.1
    found = model.predict(model.encoder(features(batch["state"])), batch["action"])
    assert found.latent.shape == (4, 2000, 32) and found.reward.shape == found.end.shape == (4, 2000)
    assert found.end[:, batch["ended"]].mean() > 0.7 > 0.2 > found.end[:, ~batch["ended"]].mean()


@pytest.mark.full
@torch.no_grad()
def test_it_picks_the_decision_that_leads_to_the_better_state(model):
    state = decisions(500, seeded(11))["state"] * 0.4
    right, left = torch.tensor([[1.0, 0.0]]).expand(500, 2), torch.tensor([[-1.0, 0.0]]).expand(500, 2)
    better = model.score(features(state), right, 0.9) > model.score(features(state), left, 0.9)
    assert better.float().mean() > 0.98


def test_losses_by_hand():
    model, batch = made(members=2), decisions(16, seeded(3))
    assert batch["ended"].any() and not batch["ended"].all()
    found = losses(model, batch)
    with torch.no_grad():
        latent = model.encoder(features(batch["state"]))
        target = model.slow_encoder(features(batch["after"]))
        apart, reward, end, reached = [], [], [], []
        for member in model.members:
            out = member(torch.cat([latent, batch["action"]], -1))
            after = torch.nn.functional.layer_norm(latent + out[:, :32], (32,))
            goes_on = ~batch["ended"]
            apart.append(((after - target) ** 2).mean(-1)[goes_on].sum() / 16)
            reward.append(((out[:, 32] - batch["reward"]) ** 2).mean())
            logit = out[:, 33]
            end.append(torch.nn.functional.binary_cross_entropy_with_logits(logit, batch["ended"].float()))
            reached.append(((model.value(after) - value(batch["after"])) ** 2)[goes_on].sum() / 16)
        own = ((model.value(latent) - value(batch["state"])) ** 2).mean()
    means = {name: torch.stack(item).mean() for name, item in {"apart": apart, "reward": reward, "end": end}.items()}
    torch.testing.assert_close(found["self_prediction"].detach(), means["apart"])
    torch.testing.assert_close(found["reward"].detach(), means["reward"])
    torch.testing.assert_close(found["end"].detach(), means["end"])
    torch.testing.assert_close(found["value"].detach(), own + torch.stack(reached).mean())
    weights = LatentConfig(width=32, self_prediction=2.0, reward=3.0, end=5.0, value=7.0)
    model.config = weights
    expected = sum(getattr(weights, name) * item for name, item in found.items())
    torch.testing.assert_close(model.total(found), expected)


def test_what_follows_an_end_does_not_matter():
    model, batch = made(), decisions(16, seeded(3))
    other = batch["after"].clone()
    other[batch["ended"]] = torch.nan_to_num(other[batch["ended"]]) + 100
    one, two = losses(model, batch), losses(model, batch, next_features=features(other))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_no_gradient_reaches_the_targets_and_the_slow_encoder_follows():
    model, batch = made(tau=0.5), decisions(16, seeded(3))
    model.total(losses(model, batch)).backward()
    assert all(one.grad is None for one in model.slow_encoder.parameters())
    assert all(one.grad is not None for one in model.encoder.parameters())
    with torch.no_grad():
        for one in model.encoder.parameters():
            one.add_(1.0)
    before = [one.clone() for one in model.slow_encoder.parameters()]
    model.update_slow_encoder()
    for old, new, present in zip(before, model.slow_encoder.parameters(), model.encoder.parameters(), strict=True):
        torch.testing.assert_close(new, (old + present) / 2)


def test_inputs_are_standardised_and_only_those_that_were_named():
    model = made()
    state = torch.randn(500, 2, generator=seeded(4)) * torch.tensor([3.0, 0.01]) + 7
    model.calibrate(features(state))
    torch.testing.assert_close(model.encoder.mean[:2], state.mean(0))
    assert torch.equal(model.encoder.std, model.slow_encoder.std)
    assert model.encoder.std[2] == pytest.approx(0.01), "a constant is not divided by 0"
    changed = features(state) | {"other": torch.full((500, 5), 9.0)}
    assert torch.equal(model.encoder(changed), model.encoder(features(state)))


def test_numbers_without_a_meaning_are_refused():
    for wrong in ({"members": 0}, {"tau": 2.0}, {"reward": -1.0}, {"lr": 0.0}):
        with pytest.raises(UserError, match=f"LatentConfig.{next(iter(wrong))}"):
            LatentConfig(**wrong)
