"""The diffusion transformer: its preconditioning is the right one, its latents are its own, and it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.world_models import pushing
from tests.world_models.small_models import spec
from tests.world_models.test_backbones import ACTION_WIDTH, CONTEXT, DIT, FRAMES, MAPS, call, numbers, random_pictures
from tests.world_models.test_model import FIT, distance, fitted, predicted, windows
from vla_rl.contract.errors import UserError
from world_models.backbones.dit import DiT, preconditioned
from world_models.config import WorldModelConfig
from world_models.model import WorldModel

STEPS = 3


def fresh(**sizes) -> DiT:
    torch.manual_seed(0)
    return replace(DIT, **sizes).build((3, 16, 16), CONTEXT, FRAMES, ACTION_WIDTH, MAPS)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_the_network_learns_unit_variance_and_guesses_linearly(level, spread):
    """Against 400,000 samples: regression of the change on what is left when the latest frame is taken away."""
    generator = torch.Generator().manual_seed(3)
    change, noise = (torch.randn(400_000, generator=generator, dtype=torch.float64) for _ in range(2))
    change = spread * change
    left = (1.0 - level) * change + level * noise
    enter, skip, out = (float(item) for item in preconditioned(torch.tensor(level, dtype=torch.float64), spread))
    assert (enter * left).std() == pytest.approx(1.0, abs=0.01)
    assert skip == pytest.approx(float((left * change).mean() / left.square().mean()), abs=0.01)
    assert ((change - skip * left) / out).std() == pytest.approx(1.0, abs=0.01)


def test_at_first_it_guesses_what_is_likeliest():
    video = fresh(spread=0.4)
    given = numbers(video)
    given["level"][:] = torch.tensor([1.0, 0.25])
    guess = call(video, given).clean
    latest = given["frames"][:, -1]
    assert torch.equal(guess[:, 0], latest)  # from nothing but noise: the latest frame
    kept = 0.75 * 0.16 / (0.75**2 * 0.16 + 0.25**2)  # Gaussian posterior of x = l + d, d ~ N(0, 0.16), by hand
    expected = latest + kept * (given["noisy"][:, 1] - 0.75 * latest)
    torch.testing.assert_close(guess[:, 1], expected, rtol=1e-5, atol=1e-5)


def test_latents_have_a_scale_that_no_weights_can_change():
    video = fresh()
    shown = random_pictures(1, 6)
    for _ in range(2):
        latents = video.encode(shown)
        torch.testing.assert_close(latents.square().mean(1), torch.ones(6, 4, 4), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(video.decode(3.0 * latents), video.decode(latents), rtol=1e-4, atol=1e-4)
        for parameter in video.autoencoder.parameters():
            parameter.data.mul_(1.7)


@pytest.mark.parametrize(
    ("sizes", "what"), [({"fold": 3}, "cannot be folded"), ({"fold": 1}, "folded"), ({"heads": 5}, "shared by 5 heads")]
)
def test_sizes_that_do_not_fit_are_refused(sizes, what):
    with pytest.raises(UserError, match=what):
        fresh(**sizes)


@pytest.fixture(scope="module")
def world() -> WorldModel:
    torch.manual_seed(0)
    return WorldModel(spec(), WorldModelConfig(STEPS, backbone=DIT))


def test_latents_learn_from_reconstruction_alone(world, monkeypatch):
    batch, generator = windows(world, pushing.played(3, seed=2)), torch.Generator().manual_seed(1)
    loss, parts = world.loss(batch, generator)
    assert parts["latents"] > 0
    loss.backward()
    lens = world.video.autoencoder
    assert lens.inward[-1].weight.grad.abs().sum() > 0 and lens.outward[0].weight.grad.abs().sum() > 0
    world.zero_grad()
    monkeypatch.setattr(world.video, "reconstruction", lambda pictures: torch.zeros(()))
    world.loss(batch, generator)[0].backward()
    assert all(p.grad is None or not p.grad.any() for p in lens.parameters())
    world.zero_grad()


@pytest.mark.full
def test_it_learns_to_predict_a_moving_square():
    """Autoencoder and transformer together; copying the latest picture is what has to be beaten."""
    made = fitted(FIT, replace(DIT, lens=24, width=48, heads=4))
    batch, context = windows(made, pushing.played(40, seed=2)), made.config.context_frames
    came, latest = batch["pictures"][:, context + STEPS], batch["pictures"][:, context]
    error = distance(predicted(made, batch).pictures[:, -1], came).mean()
    assert error < 0.5 * distance(latest, came).mean()
    other = batch | {"actions": batch["actions"].flip(0)}
    assert distance(predicted(made, other).pictures[:, -1], came).mean() > 2.0 * error
