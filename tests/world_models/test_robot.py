"""State dynamics: modes, and how they are learnt and chosen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vla_rl.training.fit import FitConfig, fit
from world_models.robot import (
    ModePrediction,
    RobotPosition,
    StateDynamics,
    mixture_nll,
    mode_classifier,
    register,
    sample_modes,
    select_modes,
    training_nll,
)


def test_modes_are_sampled_by_the_cumulative_normal():
    """Half of a standard normal is below 0; the second entry has the odds the other way round."""
    odds = torch.tensor([[0.5, 0.25], [0.25, 0.25], [0.25, 0.5]]).log().expand(4, 3, 2)
    noise = torch.tensor([-0.1, 0.1, 0.7, 9.0])[:, None].expand(4, 2)
    assert sample_modes(torch.zeros(4, 3, 1, 2), odds, noise).tolist() == [[0, 1], [1, 2], [2, 2], [2, 2]]
    modes = torch.arange(8.0).view(1, 2, 2, 2)  # every entry has its own, at both control steps
    assert select_modes(modes, torch.tensor([[1, 0]])).tolist() == [[[4.0, 1.0], [6.0, 3.0]]]


def test_the_likelihood_of_a_mixture_by_hand():
    """One entry, two modes at 0 and 1, standard deviation 0.5, odds 3 to 1; an entry that did not happen."""
    modes = torch.tensor([[[[0.0], [5.0]], [[1.0], [9.0]]]])
    odds = torch.tensor([[[0.75], [0.25]]]).log()
    found = mixture_nll(modes, odds, torch.zeros(1, 2, 1), torch.tensor([[1.0, 0.0]]), 0.5)
    by_hand = -math.log(0.75 + 0.25 * math.exp(-0.5 * (1.0 / 0.5) ** 2)) / 2
    torch.testing.assert_close(found, torch.tensor([by_hand]))


def test_the_likelihood_is_the_mean_over_entries():
    """As much as two robots of one entry each, on average."""
    generator = torch.Generator().manual_seed(0)
    modes, wanted = torch.randn(5, 3, 4, 2, generator=generator), torch.randn(5, 4, 2, generator=generator)
    odds, counts = torch.randn(5, 3, 2, generator=generator).log_softmax(1), torch.ones(5, 4)
    alone = [mixture_nll(modes[..., i : i + 1], odds[..., i : i + 1], wanted[..., i : i + 1], counts) for i in (0, 1)]
    torch.testing.assert_close(mixture_nll(modes, odds, wanted, counts), (alone[0] + alone[1]) / 2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_modes_are_the_two_recorded_outcomes_and_not_their_mean(seed):
    """A finger goes to 1 or stops at 0.5, a coin's toss: two modes, half and half."""
    torch.manual_seed(seed)
    motion, generator = StateDynamics(1, 1, 1, modes=2, width=32), torch.Generator().manual_seed(1)

    def coins():
        while True:
            end = 0.5 + 0.5 * torch.randint(0, 2, (64, 1, 1), generator=generator)
            yield end

    def loss(end):
        value = training_nll(*motion(torch.zeros(64, 1), torch.ones(64, 1)), end, torch.ones(64, 1)).mean()
        return value, {}

    fit(dict(motion.named_parameters()), loss, coins(), FitConfig(steps=300, lr=1e-2))
    modes, odds = motion(torch.zeros(1, 1), torch.ones(1, 1))
    torch.testing.assert_close(modes.flatten().sort().values, torch.tensor([0.5, 1.0]), atol=0.02, rtol=0.0)
    torch.testing.assert_close(odds.exp(), torch.full((1, 2, 1), 0.5), atol=0.1, rtol=0.0)


def test_the_crop_is_at_the_mean_predicted_position():
    """Two modes, three control steps of which two are known; odds 3 to 1."""
    modes = torch.tensor([[[[0.0], [4.0], [9.0]], [[0.0], [8.0], [9.0]]]])
    prediction = ModePrediction.of(modes, torch.tensor([[[0.75], [0.25]]]).log(), torch.tensor([2]))
    torch.testing.assert_close(prediction.expected_end, torch.tensor([[5.0]]))


