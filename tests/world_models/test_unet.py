"""The U-Net mixes pixels of the frames that it is given with new colours."""

from __future__ import annotations

import pytest
import torch

from tests.world_models.small_models import SMALL
from world_models.backbones import ActionInput, ContextLatents
from world_models.backbones.unet import UNet

CONTEXT, FRAMES = 3, 2


def given(video: UNet) -> tuple[torch.Tensor, torch.Tensor, ContextLatents, ActionInput]:
    generator = torch.Generator().manual_seed(1)
    noisy, frames = (torch.randn(2, count, *video.latent, generator=generator) for count in (FRAMES, CONTEXT))
    context = ContextLatents(frames, torch.zeros(2, CONTEXT))
    return (
        noisy,
        torch.rand(2, FRAMES),
        context,
        ActionInput(torch.zeros(2, FRAMES, 7), torch.zeros(2, FRAMES, 4, 4, 4)),
    )


def built() -> UNet:
    torch.manual_seed(0)
    return SMALL.build((3, 16, 16), CONTEXT, FRAMES, 7, 4)


@pytest.mark.parametrize("frame", range(CONTEXT))
def test_every_pixel_can_be_copied_from_every_frame_of_the_context(frame):
    """The one that is moved with the robot among them: what a gripper carries keeps its look."""
    video = built()
    inputs = given(video)
    cells = SMALL.patch**2
    with torch.no_grad():
        bias = video.leave.bias.view(FRAMES, -1)
        choice = bias[:, video.latent[0] :].view(FRAMES, CONTEXT + 1, cells)
        choice[:, frame] = 100.0
    copied = inputs[2].frames[:, frame : frame + 1].expand(-1, FRAMES, -1, -1, -1)
    torch.testing.assert_close(video(*inputs).clean, copied)


def test_a_new_network_keeps_most_of_the_latest_frame():
    video = built()
    inputs = given(video)
    context = inputs[2].frames
    share = torch.tensor([0.0, 0.0, 3.0, 0.0]).softmax(0)  # of the context frames and the new colour, which is 0
    expected = (share[:3, None, None, None] * context).sum(1, keepdim=True).expand(-1, FRAMES, -1, -1, -1)
    torch.testing.assert_close(video(*inputs).clean, expected)
