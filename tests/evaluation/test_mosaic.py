"""Pictures of several cameras in one."""

from __future__ import annotations

import numpy as np

from vla_rl.evaluation.video import mosaic


def test_cameras_of_several_sizes_are_shown_beside_or_above_each_other():
    """In the order of their names; a grey one is grey, and what is smaller is followed by black."""
    images = {"wrist": np.full((2, 3, 4, 1), 7, np.uint8), "front": np.full((2, 5, 6, 3), 9, np.uint8)}
    above, beside = mosaic(images, 1), mosaic(images, 2)
    assert above.shape == (2, 8, 6, 3) and beside.shape == (2, 5, 10, 3)
    assert (above[:, :5] == 9).all() and (above[:, 5:, :4] == 7).all() and not above[:, 5:, 4:].any()
    assert (beside[:, :, :6] == 9).all() and (beside[:, :3, 6:] == 7).all() and not beside[:, 3:, 6:].any()
    alone = {name: image[0] for name, image in images.items()}
    assert np.array_equal(mosaic(alone, 1), beside[0]) and np.array_equal(mosaic(alone, 0), above[0])
