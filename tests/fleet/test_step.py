"""Control steps, pictures and introductions come back as they were sent; nothing else is taken."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.fleet.records import SPEC, step
from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError
from vla_rl.fleet.payloads import (
    LOSSLESS,
    MAX_CAMERAS,
    FleetStep,
    decode_picture,
    encode_picture,
    pack_introduction,
    unpack_introduction,
)


def picture(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("shape", [(5, 7, 3), (5, 7, 1), (1, 1, 3)], ids=str)
def test_a_lossless_picture_comes_back_bit_for_bit(shape: tuple[int, ...]):
    np.testing.assert_array_equal(decode_picture(encode_picture(picture(*shape), LOSSLESS)), picture(*shape))


def test_a_jpeg_is_close_and_its_channels_are_in_order():
    smooth = np.zeros((32, 32, 3), np.uint8) + np.array([200, 100, 30], np.uint8)
    found = decode_picture(encode_picture(smooth, 95))
    assert found.shape == smooth.shape and np.abs(found.astype(int) - smooth).max() <= 3


def test_colours_keep_their_resolution():
    edges = np.zeros((16, 16, 3), np.uint8)
    edges[:, ::2], edges[:, 1::2] = (255, 0, 0), (0, 0, 255)
    assert np.abs(decode_picture(encode_picture(edges, 100)).astype(int) - edges).max() < 40


@pytest.mark.parametrize(
    "wrong", [picture(4, 4), picture(4, 4, 2), picture(4, 4, 3).astype(np.float32), picture(1, 4097, 3)], ids=repr
)
def test_what_is_no_picture_is_not_sent(wrong: np.ndarray):
    with pytest.raises(ContractError, match="so it is not sent"):
        encode_picture(wrong, 90)


def _file(image: Image.Image, kind: str) -> bytes:
    data = io.BytesIO()
    image.save(data, kind)
    return data.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        encode_picture(picture(8, 8, 3), LOSSLESS)[:-30],
        encode_picture(picture(32, 32, 3), 90)[:200],
        _file(Image.new("RGB", (8, 8)), "BMP"),
        _file(Image.new("RGBA", (8, 8)), "PNG"),
        _file(Image.new("L", (4097, 1)), "PNG"),
    ],
    ids=["empty", "text", "cut PNG", "cut JPEG", "BMP", "RGBA", "too wide"],
)
def test_what_is_no_picture_is_not_taken(data: bytes):
    with pytest.raises(ContractError, match="cannot be read"):
        decode_picture(data)


def test_a_step_comes_back():
    sent = step(3)
    found = FleetStep.from_payload(sent.payload(LOSSLESS))
    np.testing.assert_array_equal(found.images["front"], sent.images["front"])
    np.testing.assert_array_equal(found.state, sent.state)
    np.testing.assert_array_equal(found.action, sent.action)
    assert found.time == 3 and found.labels.keys() == sent.labels.keys()
    for name, value in sent.labels.items():
        np.testing.assert_array_equal(found.labels[name], value)
        assert (found.labels[name].dtype, found.labels[name].shape) == (value.dtype, value.shape)


@pytest.mark.parametrize(
    "changed",
    [
        {"state": np.zeros(2)},
        {"state": np.zeros((1, 2), np.float32)},
        {"action": None},
        {"time": -1},
        {"time": True},
        {"images": {"front": "text"}},
        {"images": {str(n): b"" for n in range(MAX_CAMERAS + 1)}},
        {"images": {"front": b"no picture"}},
        {"labels": {"x": 1.0}},
        {"labels": []},
        {"labels": {"index": np.array(1)}},
        {"labels": {"observation.state": np.zeros(2)}},
        {"labels": {"x": np.zeros(0)}},
        {"labels": {"x": np.array(1 << 63, np.uint64)}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_wrong_step_is_refused(changed: dict[str, object]):
    message = wire.unpack(step(0).payload(LOSSLESS))
    with pytest.raises(ContractError):
        FleetStep.from_payload(wire.pack(message | changed))


def test_a_robot_introduces_itself():
    assert unpack_introduction(pack_introduction(SPEC)) == SPEC
    assert unpack_introduction(wire.pack({"event": "something newer"})) is None
