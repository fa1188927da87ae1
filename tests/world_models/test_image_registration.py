"""The position of a robot in its pictures is found among other objects."""

from __future__ import annotations

import pytest
import torch

from world_models.robot import RobotPosition, register

SIDES = (32, 48)


def scenes(count: int, speed: tuple[float, float] = (0.23, 0.17)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures of a hand whose place is linear in its state, over a block that lies anywhere; states and places."""
    generator = torch.Generator().manual_seed(0)
    state = 3**0.5 * (torch.rand(count, 3, generator=generator) * 2 - 1)  # of standard deviation 1
    place = state[:, :2] * torch.tensor(speed) + torch.tensor([0.1, -0.2])
    block = torch.rand(count, 2, generator=generator) * 1.8 - 0.9
    y, x = torch.meshgrid(*(torch.linspace(1 / side - 1, 1 - 1 / side, side) for side in SIDES), indexing="ij")

    def spot(centre: torch.Tensor, size: float) -> torch.Tensor:
        return (-((x - centre[:, 0, None, None]) ** 2 + (y - centre[:, 1, None, None]) ** 2) / size**2).exp()

    pictures = torch.stack([0.3 + spot(place, 0.2), spot(block, 0.15), -spot(place, 0.2)], 1)
    return pictures, state, place


def test_the_robot_is_found_within_a_pixel():
    pictures, state, place = scenes(200)
    weight, bias = register(pictures, state)
    pixels = (state @ weight.T + bias - place).abs() * torch.tensor([SIDES[1] / 2, SIDES[0] / 2])
    assert pixels.mean() < 1.0


def test_entries_that_do_not_move_the_robot_have_no_weight():
    pictures, state, _ = scenes(200)
    weight, _ = register(pictures, state)
    assert weight[:, 2].abs().max() < 0.05 and weight[0, 1].abs() < 0.05 and weight[1, 0].abs() < 0.05


def test_two_inputs_with_the_same_position_get_half_the_weight_each():
    """The position and its target: weights that cancel would be wrong as soon as the two differ."""
    pictures, state, _ = scenes(200)
    target = state[:, :2] + 0.01 * torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
    weight, _ = register(pictures, torch.cat([state, target], 1))
    wanted = torch.tensor([[0.115, 0.0, 0.0, 0.115, 0.0], [0.0, 0.085, 0.0, 0.0, 0.085]])
    torch.testing.assert_close(weight, wanted, atol=0.03, rtol=0.0)


def test_pictures_without_the_robot_do_not_move_its_position():
    """Every fourth picture has no hand but a copy of it at one fixed position."""
    pictures, state, place = scenes(240)
    pictures[::4] = pictures[:1]
    weight, bias = register(pictures, state)
    off = state @ weight.T + bias - place
    pixels = (off - off.mean(0)).abs() * torch.tensor([SIDES[1] / 2, SIDES[0] / 2])
    assert pixels.mean() < 0.3


@pytest.mark.parametrize("count", [1, 2])
def test_a_robot_that_never_moves_is_registered_in_the_centre(count):
    """As with a camera at its hand; a handful of pictures will do."""
    pictures = torch.ones(count, 3, *SIDES)
    weight, bias = register(pictures, torch.randn(count, 3, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close((weight, bias), (torch.zeros(2, 3), torch.zeros(2)), atol=1e-3, rtol=0.0)


def test_a_picture_is_moved_as_far_as_the_robot_and_what_enters_repeats_the_border():
    """By whole pixels, exactly: in every camera by that camera's weights, and for every state to come."""
    position, height, width = RobotPosition(cameras=2, state=1), 8, 12
    # One unit of state: in the first camera 2 pixels to the right, in the second 1 to the left and 3 down.
    position.weight.copy_(torch.tensor([[2 * 2 / width], [0.0], [-1 * 2 / width], [3 * 2 / height]]))
    position.bias.fill_(0.3)
    generator = torch.Generator().manual_seed(0)
    pictures, before = torch.rand(3, 6, height, width, generator=generator), torch.randn(3, 1, generator=generator)
    moved = position.moved(pictures, before, before[:, None] + torch.tensor([[[0.0], [1.0]]]))
    assert moved.shape == (3, 2, 6, height, width)
    torch.testing.assert_close(moved[:, 0], pictures)
    torch.testing.assert_close(moved[:, 1, :3, :, 2:], pictures[:, :3, :, :-2])
    torch.testing.assert_close(moved[:, 1, :3, :, 0], pictures[:, :3, :, 0])
    torch.testing.assert_close(moved[:, 1, 3:, 3:, :-1], pictures[:, 3:, :-3, 1:])
    torch.testing.assert_close(moved[:, 1, 3:, 0, :-1], pictures[:, 3:, 0, 1:])


def test_positions_are_exact_where_matrix_products_are_not():
    """A pixel of 64 is 1/32: bfloat16 would lose a tenth of it."""
    position = RobotPosition(cameras=1, state=8)
    torch.nn.init.normal_(position.weight)
    state = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = position(state)
    torch.testing.assert_close(found, (state.double() @ position.weight.double().T).float())
