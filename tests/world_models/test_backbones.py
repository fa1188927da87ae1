"""Properties of every video model on latents; and the U-Net, which mixes pixels of its frames with new colours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.world_models.small_models import SMALL, initial_states, model
from vla_rl.contract.check import check_env
from world_models.backbones import ActionInput, ContextLatents
from world_models.backbones.dit import DiTConfig
from world_models.backbones.wan import Lora, WanConfig
from world_models.config import ImaginationConfig
from world_models.env import ImaginedEnv

CONTEXT, FRAMES, BATCH, ACTION_WIDTH, MAPS = 3, 2, 8, 7, 4
# A kernel may sum the same terms in another order when the batch has another shape.  In float32 these networks then
# differ by up to 2e-4, which is 3e3 units of rounding (6e-8); as many units of float64 (1.1e-16) are 3e-13.  A row that
# reads its neighbour differs by more than 1e-4.  1e-9 is far from both.
ROUNDING = {"rtol": 1e-9, "atol": 1e-9}
DIT = DiTConfig(fold=4, channels=8, lens=16, width=32, depth=2, heads=2)
CONFIGS = {"dit": DIT, "wan": WanConfig(lora=None, width=32), "wan with LoRA": WanConfig(lora=Lora(rank=2), width=32)}
FAR_APART = (("two", "dit"),)
CALL = ("noisy", "level", "frames", "context_noise", "vector", "map")
every = pytest.mark.parametrize(
    "config",
    [pytest.param(config, id=name, marks=[pytest.mark.full] * (name == "wan")) for name, config in CONFIGS.items()],
)


def built(config: Any, cameras: int = 1, seed: int = 0) -> Any:
    """Every weight is random, those that begin at zero as well."""
    torch.manual_seed(seed)
    video = config.build((3 * cameras, 16, 16), CONTEXT, FRAMES, ACTION_WIDTH, MAPS)
    for parameter in video.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return video.eval()


def numbers(video: Any, batch: int = BATCH, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = video.latent
    return {
        "noisy": torch.randn(batch, FRAMES, *size, generator=generator),
        "level": torch.rand(batch, FRAMES, generator=generator),
        "frames": torch.randn(batch, CONTEXT, *size, generator=generator),
        "context_noise": 0.1 * torch.rand(batch, CONTEXT, generator=generator),
        "vector": torch.randn(batch, FRAMES, ACTION_WIDTH, generator=generator),
        "map": torch.rand(batch, FRAMES, MAPS, *size[1:], generator=generator),
    }


def call(video: Any, given: dict[str, torch.Tensor]) -> Any:
    noisy, level, frames, context_noise, vector, maps = (given[name] for name in CALL)
    return video(noisy, level, ContextLatents(frames, context_noise), ActionInput(vector, maps))


def random_pictures(cameras: int, *lead: int) -> torch.Tensor:
    return torch.rand(*lead, 3 * cameras, 16, 16, generator=torch.Generator().manual_seed(2)) * 2.0 - 1.0


@every
def test_environments_and_frames_have_latents_of_their_own(config):
    video, shown = built(config, 2).double(), random_pictures(2, 3, 4).double()
    together = video.encode(shown)
    assert together.shape == (3, 4, *video.latent) and video.decode(together).shape == shown.shape
    assert not together.requires_grad and not video.decode(together.clone().requires_grad_()).requires_grad
    torch.testing.assert_close(together, video.encode(shown.transpose(0, 1)).transpose(0, 1), **ROUNDING)
    alone = video.encode(shown[1:2, 2])
    torch.testing.assert_close(together[1:2, 2], alone, **ROUNDING)
    torch.testing.assert_close(video.decode(together)[1:2, 2], video.decode(alone), **ROUNDING)


@every
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(config):
    """Bit for bit at the same place of a batch with other neighbours; up to rounding at another place."""
    video = built(config, 2)
    given = numbers(video)
    guess = call(video, given)
    other = numbers(video, seed=9)
    other = {name: torch.cat([given[name][:1], item[1:]]) for name, item in other.items()}
    with_neighbour = call(video, other)
    assert guess.features.shape == (BATCH, video.latent[1] * video.latent[2], video.width)
    assert torch.equal(with_neighbour.clean[0], guess.clean[0])
    assert torch.equal(with_neighbour.features[0], guess.features[0])
    assert not torch.equal(with_neighbour.clean[1], guess.clean[1])
    order, video = torch.tensor([3, 0, 4, 7, 2, 1, 6, 5]), video.double()
    given = {name: item.double() for name, item in given.items()}
    guess, moved = call(video, given), call(video, {name: item[order] for name, item in given.items()})
    torch.testing.assert_close(moved.clean, guess.clean[order], **ROUNDING)
    torch.testing.assert_close(moved.features, guess.features[order], **ROUNDING)


@every
def test_equal_seeds_give_equal_numbers_bit_for_bit(config):
    one, two, other = (built(config, seed=seed) for seed in (0, 0, 1))
    given = numbers(one)
    first, second, repeated = call(one, given), call(two, given), call(one, given)
    assert torch.equal(first.clean, second.clean) and torch.equal(first.features, second.features)
    assert torch.equal(first.clean, repeated.clean) and not torch.equal(first.clean, call(other, given).clean)
    assert torch.equal(one.encode(random_pictures(1, 2)), two.encode(random_pictures(1, 2)))


@every
def test_gradients_reach_whatever_is_trained_and_nothing_else(config):
    video = built(config)
    guess = call(video, numbers(video))
    (guess.clean.square().mean() + guess.features.square().mean()).backward()
    still = {name for name, p in video.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    apart = {name for name, _ in video.named_parameters() if name.startswith(("autoencoder.", "vae."))}
    frozen = {name for name, p in video.named_parameters() if not p.requires_grad}
    assert apart and still == apart | frozen
    if config is DIT:
        video.reconstruction(random_pictures(1, 2)).backward()
        assert not any(p.grad is None or not p.grad.abs().sum() > 0 for p in video.parameters())


@every
def test_every_input_of_a_frame_changes_every_frame(config):
    """And every input reaches all frames: an early action moves a late square."""
    video = built(config)
    before = call(video, numbers(video))
    for name in CALL:
        given = numbers(video)
        given[name][:, 0] += 0.3
        after = call(video, given)
        assert ((after.clean - before.clean).abs().amax((0, 2, 3, 4)) > 1e-4).all(), name
        assert (after.features - before.features).abs().amax((1, 2)).min() > 1e-4, name


@every
def test_without_noise_nothing_changes_and_velocity_is_finite(config):
    video = built(config).double()
    given = {name: item.double() for name, item in numbers(video).items()}
    velocity = []
    for level in (0.0, 1e-7, 1e-6):
        inputs = given | {"level": torch.full((BATCH, FRAMES), level, dtype=torch.float64)}
        gone = given["noisy"] - call(video, inputs).clean
        if not level:
            torch.testing.assert_close(gone, torch.zeros_like(gone), rtol=0, atol=1e-12)
        else:
            velocity.append(gone / level)
    assert velocity[0].abs().mean() > 0.01
    torch.testing.assert_close(velocity[0], velocity[1], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("config", "cameras"),
    [
        pytest.param(config, cameras, id=f"{views}-{name}", marks=[pytest.mark.full] * ((views, name) not in FAR_APART))
        for name, config in CONFIGS.items()
        for views, cameras in (("one", ("front",)), ("two", ("side", "front")))
    ],
)
def test_an_imagined_rollout_keeps_the_contract_of_a_simulator(config, cameras):
    # Four frames of three numbers: a linear layer of ten outputs or fewer rounds by the row (one of the model's heads).
    made = model(cameras, backbone=config, frames=4)
    never = ImaginationConfig(horizon=9, batch_size=4, success_threshold=2.0, failure_threshold=2.0)
    names = [line.name for line in check_env(ImaginedEnv(made, initial_states(made), 3, None, never), seed=3)]
    assert "snapshot" in names and "determinism" in names


def test_any_number_of_denoising_steps_gives_a_picture():
    made = model(backbone=replace(DIT, depth=1), denoising_steps=5)
    never = ImaginationConfig(horizon=4, batch_size=2, success_threshold=2.0, failure_threshold=2.0)
    env = ImaginedEnv(made, initial_states(made), 2, None, never)
    first = env.reset(range(2), range(2)).images["front"]
    shown = env.step(env._actions[:, :2]).obs.images["front"]
    assert shown.dtype == first.dtype and shown.shape == first.shape and (shown != first).any()


# -- the U-Net ---------------------------------------------------------------------------------------------------------


def unet():
    """As it is made, its inputs without moves, and the context frames."""
    torch.manual_seed(0)
    video = SMALL.build((3, 16, 16), CONTEXT, FRAMES, ACTION_WIDTH, MAPS)
    given = numbers(video, batch=2)
    given = given | {name: torch.zeros_like(given[name]) for name in ("context_noise", "vector", "map")}
    return video, given, given["frames"]


@pytest.mark.parametrize("frame", range(CONTEXT))
def test_every_pixel_can_be_copied_from_every_context_frame(frame):
    """The one that is moved with the robot among them: what a gripper carries keeps its look."""
    video, given, frames = unet()
    with torch.no_grad():
        bias = video.leave.bias.view(FRAMES, -1)
        choice = bias[:, video.latent[0] :].view(FRAMES, CONTEXT + 1, SMALL.patch**2)
        choice[:, frame] = 100.0
    copied = frames[:, frame : frame + 1].expand(-1, FRAMES, -1, -1, -1)
    torch.testing.assert_close(call(video, given).clean, copied)


def test_a_new_network_keeps_most_of_the_latest_frame():
    video, given, frames = unet()
    share = torch.tensor([0.0, 0.0, 3.0, 0.0]).softmax(0)  # of the context frames and the new colour, which is 0
    expected = (share[:3, None, None, None] * frames).sum(1, keepdim=True).expand(-1, FRAMES, -1, -1, -1)
    torch.testing.assert_close(call(video, given).clean, expected)
