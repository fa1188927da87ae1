"""Frames to MP4 or PNG and back, and MP4s joined without encoding again."""

from __future__ import annotations

import io
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import av
import numpy as np

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import installed
from vla_rl.experience.lerobot.disk import first_line
from vla_rl.experience.lerobot.features import Feature

# PyAV has errors of its own.
FAILURES = (av.error.FFmpegError, OSError)
_MP4 = {"movflags": "faststart"}  # the index comes first: a truncated file stays readable
_SMALL = 1 << 20  # pixels that any picture may have
_PNG, _JPEG, _TIFF = b"\x89PNG", b"\xff\xd8", (b"II*\0", b"MM\0*")
# What ffmpeg may take a file for: others are lists of further files and addresses, which it would open.
_VIDEOS = {"format_whitelist": "mov,mp4,matroska,webm,avi", "protocol_whitelist": "file"}
_PICTURES = {
    "format_whitelist": "png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe,gif,ppm_pipe,pgm_pipe",
    "protocol_whitelist": "",
}


RGB = Feature("video", ())  # of any size


class DamagedFramesError(ValueError):
    """A video or picture that cannot be decoded as requested; the text begins with a verb."""


@dataclass(frozen=True)
class Codec:
    """How cameras are encoded: AV1 with lerobot's settings, unless changed.

    Colours have half the resolution (yuv420p), so single pixels at edges can be far off however small ``crf`` is.  A
    key frame every ``gop`` frames makes any frame cheap to reach.
    """

    encoder: str = "libsvtav1"
    crf: int = 30
    gop: int = 2
    preset: str = "12"

    def options(self) -> dict[str, str]:
        """For ffmpeg; without frames that refer to later ones, so that packets can be joined."""
        extra = {"preset": self.preset} if self.preset else {}
        return {"crf": str(self.crf), "g": str(self.gop), "bf": "0"} | extra

    def info(self, shape: tuple[int, ...], fps: float) -> dict[str, Any]:
        """What ``info.json`` says about a video of frames of ``shape``."""
        return {
            "video.height": shape[0],
            "video.width": shape[1],
            "video.codec": av.codec.Codec(self.encoder, "w").canonical_name,
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "video.fps": int(fps) if float(fps).is_integer() else fps,
            "video.channels": 3,
            "video.g": self.gop,
            "video.crf": self.crf,
            "video.preset": self.preset or None,
            "has_audio": False,
        }


H264 = Codec("libx264", crf=23, preset="")


def best_codec() -> Codec:
    """AV1 as lerobot writes it, or H.264 where this PyAV cannot; raises UserError when it can neither."""
    for codec in (Codec(), H264):
        if codec.encoder in av.codecs_available:
            return codec
    raise UserError(
        "this PyAV encodes neither AV1 nor H.264, so videos cannot be written; run: pip install -U av, or keep the "
        "cameras as PNG with video='never'."
    )