def classified(crop: int = 4, cameras: int = 1) -> tuple[Any, torch.Tensor, list[Any]]:
    """A classifier of pictures of 16 pixels, which a new one would leave at their odds; three pictures, and the rest.

    That is the robot's position in the centre, its state, action input and prediction.
    """
    torch.manual_seed(0)
    classifier = mode_classifier(cameras, (16, 16), state=2, actions=1, modes=2, crop=crop)
    pictures, given = arguments(cameras)
    torch.testing.assert_close(classifier(pictures, *given), given[-1].log_probs)
    torch.nn.init.normal_(classifier.leave.weight)
    return classifier, pictures, given


def arguments(cameras: int) -> tuple[torch.Tensor, list[Any]]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 3 * cameras, 16, 16), (3, 2), (3, 1), (3, 2, 1, 2), (3, 2, 2)]
    pictures, state, actions, modes, odds = (torch.randn(shape, generator=generator) for shape in shapes)
    prediction = ModePrediction.of(modes, odds.log_softmax(1), torch.ones(3, dtype=torch.long))
    return pictures, [torch.zeros(3, 2 * cameras), state, actions, prediction]


@pytest.mark.parametrize("camera", [0, 1])
def test_the_classifier_reads_every_camera_around_the_robot_only(camera):
    classifier, pictures, given = classified(cameras=2)
    # (x, y) in the first camera, then in the second: pixels 6 to 9 and, there, 10 to 13
    given[0] = torch.tensor([0.0, 0.0, 0.5, 0.5]).expand(3, 4)
    begin = (6, 10)[camera]
    output = classifier(pictures, *given)
    inside, outside = pictures.clone(), pictures.clone()
    near = (slice(None), slice(3 * camera, 3 * camera + 3), slice(begin, begin + 4), slice(begin, begin + 4))
    inside[near] += 1.0
    outside[:, 3 * camera : 3 * camera + 3] += 1.0
    outside[near] -= 1.0
    assert (classifier(inside, *given) - output).abs().max() > 1e-3
    torch.testing.assert_close(classifier(outside, *given), output)


def test_the_crop_moves_with_the_robot():
    """The same around another place is the same."""
    classifier, pictures, given = classified()
    shifted = pictures.roll((2, 5), (2, 3))
    output = classifier(pictures, *given)
    given[0] = torch.tensor([5 / 8, 2 / 8]).expand(3, 2)
    torch.testing.assert_close(classifier(shifted, *given), output)


def test_learning_crops_differ_but_repeat_with_their_seed():
    classifier, pictures, given = classified()
    one, same, other = (classifier(pictures, *given, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.allclose(one, other)


def test_a_classifier_of_whole_pictures_reads_all_of_them():
    """Wherever the robot is."""
    classifier, pictures, given = classified(crop=0, cameras=2)
    output = classifier(pictures, *given)
    for camera in range(2):
        for corner in ((0, 0), (0, 12), (12, 0), (12, 12)):
            changed = pictures.clone()
            changed[:, 3 * camera : 3 * camera + 3, corner[0] : corner[0] + 4, corner[1] : corner[1] + 4] += 1.0
            assert (classifier(changed, *given) - output).abs().max() > 1e-3


def test_whole_pictures_shift_by_a_pixel_at_most_while_learning():
    """Every shift of the nine is drawn, each picture its own, and the border is repeated."""
    classifier, _, given = classified(crop=0)
    seen: list[torch.Tensor] = []
    classifier.convs[0].register_forward_hook(lambda module, inputs, made: seen.append(inputs[0]))
    grid = torch.arange(256.0).view(1, 1, 16, 16).expand(3, 3, 16, 16).contiguous()
    for seed in range(40):
        classifier(grid, *given, torch.Generator().manual_seed(seed))
    inner = torch.cat(seen)[:, 0, 7, 7] - grid[0, 0, 7, 7]
    assert sorted(set(inner.tolist())) == [-17.0, -16.0, -15.0, -1.0, 0.0, 1.0, 15.0, 16.0, 17.0]
    corner = torch.cat(seen)[:, 0, 0, 0]
    assert sorted(set(corner.tolist())) == [0.0, 1.0, 16.0, 17.0]


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
    others = weight[:, 2], weight[0, 1], weight[1, 0]  # entries that do not move it have no weight
    assert all(one.abs().max() < 0.05 for one in others)


def test_two_inputs_of_the_same_position_share_the_weight():
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


def test_a_picture_moves_with_the_robot_and_repeats_its_border():
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
