"""PSNR by hand, at the asked step of the replays that last so long, beside that of the copied first frame."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation.likeness import FrameAgreement, frame_agreement, psnr


def grey(*levels: int) -> np.ndarray:
    """One 2x3 frame per level, uint8 [len(levels),2,3,3]."""
    return np.broadcast_to(np.array(levels, np.uint8)[:, None, None, None], (len(levels), 2, 3, 3)).copy()


@pytest.mark.parametrize(
    ("shown", "true", "mse"),
    [
        ((100,), (110,), 100),
        ((110,), (100,), 100),
        ((0,), (255,), 255**2),  # 0 dB; differences of uint8 would wrap round to 1
        ((50, 60), (50, 70), 50),  # a mean of dB would be infinite
    ],
)
def test_psnr_by_hand(shown, true, mse):
    assert psnr(grey(*shown), grey(*true)) == pytest.approx(20 * math.log10(255 / math.sqrt(mse)), abs=1e-9)


def test_equal_frames_are_the_most_alike_and_finite():
    nearly = grey(10)
    nearly[0, 0, 0, 0] = 12
    one_off = grey(10)
    one_off[0, 0, 0, 0] = 11
    assert psnr(grey(10), grey(10)) == psnr(one_off, grey(10)) == pytest.approx(10 * math.log10(255**2 * 18))
    assert psnr(nearly, grey(10)) < psnr(one_off, grey(10))


def replays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two replays of 3 and 2 control steps; the dream is off by 1, 2, 4 and by 3, 6; after its end by 200."""
    true = np.stack([grey(10, 20, 30), grey(40, 50, 0)])
    imagined = np.stack([grey(11, 22, 34), grey(43, 56, 200)])
    return imagined, true, np.stack([grey(5)[0], grey(40)[0]])


def test_frames_by_hand():
    found = frame_agreement(*replays(), length=[3, 2], horizons=[1, 2, 3])
    dream, copied = ((1 + 9) / 2, (4 + 36) / 2, 16), ((25 + 0) / 2, (225 + 100) / 2, 625)
    for item, horizon, rows, a, b in zip(found, (1, 2, 3), (2, 2, 1), dream, copied, strict=True):
        assert (item.horizon, item.replays) == (horizon, rows)
        assert (item.psnr, item.copied) == pytest.approx([10 * math.log10(255**2 / mse) for mse in (a, b)])


def test_the_copying_model_is_as_good_as_the_copy():
    _, true, first = replays()
    still = np.repeat(first[:, None], 3, axis=1)
    for item in frame_agreement(still, true, first, [3, 3], [1, 3]):
        assert item.psnr == item.copied


def test_results_are_strict_json():
    _, true, first = replays()
    (item,) = frame_agreement(true, true, first, [3, 3], [2])
    assert FrameAgreement(**json.loads(json.dumps(asdict(item), allow_nan=False))) == item


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, c: (a[:, :2], b, c, [3, 2]),
        lambda a, b, c: (a, b, c[:1], [3, 2]),
        lambda a, b, c: (a.astype(np.float32), b, c, [3, 2]),
        lambda a, b, c: (a, b, c.astype(np.int16), [3, 2]),
        lambda a, b, c: (a[0], b[0], c[0], [3, 2]),
        lambda a, b, c: (a, b, c, [4, 2]),
        lambda a, b, c: (a, b, c, [3]),
    ],
    ids=["T", "n", "float", "first-int16", "one", "longer", "lengths"],
)
def test_frames_that_do_not_belong_together_are_refused(change):
    *frames, length = change(*replays())
    with pytest.raises(ContractError, match="do not belong together"):
        frame_agreement(*frames, length=length, horizons=[1])


def test_a_horizon_nobody_reaches_is_refused():
    with pytest.raises(ContractError, match=r"horizon 3 is outside 1\.\.2"):
        frame_agreement(*replays(), length=[1, 2], horizons=[3])