def encode(path: Path, frames: np.ndarray, fps: float, codec: Codec) -> None:
    """Write uint8 ``frames`` [n,h,w,3] with frame ``i`` at exactly ``i / fps``; the file is not yet synced."""
    os.environ.setdefault("SVT_LOG", "1")  # otherwise the AV1 library logs to standard error
    before = _scheduling()
    with av.open(str(path.absolute()), "w", format="mp4", options=_MP4) as container:
        stream: Any = container.add_stream(codec.encoder, rate=_rate(fps), options=codec.options())
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for i, frame in enumerate(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
            if i == 0:  # the encoder has started its threads
                _restore_scheduling(before)
        container.mux(stream.encode(None))
    _restore_scheduling(before)


_TASKS = Path("/proc/self/task")


def _scheduling() -> dict[int, tuple[int, os.sched_param]]:
    """The scheduling of every thread of this process, where the system reports it."""
    threads = {}
    for item in _TASKS.iterdir() if _TASKS.exists() else ():
        with suppress(ProcessLookupError):  # it ended meanwhile
            threads[int(item.name)] = os.sched_getscheduler(int(item.name)), os.sched_getparam(int(item.name))
    return threads


def _restore_scheduling(before: dict[int, tuple[int, os.sched_param]]) -> None:
    """Undo what SVT-AV1 does as root: it gives the caller and some forty threads real-time priority 99 permanently.

    Everything else on the machine would starve, a robot's control loop included.  New threads get the policy of the
    main thread.
    """
    for thread in _scheduling():
        policy, parameters = before.get(thread, before[os.getpid()])
        with suppress(ProcessLookupError):
            os.sched_setscheduler(thread, policy, parameters)


def decode(path: Path | BinaryIO, times: np.ndarray, fps: float, feature: Feature = RGB) -> np.ndarray:
    """The frames at ``times`` (seconds in the file, increasing) as ``feature`` declares them, none larger.

    uint8 [n,h,w,3] or [n,h,w,1]; grey of more bits is uint16 as it is stored, and depth what :func:`_depth` says.
    A frame matches a time that is at most a quarter of a frame period away (lerobot's loader requires 0.1 ms).  Raises
    DamagedFramesError when one is missing, and OSError when there is no such file.
    """
    if isinstance(path, Path) and not path.is_file():
        raise FileNotFoundError("is missing")
    found: list[np.ndarray] = []
    try:
        with _opened(path) as (container, stream):
            stream.codec_context.options = _limits(feature.shape)
            for time, frame in _frames_from(container, stream, times[0], fps):
                if time > times[len(found)] + 0.25 / fps:
                    break
                if abs(time - times[len(found)]) <= 0.25 / fps:
                    found.append(_pixels(frame, feature))
                if len(found) == len(times):
                    return np.stack(found)
    except FAILURES as error:
        raise DamagedFramesError(f"cannot be decoded ({first_line(error)})") from error
    raise DamagedFramesError(f"has only {len(found)} of {len(times)} frames from {times[0]:.3f} s on")


def _frames_from(container: Any, stream: Any, begin: float, fps: float) -> Iterator[tuple[float, Any]]:
    """The frames from ``begin`` or earlier on, with their times.

    ffmpeg looks for the key frame before ``begin`` by when frames are decoded.  Frames that are shown before a key
    frame and stored behind it (HEVC, MPEG-4) need the one before, so it goes back until nothing can be left out.
    """
    if container.format.name == "avi":  # it does not store when a frame is shown
        yield from ((i / float(stream.average_rate), frame) for i, frame in enumerate(container.decode(stream)))
        return
    back = 0.5 / fps
    while True:
        at = max(begin - back, 0.0)
        container.seek(int(at / stream.time_base), stream=stream)
        decoded = (frame for frame in container.decode(stream) if frame.pts is not None)
        frames = ((float(frame.pts * stream.time_base), frame) for frame in decoded)
        first = next(frames, (math.inf, None))
        if first[0] <= begin + 0.25 / fps or not at:
            break
        back *= 4
    yield from itertools.chain([first] if first[1] else [], frames)


def _pixels(frame: Any, feature: Feature) -> np.ndarray:
    """[h,w,channels] of a ``frame`` that is no larger than ``feature`` declares."""
    _require_size(frame, feature.shape)
    grey = frame.format.name.startswith("gray")
    if feature.channels == 3:
        return np.asarray(frame.to_ndarray(format="rgb24"))
    if not feature.is_depth and not (grey and frame.format.components[0].bits > 8):
        return np.asarray(frame.to_ndarray(format="gray"))[..., None]
    if not grey and not frame.format.name.startswith(("yuv4", "yuvj4")):
        raise DamagedFramesError(f"holds depth as {frame.format.name}, from which no distance can be told")
    numbers = _brightness(frame)[..., None]
    return _depth(numbers, feature.info) if feature.is_depth and feature.dtype == "video" else numbers


def _brightness(frame: Any) -> np.ndarray:
    """[h,w] as it is stored, without the scaling of a conversion between formats."""
    bits, order = frame.format.components[0].bits, ">" if frame.format.is_big_endian else "<"
    dtype = np.dtype("u1" if bits <= 8 else f"{order}u2" if bits <= 16 else f"{order}f4")
    plane = frame.planes[0]
    rows = np.frombuffer(plane, dtype).reshape(-1, plane.line_size // dtype.itemsize)
    return rows[: frame.height, : frame.width].astype(dtype.newbyteorder("="))


_LARGEST_CODE = 4095  # lerobot stores depth in 12 bits


def _depth(codes: np.ndarray, info: Mapping[str, Any]) -> np.ndarray:
    """Distances of lerobot's ``codes`` by the range in ``info``: uint16 millimetres, float32 metres if it says "m".

    ``depth_min`` to ``depth_max`` (metres) in even steps, or in even steps of log(depth + shift).  Without a range,
    what is stored.
    """
    if "video.depth_min" not in info:
        return codes
    try:
        low, high, shift = (float(info[f"video.{name}"]) for name in ("depth_min", "depth_max", "shift"))
        share = codes.astype(np.float64) / _LARGEST_CODE
        if info["video.use_log"]:
            ends = math.log(low + shift), math.log(high + shift)
            metres = np.exp(ends[0] + share * (ends[1] - ends[0])) - shift
        else:
            metres = low + share * (high - low)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedFramesError(f"has no range of depth in info.json ({type(error).__name__}: {error})") from error
    metres = metres.clip(low, high)
    if info.get("depth_unit") == "m":
        return metres.astype(np.float32)
    return np.rint(1000 * metres).clip(0, 65535).astype(np.uint16)


def packet_times(path: Path) -> np.ndarray:
    """When each frame of a video is shown, in seconds, without decoding it [n]."""
    with _opened(path) as (container, stream):
        base = stream.time_base
        return np.array(sorted(float(p.pts * base) for p in container.demux(stream) if p.pts is not None))


def join(parts: Sequence[tuple[Path, int]], path: Path, fps: float) -> None:
    """Concatenate the videos ``(file, number of frames)`` into one MP4 without encoding them again."""
    with av.open(str(path.absolute()), "w", format="mp4", options=_MP4) as target:
        stream: Any = None
        before = 0
        for part, count in parts:
            with _opened(part) as (source, template):
                if stream is None:
                    stream = target.add_stream_from_template(template, opaque=True)
                    stream.time_base = template.time_base
                shift = round(before / _rate(fps) / template.time_base)
                for packet in source.demux(template):
                    if packet.pts is not None and packet.dts is not None:
                        packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                        target.mux(packet)
            before += count


def encode_png(frame: np.ndarray) -> bytes:
    """One uint8 frame [h,w,3] or [h,w,1] as lossless PNG."""
    form = "rgb24" if frame.shape[-1] == 3 else "gray"
    encoder: Any = av.CodecContext.create("png", "w")
    encoder.height, encoder.width = frame.shape[:2]
    encoder.pix_fmt, encoder.time_base = form, Fraction(1, 1)
    pixels = np.ascontiguousarray(frame if form == "rgb24" else frame[..., 0])
    packets = encoder.encode(av.VideoFrame.from_ndarray(pixels, format=form)) + encoder.encode(None)
    return b"".join(bytes(packet) for packet in packets)


def _limits(shape: tuple[int, ...]) -> dict[str, str]:
    """For ffmpeg's decoders, so that what is larger than declared is not decoded."""
    return {"max_pixels": str(max(2 * math.prod(shape), _SMALL))}  # codecs fill up to whole blocks


def _require_size(frame: Any, shape: tuple[int, ...]) -> None:
    """Raise DamagedFramesError for more pixels than ``shape``, of either order, declares: memory was counted by it."""
    channels = next((count for count in (shape[-1], shape[0]) if count <= 4), 1) if shape else 0
    if shape and frame.height * frame.width > math.prod(shape) // channels:
        declared = f"{list(shape)} is declared"
        raise DamagedFramesError(f"holds a picture of {frame.height} x {frame.width} pixels where {declared}")


def decode_picture(data: bytes, feature: Feature = RGB) -> np.ndarray:
    """PNG, JPEG or any other format of ffmpeg as ``feature`` declares it, [h,w,channels], and no larger.

    Types as those of :func:`decode`.  Raises DamagedFramesError.
    """
    known = {_PNG: "png", _JPEG: "mjpeg"}
    name = next((name for head, name in known.items() if data.startswith(head)), "")
    try:
        if name:
            decoder: Any = av.CodecContext.create(name, "r")
            decoder.options = _limits(feature.shape)
            return _pixels((decoder.decode(av.Packet(data)) + decoder.decode(None))[0], feature)
        with av.open(io.BytesIO(data), "r", options=_PICTURES) as container:
            container.streams.video[0].codec_context.options = _limits(feature.shape)
            return _pixels(next(iter(container.decode(video=0))), feature)
    except (*FAILURES, StopIteration, IndexError, EOFError) as error:
        if feature.is_depth and data.startswith(_TIFF):
            return _floating(data, feature)
        raise DamagedFramesError(f"holds a picture that cannot be decoded ({first_line(error)})") from error


def _floating(data: bytes, feature: Feature) -> np.ndarray:
    """float32 [h,w,1] of a TIFF of metres, as lerobot keeps them; ffmpeg reads whole numbers alone."""
    library = installed("PIL.Image", "depth of floating-point numbers cannot be read", "report", "pillow")
    try:
        image = library.open(io.BytesIO(data), formats=("TIFF",))
        _require_size(image, feature.shape)
        if image.mode != "F":
            raise DamagedFramesError(f"holds a picture of the kind {image.mode}, which is no depth")
        return np.asarray(image)[..., None]
    except (OSError, SyntaxError, library.DecompressionBombError) as error:
        raise DamagedFramesError(f"holds a picture that cannot be decoded ({first_line(error)})") from error


def camera(shape: tuple[int, ...], fps: float, video: str, codec: Codec | None = None) -> Feature:
    """The column of a camera with frames of ``shape`` (h, w, c).

    ``video``: "always", "never" (PNG in the parquet, without loss), or "auto": video from 96 pixels a side on, because
    smaller pictures need no more room as PNG and lose much to half-resolution colours (64x64 renderings of lift: 709
    bytes a frame as PNG, 612 as AV1 with a mean error of 3.3 and single errors of 203).  Raises ContractError for
    shapes that are no pictures, and for video of frames that are not RGB.
    """
    if len(shape) != 3 or shape[2] not in (1, 3):
        raise ContractError(
            f"a camera has frames of shape {list(shape)}, which are no pictures; give [h,w,3] or [h,w,1] and keep "
            "other arrays as plain columns."
        )
    names = ("height", "width", "channels")
    possible = shape[2] == 3 and shape[0] % 2 == shape[1] % 2 == 0
    if video == "always" and not possible:
        raise ContractError(
            f"frames of shape {list(shape)} cannot be video (RGB with even sides can); write them with video='auto'."
        )
    if video == "never" or not possible or (video == "auto" and min(shape[:2]) < 96):
        return Feature("image", shape, names)
    return Feature("video", shape, names, (codec or best_codec()).info(shape, fps))


def codec_of(feature: Feature) -> Codec:
    """The codec with which a video column was declared, for its next episode."""
    info, usual = feature.info, best_codec()
    encoders = {av.codec.Codec(codec.encoder, "w").canonical_name: codec for codec in (usual, H264)}
    kind = encoders.get(info.get("video.codec", ""), usual)
    preset = str(info["video.preset"]) if info.get("video.preset") is not None else kind.preset
    return Codec(kind.encoder, int(info.get("video.crf", kind.crf)), int(info.get("video.g", kind.gop)), preset)


@contextmanager
def _opened(path: Path | BinaryIO) -> Iterator[tuple[Any, Any]]:
    try:
        container = av.open(str(path.absolute()) if isinstance(path, Path) else path, options=_VIDEOS)
    except av.error.ArgumentError as error:
        raise DamagedFramesError("is no MP4, Matroska or AVI, and nothing else is opened") from error
    with container:
        if not container.streams.video:
            raise DamagedFramesError("holds no video")
        stream = container.streams.video[0]
        if stream.codec_context is None:  # of a file that was cut in the wrong place
            raise DamagedFramesError("holds a video of no known codec")
        yield container, stream


def _rate(fps: float) -> Fraction:
    return Fraction(fps).limit_denominator(1001)
