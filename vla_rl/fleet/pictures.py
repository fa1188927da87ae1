"""Camera pictures as bytes: JPEG, or PNG where nothing may be lost."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, UnidentifiedImageError

from vla_rl.contract.errors import ContractError

LOSSLESS = 0  # in place of a JPEG quality
MAX_SIDE = 4096  # pixels
_MODES = {1: "L", 3: "RGB"}


def encode(picture: np.ndarray, quality: int) -> bytes:
    """``picture`` uint8 [h,w,c] with c = 1 or 3, as JPEG of ``quality`` 1 to 100 or as PNG (``LOSSLESS``).

    The picture's colours are kept at full resolution (4:4:4).  Raises ContractError for another shape or type.
    """
    shape = picture.shape
    if picture.dtype != np.uint8 or len(shape) != 3 or shape[2] not in _MODES or not 0 < max(shape[:2]) <= MAX_SIDE:
        raise ContractError(
            f"a picture is {picture.dtype}{list(shape)}, so it is not sent; give uint8 [h,w,1] or [h,w,3] of at most "
            f"{MAX_SIDE} pixels a side."
        )
    image, data = Image.fromarray(picture.squeeze(2) if shape[2] == 1 else picture), io.BytesIO()
    if quality == LOSSLESS:
        image.save(data, "PNG", compress_level=1)
    else:
        image.save(data, "JPEG", quality=quality, subsampling=0)
    return data.getvalue()


def decode(data: bytes, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The picture uint8 [h,w,c] in ``data``.

    Raises ContractError for anything but a JPEG or PNG of at most ``MAX_SIDE`` pixels a side, or of another ``shape``
    where one is given, before memory for it is allocated.
    """
    with _opened(data, shape) as image:
        array = np.array(image)
    return array if array.ndim == 3 else array[..., None]


def check(data: bytes, shape: tuple[int, ...] | None = None) -> None:
    """Raise ContractError where :func:`decode` would, as far as the beginning of ``data`` says."""
    with _opened(data, shape):
        pass


@contextmanager
def _opened(data: bytes, shape: tuple[int, ...] | None) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if max(image.size) > MAX_SIDE or image.mode not in _MODES.values():
                raise _unreadable(f"{image.mode} of {image.size[0]}x{image.size[1]} pixels", data)
            if shape not in (None, (image.size[1], image.size[0], 1 if image.mode == "L" else 3)):
                raise _unreadable(
                    f"{image.mode} of {image.size[0]}x{image.size[1]} pixels, not {list(shape or ())}", data
                )
            yield image
    except ContractError:  # said already
        raise
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(str(error) or type(error).__name__, data) from error


def _unreadable(what: str, data: bytes) -> ContractError:
    return ContractError(
        f"a picture of {len(data)} bytes cannot be read ({what:.200}), so its step is dropped; look at the sender."
    )
