"""Which mode comes true, from a picture: by a crop that moves with the robot, and by the whole picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from world_models.robot import CropClassifier, ModePrediction, PictureClassifier


def crops(cameras: int = 1) -> tuple[CropClassifier, torch.Tensor, list[Any]]:
    """A classifier of pictures of 16 pixels, the pictures, and its further arguments."""
    torch.manual_seed(0)
    return CropClassifier(cameras, (16, 16), state=2, actions=1, modes=2, side=4), *arguments(cameras)


def arguments(cameras: int = 1) -> tuple[torch.Tensor, list[Any]]:
    """Three pictures of 16 pixels; the robot's position in their centre, its state, action input and prediction."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 3 * cameras, 16, 16), (3, 2), (3, 1), (3, 2, 1, 2), (3, 2, 2)]
    pictures, state, actions, modes, odds = (torch.randn(shape, generator=generator) for shape in shapes)
    prediction = ModePrediction.of(modes, odds.log_softmax(1), torch.ones(3, dtype=torch.long))
    return pictures, [torch.zeros(3, 2 * cameras), state, actions, prediction]


def test_a_new_classifier_leaves_the_probabilities_of_the_modes():
    classifier, pictures, given = crops()
    torch.testing.assert_close(classifier(pictures, *given), given[-1].log_probs)


@pytest.mark.parametrize("camera", [0, 1])
def test_the_classifier_reads_every_camera_around_the_robot_only(camera):
    classifier, pictures, given = crops(cameras=2)
    torch.nn.init.normal_(classifier.leave.weight)
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
    classifier, pictures, given = crops()
    torch.nn.init.normal_(classifier.leave.weight)
    shifted = pictures.roll((2, 5), (2, 3))
    output = classifier(pictures, *given)
    given[0] = torch.tensor([5 / 8, 2 / 8]).expand(3, 2)
    torch.testing.assert_close(classifier(shifted, *given), output)


def test_learning_crops_are_never_twice_the_same_but_repeat_with_their_seed():
    classifier, pictures, given = crops()
    torch.nn.init.normal_(classifier.leave.weight)
    one, same, other = (classifier(pictures, *given, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.allclose(one, other)


def whole(cameras: int = 1) -> tuple[PictureClassifier, torch.Tensor, list[Any]]:
    torch.manual_seed(0)
    return PictureClassifier(cameras, (16, 16), state=2, actions=1, modes=2), *arguments(cameras)


def test_a_new_classifier_of_whole_pictures_leaves_the_probabilities_of_the_modes():
    classifier, pictures, given = whole()
    torch.testing.assert_close(classifier(pictures, *given), given[-1].log_probs)


def test_a_classifier_of_whole_pictures_reads_every_camera_and_corner():
    """Wherever the robot is."""
    classifier, pictures, given = whole(cameras=2)
    torch.nn.init.normal_(classifier.leave.weight)
    output = classifier(pictures, *given)
    for camera in range(2):
        for corner in ((0, 0), (0, 12), (12, 0), (12, 12)):
            changed = pictures.clone()
            changed[:, 3 * camera : 3 * camera + 3, corner[0] : corner[0] + 4, corner[1] : corner[1] + 4] += 1.0
            assert (classifier(changed, *given) - output).abs().max() > 1e-3


def test_whole_pictures_are_shifted_by_a_pixel_at_most_while_learning():
    """Every shift of the nine is drawn, each picture its own, and the border is repeated."""
    classifier, _, given = whole()
    seen: list[torch.Tensor] = []
    classifier.convs[0].register_forward_hook(lambda module, inputs, made: seen.append(inputs[0]))
    grid = torch.arange(256.0).view(1, 1, 16, 16).expand(3, 3, 16, 16).contiguous()
    for seed in range(40):
        classifier(grid, *given, torch.Generator().manual_seed(seed))
    inner = torch.cat(seen)[:, 0, 7, 7] - grid[0, 0, 7, 7]
    assert sorted(set(inner.tolist())) == [-17.0, -16.0, -15.0, -1.0, 0.0, 1.0, 15.0, 16.0, 17.0]
    corner = torch.cat(seen)[:, 0, 0, 0]
    assert sorted(set(corner.tolist())) == [0.0, 1.0, 16.0, 17.0]
