"""The diffusion transformer: its preconditioning is the right one, its latents are its own, and it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.world_models import moving_square as square
from tests.world_models.test_backbones import DIT, FRAMES, MAPS, MEMORY, TOLD, call, numbers, some_pictures
from vla_rl.contract.errors import UserError
from world_models.backbones.dit import DiT, preconditioned
from world_models.model import WorldConfig, WorldModel


def fresh(**sizes) -> DiT:
    torch.manual_seed(0)
    return replace(DIT, **sizes).build((3, 16, 16), MEMORY, FRAMES, TOLD, MAPS)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_the_network_sees_and_learns_unit_variance_and_its_zero_is_the_best_linear_guess(level, spread):
    """Against 400,000 samples: regression of the change on what is left when the latest frame is taken away."""
    some = torch.Generator().manual_seed(3)
    change, noise = (torch.randn(400_000, generator=some, dtype=torch.float64) for _ in range(2))
    change = spread * change
    left = (1.0 - level) * change + level * noise
    enter, skip, out = (float(item) for item in preconditioned(torch.tensor(level, dtype=torch.float64), spread))
    assert (enter * left).std() == pytest.approx(1.0, abs=0.01)
    assert skip == pytest.approx(float((left * change).mean() / left.square().mean()), abs=0.01)
    assert ((change - skip * left) / out).std() == pytest.approx(1.0, abs=0.01)


def test_at_first_it_guesses_what_is_likeliest_without_having_learnt_anything():
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
    shown = some_pictures(1, 6)
    for _ in range(2):
        latents = video.encode(shown)
        torch.testing.assert_close(latents.square().mean(1), torch.ones(6, 4, 4), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(video.decode(3.0 * latents), video.decode(latents), rtol=1e-4, atol=1e-4)
        for parameter in video.autoencoder.parameters():
            parameter.data.mul_(1.7)


@pytest.mark.parametrize(("fold", "picture"), [(3, (3, 12, 12)), (1, (3, 16, 16)), (8, (3, 16, 20))])
def test_pictures_that_do_not_fold_are_refused(fold, picture):
    with pytest.raises(UserError, match="cannot be folded"):
        replace(DIT, fold=fold).build(picture, MEMORY, FRAMES, TOLD, MAPS)


def test_heads_that_cannot_share_are_refused():
    with pytest.raises(UserError, match="cannot be shared by 5 heads"):
        fresh(heads=5)


def world(seed: int = 0) -> WorldModel:
    torch.manual_seed(seed)
    backbone = replace(DIT, lens=24, width=48, heads=4)
    sizes = {"frames": square.FRAMES, "memory": square.MEMORY, "maps": 2}
    return WorldModel(square.SPEC, WorldConfig(backbone=backbone, **sizes))


def test_latents_learn_from_reconstruction_alone(monkeypatch):
    made, some = world(), torch.Generator().manual_seed(1)
    loss, parts = made.loss(square.windows(4, some), some)
    assert parts["latents"] > 0
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.video.autoencoder.outward.parameters())
    made.zero_grad()
    monkeypatch.setattr(made.video, "reconstruction", lambda pictures: torch.zeros(()))
    made.loss(square.windows(4, some), some)[0].backward()
    assert all(p.grad is None or not p.grad.any() for p in made.video.autoencoder.parameters())


def test_it_learns_where_a_square_goes():
    """Autoencoder and transformer together, by the world model's own loss; copying the latest picture must be beaten."""
    made, some = world(), torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(made.parameters(), 3e-3)
    for _ in range(STEPS):
        loss, _ = made.loss(square.windows(32, some), some)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    now, actions, known, came = square.first_call(square.windows(128, torch.Generator().manual_seed(2)))
    noise = torch.randn(128, square.FRAMES, *made.video.latent, generator=torch.Generator().manual_seed(3))
    shown = made.predict(now, actions, known, noise).pictures[:, -1]
    assert square.error(shown, came) < SHARE * square.error(now.pictures[:, -1], came)
    other = made.predict(now, -actions, known, noise).pictures[:, -1]
    assert square.error(other, came) > 2.0 * square.error(shown, came)
