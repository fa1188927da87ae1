"""Frames through MP4 and PNG: the right frame at the right time, within the codec's tolerance; joined without loss."""

from __future__ import annotations

import os
from itertools import product

import av
import numpy as np
import pytest

from tests.experience.lerobot_makers import FPS, MEAN_ERROR, WORST_ERROR, pictures
from vla_rl.contract.errors import ContractError
from vla_rl.experience.lerobot import video
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
            video.decode_picture((tmp_path / name).read_bytes(), 3)


def test_only_what_is_as_large_as_declared_is_read(tmp_path):
    """Memory was counted by what is declared: a thousand times as many black pixels take no more on the disk."""
    frames, times = pictures(SHAPE, 1, 2), np.array([0.0, 0.1])
    video.encode(tmp_path / "a.mp4", frames, 10, ONE)
    for shape in ((32, 48, 3), (3, 32, 48), (32, 48, 1), (32, 48), ()):
        assert video.decode(tmp_path / "a.mp4", times, 10, shape).shape == frames.shape
        assert np.array_equal(video.decode_picture(video.encode_png(frames[0]), 3, shape), frames[0])
    match = r"holds a picture of 32 x 48 pixels where \[.*\] is declared"
    for shape in ((32, 46, 3), (3, 16, 48), (30, 48, 1), (32, 40)):
        with pytest.raises(DamagedFramesError, match=match):
            video.decode(tmp_path / "a.mp4", times, 10, shape)
        with pytest.raises(DamagedFramesError, match=match):
            video.decode_picture(video.encode_png(frames[0]), 3, shape)


def test_what_is_far_larger_than_declared_is_not_even_decoded():
    with pytest.raises(DamagedFramesError, match="cannot be decoded"):
        video.decode_picture(video.encode_png(np.zeros((1200, 1200, 3), np.uint8)), 3, (16, 16, 3))


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_come_back_bit_for_bit(channels):
    frame = np.random.default_rng(0).integers(0, 256, (7, 5, channels), dtype=np.uint8)
    assert np.array_equal(video.decode_picture(video.encode_png(frame), channels), frame)


def test_other_pictures_are_read_too():
    frame = pictures((16, 16, 3), 2, 1)[0]
    data = {}
    for name, codec, form in (("jpeg", "mjpeg", "yuvj444p"), ("bmp", "bmp", "bgr24")):
        encoder = av.CodecContext.create(codec, "w")
        encoder.width = encoder.height = 16
        encoder.pix_fmt, encoder.time_base = form, 1
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format=form)
        data[name] = b"".join(map(bytes, encoder.encode(picture) + encoder.encode(None)))
    assert np.array_equal(video.decode_picture(data["bmp"], 3), frame)
    assert np.abs(video.decode_picture(data["jpeg"], 3).astype(int) - frame).mean() < 3
    for broken in (b"", b"\x89PNG", data["jpeg"][:40]):
        with pytest.raises(DamagedFramesError, match="cannot be decoded"):
            video.decode_picture(broken, 3)


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
