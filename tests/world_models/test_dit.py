"""The diffusion transformer: its preconditioning is the right one, its latents are its own, and it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.world_models import pushing
from tests.world_models.test_backbones import ACTION_WIDTH, CONTEXT, DIT, FRAMES, MAPS, call, numbers, random_pictures
from vla_rl.contract.errors import UserError
from vla_rl.experience.demonstrations import make_sequences, sequence_batch
from world_models.backbones import ActionInput, ContextLatents
from world_models.backbones.dit import DiT, preconditioned
from world_models.config import WorldModelConfig
from world_models.model import WorldModel

STEPS, LEARNING, RATE, SHARE = 3, 200, 4e-3, 0.5


def fresh(**sizes) -> DiT:
    torch.manual_seed(0)
    return replace(DIT, **sizes).build((3, 16, 16), CONTEXT, FRAMES, ACTION_WIDTH, MAPS)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_the_network_sees_and_learns_unit_variance_and_its_zero_is_the_best_linear_guess(level, spread):
    """Against 400,000 samples: regression of the change on what is left when the latest frame is taken away."""
    generator = torch.Generator().manual_seed(3)
    change, noise = (torch.randn(400_000, generator=generator, dtype=torch.float64) for _ in range(2))
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
    shown = random_pictures(1, 6)
    for _ in range(2):
        latents = video.encode(shown)
        torch.testing.assert_close(latents.square().mean(1), torch.ones(6, 4, 4), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(video.decode(3.0 * latents), video.decode(latents), rtol=1e-4, atol=1e-4)
        for parameter in video.autoencoder.parameters():
            parameter.data.mul_(1.7)


@pytest.mark.parametrize(("fold", "picture"), [(3, (3, 12, 12)), (1, (3, 16, 16)), (8, (3, 16, 20))])
def test_pictures_that_do_not_fold_are_refused(fold, picture):
    with pytest.raises(UserError, match="cannot be folded"):
        replace(DIT, fold=fold).build(picture, CONTEXT, FRAMES, ACTION_WIDTH, MAPS)


def test_heads_that_cannot_share_are_refused():
    with pytest.raises(UserError, match="cannot be shared by 5 heads"):
        fresh(heads=5)


@pytest.fixture(scope="module")
def world() -> WorldModel:
    torch.manual_seed(0)
    return WorldModel(pushing.world(), WorldModelConfig(STEPS, backbone=DIT))


def held_out(made: WorldModel, count: int) -> dict[str, torch.Tensor]:
    trajectories = pushing.played(count, seed=2)
    table = make_sequences(trajectories, STEPS, made.config.context_frames)
    whole = np.flatnonzero(table["count"] >= STEPS)
    return {name: torch.from_numpy(item) for name, item in sequence_batch(trajectories, table, whole).items()}


def test_latents_learn_from_reconstruction_alone(world, monkeypatch):
    batch, generator = held_out(world, 3), torch.Generator().manual_seed(1)
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


def windows_of(count: int, seed: int) -> dict[str, torch.Tensor]:
    """Whole calls: pictures float [R,1+M+F,C,h,w], and the ``ActionInput`` of actions and the square's positions."""
    trajectories = pushing.played(count, seed)
    table = make_sequences(trajectories, STEPS, CONTEXT - 1)
    table = {
        name: torch.from_numpy(item)
        for name, item in sequence_batch(trajectories, table, np.flatnonzero(table["count"] >= STEPS)).items()
    }
    positions = table["state"][:, 1 : 1 + STEPS]
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, 4) for _ in range(2)), indexing="ij")
    far = (x - positions[..., 0, None, None]).square() + (y - positions[..., 1, None, None]).square()
    shown = table["pictures"][:, : CONTEXT + STEPS].float() / 127.5 - 1.0
    vector = torch.cat([table["actions"][:, :STEPS], positions], -1)
    return {"shown": shown, "vector": vector, "map": torch.exp(-4.0 * far)[:, :, None]}


def step(video: DiT, batch: dict[str, torch.Tensor], level: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The loss of rectified flow and of the autoencoder at noise ``level`` [R]."""
    latents = video.encode(batch["shown"])
    context, clean = ContextLatents(latents[:, :CONTEXT], torch.zeros(len(level), CONTEXT)), latents[:, CONTEXT:]
    share = level[:, None, None, None, None]
    noisy = (1.0 - share) * clean + share * torch.randn(clean.shape, generator=generator)
    guess = video(noisy, level[:, None].expand(-1, STEPS), context, ActionInput(batch["vector"], batch["map"]))
    return (guess.clean - clean).square().mean() + video.reconstruction(batch["shown"][:, -1])


@torch.no_grad()
def imagined(video: DiT, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last picture, in two denoising steps."""
    context = ContextLatents(video.encode(batch["shown"][:, :CONTEXT]), torch.zeros(len(batch["shown"]), CONTEXT))
    moves = ActionInput(batch["vector"], batch["map"])
    noisy = torch.randn(len(batch["shown"]), STEPS, *video.latent, generator=torch.Generator().manual_seed(3))
    whole = torch.ones(noisy.shape[:2])
    first = video(noisy, whole, context, moves).clean
    return video.decode(video(0.5 * (first + noisy), 0.5 * whole, context, moves).clean[:, -1])


@pytest.mark.full
def test_it_learns_to_predict_a_moving_square():
    """Autoencoder and transformer together, from noise to pictures; copying the latest one is what has to be beaten."""
    torch.manual_seed(0)
    video = replace(DIT, lens=24, width=48, heads=4).build((3, 16, 16), CONTEXT, STEPS, 5, 1)
    batch, held, generator = windows_of(120, seed=1), windows_of(30, seed=2), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(video.parameters(), RATE)
    for _ in range(LEARNING):
        index = torch.randint(len(batch["shown"]), (32,), generator=generator)
        level = torch.rand(32, generator=generator).clamp_min(0.2)
        optimizer.zero_grad()
        step(
            video, {name: item[index] for name, item in batch.items()}, (2.0 * level).clamp_max(1.0), generator
        ).backward()
        optimizer.step()
    came, latest = held["shown"][:, -1], held["shown"][:, CONTEXT - 1]
    error = (imagined(video, held) - came).square().mean()
    assert error < SHARE * (latest - came).square().mean()
    other = held | {"vector": held["vector"].flip(0), "map": held["map"].flip(0)}
    assert (imagined(video, other) - came).square().mean() > 2.0 * error
