"""Clips of episodes as bytes that a browser plays: MP4 by PyAV where it can encode H.264, else WebP by pillow."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.errors import ContractError, UserError

MIME_OF = {".mp4": "video/mp4", ".webp": "image/webp"}
SUFFIX_OF = {mime: suffix for suffix, mime in MIME_OF.items()}

# Policy cameras are small.  Whole-pixel enlargement keeps every pixel and, although H.264 halves the colour resolution,
# its colour.
_SMALLEST_SIDE = 192


def mosaic(images: Mapping[str, np.ndarray], axis: int) -> np.ndarray:
    """One picture uint8 [...,h,w,3] of the cameras in the order of their names, joined along ``axis``.

    ``images``: {camera: uint8 [...,h_i,w_i,1 or 3]}; ``axis`` is that of the heights, to show them above each other, or
    of the widths, beside each other.  Smaller pictures are followed by black.
    """
    parts = [images[name] for name in sorted(images)]
    across = 2 * parts[0].ndim - 5 - axis  # the other of both axes
    longest = max(part.shape[across] for part in parts)
    padded = []
    for part in parts:
        room = [(0, longest - size if i == across else 0) for i, size in enumerate(part.shape)]
        whole = np.pad(part, room)
        padded.append(np.broadcast_to(whole, (*whole.shape[:-1], 3)))
    return np.concatenate(padded, axis)


@dataclass(frozen=True)
class Media:
    """Encoded frames with their MIME type."""

    mime: str
    data: bytes


@dataclass(frozen=True)
class Recording:
    """An episode whose frames are in a file already, named as :data:`SUFFIX_OF` says."""

    path: Path
    label: str
    success: bool | None = None
    wide = False

    def media(self) -> Media:
        """The file as it is; raises OSError when it is gone."""
        return Media(MIME_OF[self.path.suffix], self.path.read_bytes())


@dataclass(frozen=True)
class Clip:
    """One episode to show: ``frames`` uint8 [n,h,w,3], and whether it succeeded (None without a notion of success)."""

    frames: np.ndarray
    label: str
    success: bool | None = None
    fps: float = 10.0

    @property
    def wide(self) -> bool:
        """Whether it needs more room than a square."""
        return self.frames.shape[2] > 1.5 * self.frames.shape[1]

    def media(self) -> Media:
        """Encoded frame for frame.

        Raises ContractError for frames other than uint8 [n,h,w,3], UserError without an installed encoder.
        """
        frames = self.frames
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
            raise ContractError(
                f"clip {self.label!r} has frames {frames.dtype} {list(frames.shape)}, which cannot be shown; "
                "give uint8 [n,h,w,3] with at least one frame."
            )
        frames = _enlarge(frames)
        return _mp4(frames, self.fps) if _has_h264() else _webp(frames, self.fps)


def _enlarge(frames: np.ndarray) -> np.ndarray:
    """Whole-pixel enlargement of small frames; the sides become even, as H.264 requires."""
    factor = max(1, _SMALLEST_SIDE // min(frames.shape[1:3]))
    frames = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    return np.pad(frames, [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)], mode="edge")


def _has_h264() -> bool:
    try:
        import av

        av.codec.Codec("libx264", "w")
    except (ImportError, ValueError):
        return False
    return True


def _mp4(frames: np.ndarray, fps: float) -> Media:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"  # what every browser plays
        # Equal clips give equal bytes on every machine.  The stream records the number of threads, and with mbtree it
        # differed from run to run where a side is no multiple of 16.
        stream.options = {"crf": "22", "x264-params": "mbtree=0"}
        stream.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))
    return Media("video/mp4", buffer.getvalue())


def _webp(frames: np.ndarray, fps: float) -> Media:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            "neither PyAV (with H.264) nor pillow is installed, so clips cannot be encoded; "
            "run: pip install 'vla-rl[report]'"
        ) from error
    first, *rest = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    first.save(buffer, "WEBP", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0, quality=75)
    return Media("image/webp", buffer.getvalue())
