"""PSNR and object position by hand, at each horizon of replays that reach it, beside the copied initial frame."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation.object_positions import (
    FrameAgreement,
    Millimetres,
    ObjectAgreement,
    frame_agreement,
    object_error,
    psnr,
)


def grey(*levels: int) -> np.ndarray:
    """One 2x3 frame per level, uint8 [len(levels),2,3,3]."""
    return np.broadcast_to(np.array(levels, np.uint8)[:, None, None, None], (len(levels), 2, 3, 3)).copy()


@pytest.mark.parametrize(
    ("frames", "true", "mse"),
    [
        ((100,), (110,), 100),
        ((110,), (100,), 100),
        ((0,), (255,), 255**2),  # 0 dB; differences of uint8 would wrap round to 1
        ((50, 60), (50, 70), 50),  # a mean of dB would be infinite
    ],
)
def test_psnr_by_hand(frames, true, mse):
    assert psnr(grey(*frames), grey(*true)) == pytest.approx(20 * math.log10(255 / math.sqrt(mse)), abs=1e-9)


def test_identical_frames_have_the_highest_psnr_and_it_is_finite():
    nearly = grey(10)
    nearly[0, 0, 0, 0] = 12
    one_off = grey(10)
    one_off[0, 0, 0, 0] = 11
    assert psnr(grey(10), grey(10)) == psnr(one_off, grey(10)) == pytest.approx(10 * math.log10(255**2 * 18))
    assert psnr(nearly, grey(10)) < psnr(one_off, grey(10))


def replays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two replays of 3 and 2 control steps; the imagined frames are off by 1, 2, 4 and by 3, 6, then by 200."""
    true = np.stack([grey(10, 20, 30), grey(40, 50, 0)])
    imagined = np.stack([grey(11, 22, 34), grey(43, 56, 200)])
    return imagined, true, np.stack([grey(5)[0], grey(40)[0]])


def test_frames_by_hand():
    found = frame_agreement(*replays(), length=[3, 2], horizons=[1, 2, 3])
    imagined, copied = ((1 + 9) / 2, (4 + 36) / 2, 16), ((25 + 0) / 2, (225 + 100) / 2, 625)
    for item, horizon, count, a, b in zip(found, (1, 2, 3), (2, 2, 1), imagined, copied, strict=True):
        assert (item.horizon, item.replays) == (horizon, count)
        assert (item.psnr, item.copied) == pytest.approx([10 * math.log10(255**2 / mse) for mse in (a, b)])


def test_a_model_that_copies_has_the_psnr_of_the_copy():
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
def test_mismatched_frames_are_refused(change):
    *frames, length = change(*replays())
    with pytest.raises(ContractError, match="do not match in shape or dtype"):
        frame_agreement(*frames, length=length, horizons=[1])


def test_a_horizon_that_no_replay_reaches_is_refused():
    with pytest.raises(ContractError, match=r"horizon 3 is outside 1\.\.2"):
        frame_agreement(*replays(), length=[1, 2], horizons=[3])


class BrightnessLocator:
    """Locates the object at x = brightness and y = task index, in millimetres (an ``ObjectLocator``)."""

    def locate(self, pictures: np.ndarray, tasks: np.ndarray) -> np.ndarray:
        bright = pictures.mean((1, 2, 3)) / 1e3
        return np.stack([bright, 0.001 * tasks, 0 * bright], -1).astype(np.float32)


POSITIONS = np.zeros((2, 3, 3))
POSITIONS[0, :, 0] = [0.012, 0.021, 0.030]
POSITIONS[1, :, 0] = [0.040, 0.048, np.nan]  # unknown after the end of the replay
POSITIONS[1, :, 1] = 0.007  # task 7


def test_millimetres_by_hand():
    """Located at 11, 22, 34 and 43, 56 in imagined, 10, 20, 30 and 40, 50 in true, 5 and 40 in initial frames."""
    found = object_error(
        BrightnessLocator(), *replays(), tasks=[0, 7], length=[3, 2], horizons=[1, 2, 3], positions=POSITIONS
    )
    imagined, copied, probe = ((1, 3), (1, 8), (4,)), ((7, 0), (16, 8), (25,)), ((2, 0), (1, 2), (0,))
    for item, count, *errors in zip(found, (2, 2, 1), imagined, copied, probe, strict=True):
        assert item.replays == count
        for found_error, off in zip((item.imagined, item.copied, item.probe), errors, strict=True):
            assert found_error.median == pytest.approx(sum(off) / len(off), abs=1e-4)
            assert found_error.p90 == pytest.approx(min(off) + 0.9 * (max(off) - min(off)), abs=1e-4)
    assert [item.horizon for item in found] == [1, 2, 3]


def test_a_distance_has_three_axes():
    """3, 4 and 12 mm are 13."""
    positions = np.tile(np.array([0.003, 0.004, 0.012]), (1, 1, 1))
    black = np.zeros((1, 1, 2, 3, 3), np.uint8)
    (item,) = object_error(BrightnessLocator(), black, black, black[:, 0], [0], [1], [1], positions)
    assert item.imagined.median == item.copied.p90 == item.probe.median == pytest.approx(13.0)


def test_without_true_positions_the_probe_replaces_them_and_its_error_is_none():
    (item,) = object_error(BrightnessLocator(), *replays(), tasks=[0, 7], length=[3, 2], horizons=[2])
    assert item.probe is None
    assert (item.imagined.median, item.copied.median) == (pytest.approx(4.0), pytest.approx(12.5))


def test_a_model_that_copies_has_the_error_of_the_copy():
    _, true, first = replays()
    still = np.repeat(first[:, None], 3, axis=1)
    for item in object_error(BrightnessLocator(), still, true, first, [0, 7], [3, 2], [1, 2, 3], POSITIONS):
        assert item.imagined == item.copied
    assert item.imagined == Millimetres(pytest.approx(25.0, abs=1e-4), pytest.approx(25.0, abs=1e-4))


def test_object_errors_are_strict_json():
    (item,) = object_error(BrightnessLocator(), *replays(), [0, 7], [3, 2], [1], POSITIONS)
    back = json.loads(json.dumps(asdict(item), allow_nan=False))
    parts = {name: Millimetres(**back.pop(name)) for name in ("imagined", "copied", "probe")}
    assert ObjectAgreement(**back, **parts) == item


@pytest.mark.parametrize(
    ("tasks", "positions"),
    [
        ([0], POSITIONS),
        ([0, 7], POSITIONS[:1]),
        ([0, 7], POSITIONS[:, :2]),
        ([0, 7], POSITIONS[..., :2]),
        ([0, 7], POSITIONS * np.nan),
    ],
)
def test_tasks_and_positions_of_other_replays_are_refused(tasks, positions):
    with pytest.raises(ContractError, match="do not give the objects' positions in 2 replays"):
        object_error(BrightnessLocator(), *replays(), tasks, [3, 2], [1], positions)


def test_object_errors_refuse_what_frames_do():
    imagined, true, first = replays()
    with pytest.raises(ContractError, match="do not match in shape or dtype"):
        object_error(BrightnessLocator(), imagined[:, :2], true, first, [0, 7], [3, 2], [1], POSITIONS)
    with pytest.raises(ContractError, match=r"horizon 3 is outside 1\.\.2"):
        object_error(BrightnessLocator(), imagined, true, first, [0, 7], [1, 2], [3], POSITIONS)
