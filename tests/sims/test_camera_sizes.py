"""Every camera of the tabletop may have a size of its own."""

from __future__ import annotations

import numpy as np
import pytest

from sims.catalog import make
from vla_rl.contract.errors import UserError

CAMERAS = ("front", "side")


def test_a_camera_of_its_own_size_sees_what_it_sees_alone():
    both = make("lift", num_envs=1, cameras=CAMERAS, image_size={"front": 40, "side": 24})
    alone = make("lift", num_envs=1, cameras=("side",), image_size=24)
    seen, other = (env.reset(np.zeros(1, int), np.array([5])) for env in (both, alone))
    assert {name: item.shape for name, item in both.spec.images.items()} == {"front": (40, 40, 3), "side": (24, 24, 3)}
    assert seen.images["front"].shape == (1, 40, 40, 3) and seen.images["side"].std() > 10
    assert np.array_equal(seen.images["side"], other.images["side"])


@pytest.mark.parametrize(
    "size, what",
    [
        ({"front": 40}, "gives the camera 'side' no size"),
        ({"front": 40, "side": 0}, "leaves nothing to render"),
        (0, "image_size=0 leaves nothing to render"),
    ],
)
def test_a_camera_without_a_size_is_refused(size, what):
    with pytest.raises(UserError, match=what):
        make("lift", num_envs=1, cameras=CAMERAS, image_size=size)
