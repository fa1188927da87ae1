"""Frames through MP4 and PNG: the right frame at the right time, within the codec's tolerance; joined without loss.

Also of other codecs, with any distance of key frames, and pictures of depth and of one brightness as they are.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from tests.experience.lerobot_makers import FPS, MEAN_ERROR, WORST_ERROR, pictures
from vla_rl.contract.errors import ContractError
from vla_rl.experience.lerobot import video
from vla_rl.experience.lerobot.features import Feature
from vla_rl.experience.lerobot.video import H264, Codec, DamagedFramesError

SHAPE = (32, 48, 3)
ONE = Codec()


@pytest.mark.parametrize(("codec", "fps"), [(ONE, 10), (ONE, FPS), (H264, 29.97)])
def test_frames_are_found_by_their_time(tmp_path, codec, fps):
    frames = pictures(SHAPE, 1, 9)
    video.encode(tmp_path / "a.mp4", frames, fps, codec)
    np.testing.assert_allclose(video.packet_times(tmp_path / "a.mp4"), np.arange(9) / fps, atol=1e-5)
    times = (np.arange(9) / fps).astype(np.float32).astype(float)
    for chosen in (slice(0, 9), slice(4, 7), slice(8, 9), slice(1, 9, 3)):
        off = np.abs(video.decode(tmp_path / "a.mp4", times[chosen], fps).astype(int) - frames[chosen])
        assert off.mean() <= MEAN_ERROR and off.max() <= WORST_ERROR


@pytest.mark.parametrize("codec", [ONE, H264], ids=["AV1", "H.264"])
def test_joined_videos_hold_the_same_frames_one_after_the_other(tmp_path, codec):
    lengths, parts, decoded = (4, 1, 5), [], []
    for i, length in enumerate(lengths):
        video.encode(tmp_path / f"{i}.mp4", pictures(SHAPE, i, length), FPS, codec)
        decoded.append(video.decode(tmp_path / f"{i}.mp4", np.arange(length) / FPS, FPS))
        parts.append((tmp_path / f"{i}.mp4", length))
    video.join(parts, tmp_path / "all.mp4", FPS)
    times = np.arange(sum(lengths)) / FPS
    np.testing.assert_allclose(video.packet_times(tmp_path / "all.mp4"), times, atol=1e-5)
    assert np.array_equal(video.decode(tmp_path / "all.mp4", times, FPS), np.concatenate(decoded))
    assert np.array_equal(video.decode(tmp_path / "all.mp4", times[5:7], FPS), decoded[2][:2])


def test_missing_frames_are_reported(tmp_path):
    path = tmp_path / "a.mp4"
    video.encode(path, pictures(SHAPE, 1, 4), 10, ONE)
    with pytest.raises(DamagedFramesError, match=r"has only 2 of 3 frames from 0\.200 s on"):
        video.decode(path, np.array([0.2, 0.3, 0.4]), 10)
    with pytest.raises(DamagedFramesError, match="has only 1 of 2 frames"):
        video.decode(path, np.array([0.1, 0.15]), 10)
    assert len(video.decode(path, np.array([0.12, 0.21]), 10)) == 2, "a fifth of a frame off is still that frame"
    with pytest.raises(FileNotFoundError, match="is missing"):
        video.decode(tmp_path / "b.mp4", np.array([0.0]), 10)


@pytest.mark.parametrize(("name", "sentence"), [("a.wav", "is no MP4, Matroska or AVI"), ("a.mkv", "holds no video")])
def test_a_file_without_pictures_is_reported(tmp_path, name, sentence):
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    with pytest.raises(DamagedFramesError, match=sentence):
        video.decode(tmp_path / name, np.array([0.0]), 10)


CONCAT = "ffconcat version 1.0\nfile {1}\n"
HLS = "#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1.0,\n{0}\n#EXT-X-ENDLIST\n"
SDP = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"


def test_a_list_of_other_files_is_no_video_and_no_picture(tmp_path, monkeypatch):
    """ffmpeg would open what it lists, if it were let take a file for whatever it looks like."""
    monkeypatch.chdir(tmp_path)
    video.encode(tmp_path / "other.mp4", pictures(SHAPE, 1, 4), 10, ONE)
    for name, text in product(("a.mp4", "a.m3u8", "a.sdp", "a.ffconcat"), (HLS, SDP, CONCAT)):
        (tmp_path / name).write_text(text.format(tmp_path / "other.mp4", "other.mp4"))
        with pytest.raises(DamagedFramesError, match=r"is no MP4, Matroska or AVI|cannot be decoded"):
            video.decode(tmp_path / name, np.array([0.0]), 10)
        with pytest.raises(DamagedFramesError, match="cannot be decoded"):
            video.decode_picture((tmp_path / name).read_bytes())


def test_only_what_is_as_large_as_declared_is_read(tmp_path):
    """Memory was counted by what is declared: a thousand times as many black pixels take no more on the disk."""
    frames, times = pictures(SHAPE, 1, 2), np.array([0.0, 0.1])
    video.encode(tmp_path / "a.mp4", frames, 10, ONE)
    for feature in (Feature("video", shape) for shape in ((32, 48, 3), (3, 32, 48), ())):
        assert video.decode(tmp_path / "a.mp4", times, 10, feature).shape == frames.shape
        assert np.array_equal(video.decode_picture(video.encode_png(frames[0]), feature), frames[0])
    match = r"holds a picture of 32 x 48 pixels where \[.*\] is declared"
    for feature in (Feature("video", shape) for shape in ((32, 46, 3), (3, 16, 48), (30, 48, 1), (32, 40))):
        with pytest.raises(DamagedFramesError, match=match):
            video.decode(tmp_path / "a.mp4", times, 10, feature)
        with pytest.raises(DamagedFramesError, match=match):
            video.decode_picture(video.encode_png(frames[0]), feature)


def test_what_is_far_larger_than_declared_is_not_even_decoded():
    with pytest.raises(DamagedFramesError, match="cannot be decoded"):
        video.decode_picture(video.encode_png(np.zeros((1200, 1200, 3), np.uint8)), Feature("image", (16, 16, 3)))


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_come_back_bit_for_bit(channels):
    frame = np.random.default_rng(0).integers(0, 256, (7, 5, channels), dtype=np.uint8)
    assert np.array_equal(video.decode_picture(video.encode_png(frame), Feature("image", frame.shape)), frame)


def test_other_pictures_are_read_too():
    frame = pictures((16, 16, 3), 2, 1)[0]
    data = {}
    for name, codec, form in (("jpeg", "mjpeg", "yuvj444p"), ("bmp", "bmp", "bgr24")):
        encoder = av.CodecContext.create(codec, "w")
        encoder.width = encoder.height = 16
        encoder.pix_fmt, encoder.time_base = form, 1
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=form)
        data[name] = b"".join(map(bytes, encoder.encode(picture) + encoder.encode(None)))
    assert np.array_equal(video.decode_picture(data["bmp"]), frame)
    assert np.abs(video.decode_picture(data["jpeg"]).astype(int) - frame).mean() < 3
    for broken in (b"", b"\x89PNG", data["jpeg"][:40]):
        with pytest.raises(DamagedFramesError, match="cannot be decoded"):
            video.decode_picture(broken)


# -- codecs of others --------------------------------------------------------------------------------------------------

LARGER = (64, 96, 3)  # x265 writes beyond its memory in pictures of 32 rows
QUIET = {"x265-params": "log-level=none"}
# A codec, its file, its pixels, the distance of key frames and how many frames may lie behind one that is shown later.
CODECS: list[tuple[str, str, str, int, int, dict[str, str]]] = [
    ("libx264", "mp4", "yuv420p", 12, 2, {"x264-params": "open-gop=1"}),
    ("libx265", "mp4", "yuv420p", 12, 2, QUIET),
    ("libvpx-vp9", "webm", "yuv420p", 7, 0, {"deadline": "realtime", "cpu-used": "8"}),
    ("mpeg4", "mp4", "yuv420p", 12, 2, {"b": "4M"}),
    ("mpeg4", "avi", "yuv420p", 12, 2, {"b": "4M"}),
    ("ffv1", "mkv", "yuv444p", 1, 0, {}),
]
MORE = [
    ("libsvtav1", "mp4", "yuv420p10le", 30, 0, {"preset": "12"}),
    ("libx264", "mkv", "yuv444p", 250, 2, {}),
    ("libx264", "avi", "yuv420p", 12, 2, {}),
    ("libx265", "mkv", "yuv420p10le", 250, 2, QUIET),
    ("libvpx-vp9", "mp4", "yuv420p", 250, 0, {"deadline": "good", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    ("mpeg4", "mp4", "yuv420p", 250, 2, {"b": "4M"}),
    ("ffv1", "avi", "bgr0", 12, 0, {}),
    ("mjpeg", "mp4", "yuvj420p", 1, 0, {}),
    ("prores", "mov", "yuv422p10le", 1, 0, {}),
]


def encoded(path: Path, codec: str, pixels: str, frames: Iterable[av.VideoFrame], gop: int = 2, **options: Any) -> Path:
    """A video of ``frames`` at 30 per second."""
    os.environ.setdefault("SVT_LOG", "1")
    with av.open(str(path), "w") as container:
        stream: Any = None
        for frame in frames:
            if stream is None:
                stream = container.add_stream(codec, rate=30, options=options)
                stream.width, stream.height, stream.pix_fmt, stream.gop_size = frame.width, frame.height, pixels, gop
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("codec", "ending", "pixels", "gop", "later", "options"),
    [*CODECS, *(pytest.param(*one, marks=pytest.mark.full) for one in MORE)],
)
def test_any_frame_of_any_codec_is_the_one_that_is_shown_then(tmp_path, codec, ending, pixels, gop, later, options):
    """Sought one by one and in pairs, frames are those of the video from its beginning, also before a key frame."""
    moving = (np.roll(pictures(LARGER, 1, 1)[0], 5 * i, 1) for i in range(30))
    shown = (av.VideoFrame.from_ndarray(frame, format="rgb24") for frame in moving)
    later = {"bf": str(later)} if later else {}
    path = encoded(tmp_path / f"a.{ending}", codec, pixels, shown, gop, **later, **options)
    with av.open(str(path)) as container:
        whole = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert len(whole) == 30 and len({frame.tobytes() for frame in whole}) == 30
    for first, count in product(range(30), (1, 2)):
        times = np.arange(first, min(first + count, 30)) / 30
        assert np.array_equal(video.decode(path, times, 30), whole[first : first + count]), (first, count)


# -- depth and brightness ----------------------------------------------------------------------------------------------

DEPTH = {"is_depth_map": True, "video.depth_min": 0.01, "video.depth_max": 10.0, "video.shift": 3.5}
RAMP = np.linspace(300, 9000, 64 * 96).reshape(64, 96).astype(np.uint16)  # millimetres


def grey(numbers: np.ndarray, form: str) -> av.VideoFrame:
    """Numbers as the brightness of a frame, as they are."""
    frame = av.VideoFrame(numbers.shape[1], numbers.shape[0], form)
    plane = frame.planes[0]
    rows = np.zeros((plane.buffer_size // plane.line_size, plane.line_size // numbers.itemsize), numbers.dtype)
    rows[: len(numbers), : numbers.shape[1]] = numbers
    plane.update(rows.tobytes())
    return frame


def test_depth_in_a_video_comes_back_in_its_unit(tmp_path):
    """As lerobot 0.6 stores it: 12 bits, in even steps of log(depth + shift) or of depth, without loss."""
    metres = RAMP / 1000
    log = np.rint(4095 * np.log((metres + 3.5) / 3.51) / np.log(13.5 / 3.51)).astype(np.uint16)
    even = np.rint(4095 * (metres - 0.01) / 9.99).astype(np.uint16)
    for codes, use_log in ((log, True), (even, False)):
        shown = [grey(codes, "gray12le"), grey(codes[::-1].copy(), "gray12le")]
        lossless = {"bf": "0", "x265-params": "lossless=1:log-level=none"}
        path = encoded(tmp_path / f"{use_log}.mp4", "libx265", "gray12le", shown, **lossless)
        info = DEPTH | {"video.use_log": use_log}
        for shape, unit, dtype, step in (((64, 96, 1), "mm", np.uint16, 3), ((1, 64, 96), "m", np.float32, 0.003)):
            feature = Feature("video", shape, info=info | {"depth_unit": unit})
            found = video.decode(path, np.array([0.0, 1 / 30]), 30, feature)
            wanted = (RAMP if unit == "mm" else metres)[..., None]
            assert found.dtype == dtype and found.shape == (2, 64, 96, 1)
            assert np.abs(found[0] - wanted.astype(float)).max() <= step
            assert np.array_equal(found[1], found[0][::-1])
        stored = video.decode(path, np.array([0.0]), 30, Feature("video", (64, 96, 1), info={"is_depth_map": True}))
        assert np.array_equal(stored[0, ..., 0], codes)
    for wrong in ({"video.depth_max": "far"}, {"video.shift": -1.0, "video.use_log": True}, {"video.use_log": None}):
        feature = Feature("video", (64, 96, 1), info={key: v for key, v in (info | wrong).items() if v is not None})
        with pytest.raises(DamagedFramesError, match="has no range of depth in info"):
            video.decode(path, np.array([0.0]), 30, feature)


def picture(codec: str, form: str, numbers: np.ndarray) -> bytes:
    encoder = av.CodecContext.create(codec, "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = numbers.shape[1], len(numbers), form, 1
    return b"".join(map(bytes, encoder.encode(grey(numbers, form)) + encoder.encode(None)))


@pytest.mark.parametrize("info", [{}, {"is_depth_map": True}])
def test_sixteen_bits_stay_sixteen_bits(tmp_path, info):
    """PNG is big-endian and TIFF is not."""
    feature = Feature("image", (64, 96, 1), info=info)
    for data in (picture("png", "gray16be", RAMP.astype(">u2")), picture("tiff", "gray16le", RAMP)):
        found = video.decode_picture(data, feature)
        assert found.dtype == np.uint16 and np.array_equal(found[..., 0], RAMP)
    path = encoded(tmp_path / "a.mkv", "ffv1", "gray16le", [grey(RAMP, "gray16le")])
    found = video.decode(path, np.array([0.0]), 30, Feature("video", (64, 96, 1), info=info))
    assert found.dtype == np.uint16 and np.array_equal(found[0, ..., 0], RAMP)


def test_metres_of_a_tiff_come_back_bit_for_bit():
    file, metres = io.BytesIO(), (RAMP / 1000).astype(np.float32)
    Image.fromarray(metres).save(file, "TIFF")
    feature = Feature("image", (64, 96, 1), info={"is_depth_map": True})
    found = video.decode_picture(file.getvalue(), feature)
    assert found.dtype == np.float32 and np.array_equal(found[..., 0], metres)
    for wrong, match in ((file.getvalue()[:-99], "cannot be decoded"), (b"II*\0", "cannot be decoded")):
        with pytest.raises(DamagedFramesError, match=match):
            video.decode_picture(wrong, feature)
    with pytest.raises(DamagedFramesError, match=r"holds a picture of 64 x 96 pixels where"):
        video.decode_picture(file.getvalue(), Feature("image", (32, 96, 1), info={"is_depth_map": True}))


def test_one_channel_is_read_as_one_and_colours_are_no_depth(tmp_path):
    frames = pictures(SHAPE, 1, 2)
    video.encode(tmp_path / "a.mp4", frames, 10, H264)
    one = video.decode(tmp_path / "a.mp4", np.array([0.0, 0.1]), 10, Feature("video", (32, 48, 1)))
    brightness = frames @ [0.299, 0.587, 0.114]
    assert one.dtype == np.uint8 and one.shape == (2, 32, 48, 1) and np.abs(one[..., 0] - brightness).mean() < 3
    with pytest.raises(DamagedFramesError, match="holds depth as rgb24, from which no distance can be told"):
        video.decode_picture(video.encode_png(frames[0]), Feature("image", (32, 48, 1), info={"is_depth_map": True}))


@pytest.mark.parametrize(
    ("shape", "wanted", "kind"),
    [
        ((64, 64, 3), "auto", "image"),
        ((96, 128, 3), "auto", "video"),
        ((97, 128, 3), "auto", "image"),
        ((128, 128, 1), "auto", "image"),
        ((480, 640, 3), "never", "image"),
        ((16, 16, 3), "always", "video"),
        ((33, 32, 3), "always", "cannot be video"),
        ((32, 32), "auto", "no pictures"),
        ((32, 32, 4), "auto", "no pictures"),
    ],
)
def test_cameras_become_video_where_it_pays(shape, wanted, kind):
    if kind not in ("image", "video"):
        with pytest.raises(ContractError, match=kind):
            video.camera(shape, 10, wanted)
        return
    feature = video.camera(shape, 10, wanted)
    assert feature.dtype == kind and feature.shape == shape and feature.is_camera
    assert bool(feature.info) == (kind == "video")


def test_the_codec_is_recorded_and_kept():
    feature = video.camera((96, 96, 3), 10, "auto", Codec("libx264", 18, 4, "slow"))
    assert feature.info["video.codec"] == "h264" and video.codec_of(feature) == Codec("libx264", 18, 4, "slow")
    assert video.codec_of(video.camera((96, 96, 3), 10, "auto")) == ONE == video.best_codec()


def test_encoding_takes_no_real_time_priority(tmp_path):
    """SVT-AV1 gives itself priority 99 when it may, and leaves the caller with it."""
    frames = np.zeros((4, 64, 64, 3), np.uint8)
    video.encode(tmp_path / "video.mp4", frames, 10.0, video.best_codec())
    found = {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER and not found & {os.SCHED_FIFO, os.SCHED_RR}
