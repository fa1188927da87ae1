"""Cameras: the newest picture at once, its age, the measured rate, and cameras that fail, hang or lie."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from robot_drivers.cameras import camera as cameras
from robot_drivers.cameras.camera import Camera, CameraError, CameraSpec, Frame, open_camera
from robot_drivers.cameras.opencv import OpenCVCamera
from robot_drivers.cameras.realsense import RealSenseCamera
from robot_drivers.feetech import Bus
from robot_drivers.franka import Franka
from robot_drivers.ur import UR
from tests.patience import PATIENCE, wait_until
from vla_rl.contract.errors import ContractError, UserError

SPEC = CameraSpec(4, 6, 30.0)


class Scripted:
    """Gives what ``script`` says, one entry a call: a stamp, an error; then it waits until it is closed."""

    spec = SPEC

    def __init__(self, *script: float | Exception) -> None:
        self.script, self.opened, self.closed = list(script), 0, 0
        self.idle, self.go_on = threading.Event(), threading.Event()

    def open(self) -> None:
        self.opened += 1

    def grab(self) -> Frame:
        if not self.script:
            self.idle.set()
            self.go_on.wait(PATIENCE)
            raise CameraError("over")
        entry = self.script.pop(0)
        if isinstance(entry, Exception):
            raise entry
        return Frame(np.full((4, 6, 3), len(self.script), np.uint8), entry)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def start():
    started = []

    def starting(source, **options) -> Camera:
        camera = Camera(source, "front", **{"retry": 0.001, **options})
        started.append((camera, source))
        camera.connect(PATIENCE)
        return camera

    yield starting
    for camera, source in started:
        if isinstance(source, Scripted):
            source.go_on.set()
        camera.disconnect()


def red_to_blue(path, count=6, size=(48, 32)) -> None:
    """``count`` pictures, of which the first is red and the last blue, as files that OpenCV numbers."""
    for at in range(count):
        share = at / (count - 1)
        picture = np.zeros((size[1], size[0], 3), np.uint8)
        picture[:] = (round(255 * share), 0, round(255 * (1 - share)))  # BGR, as OpenCV writes them
        assert cv2.imwrite(str(path / f"{at:03d}.png"), picture)


def test_opencv_reads_a_sequence_in_rgb_and_begins_again(tmp_path, start):
    red_to_blue(tmp_path)
    source = OpenCVCamera(str(tmp_path / "%03d.png"), 32, 48)
    colors = []
    grab = source.grab

    def noted() -> Frame:
        frame = grab()
        colors.append(frame.image[0, 0].tolist())
        return frame

    source.grab = noted
    camera = start(source)
    wait_until(lambda: len(colors) > 8)
    assert colors[:7] == [*([255 - 51 * at, 0, 51 * at] for at in range(6)), [255, 0, 0]]
    assert camera.failures >= 1 and camera.fps > 0
    frame = camera.read()
    assert frame.image.shape == (32, 48, 3) and frame.image.dtype == np.uint8 and frame.image.flags.c_contiguous


def test_a_camera_that_is_unplugged_is_opened_again(tmp_path, start):
    red_to_blue(tmp_path, count=2)
    camera = start(OpenCVCamera(str(tmp_path / "%03d.png"), 32, 48))
    for picture in tmp_path.iterdir():
        picture.unlink()
    wait_until(lambda: "cannot open" in camera.error)
    last = camera.read()
    red_to_blue(tmp_path, count=3)
    wait_until(lambda: camera.read().captured > last.captured)
    assert camera.is_connected


def test_a_picture_ages_is_a_copy_and_one_of_no_time_is_not_used(start):
    source = Scripted(100.0, float("nan"))
    reused, grab = np.zeros((4, 6, 3), np.uint8), source.grab
    source.grab = lambda: Frame(reused, grab().captured)
    camera = start(source, max_age=0.5)
    source.idle.wait(PATIENCE)
    reused[:] = 9
    assert camera.read().captured == 100.0 and not camera.read().image.any() and camera.failures == 1
    assert not camera.stale(100.5) and camera.stale(100.6) and camera.stale(float("nan"))
    assert Camera(Scripted()).stale(0.0)


def test_the_rate_is_that_of_the_last_frames(start):
    source = Scripted(*(at / 10 for at in range(50)), *(5 + at / 20 for at in range(30)))
    camera = start(source)
    assert Camera(Scripted()).fps == 0.0
    source.idle.wait(PATIENCE)
    assert camera.fps == pytest.approx(20.0)


def test_a_camera_that_hangs_keeps_nobody_waiting(start, monkeypatch):
    monkeypatch.setattr(cameras, "_LEAVE", 0.01)
    source = Scripted(1.0)
    camera = start(source)
    source.idle.wait(PATIENCE)
    assert camera.read().captured == 1.0 and camera.stale(time.monotonic())
    camera.disconnect()
    camera.disconnect()
    assert not camera.is_connected


def test_failures_are_counted_told_and_mended(start):
    source = Scripted(1.0, CameraError("the cable is loose"), CameraError("still"), 2.0)
    camera = start(source)
    source.idle.wait(PATIENCE)
    assert (camera.failures, source.opened, source.closed) == (2, 3, 2)
    assert camera.error == "" and camera.read().captured == 2.0


def test_no_picture_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(cameras, "_LEAVE", 0.01)
    silent = Scripted()
    with pytest.raises(UserError, match=r"'front' gave no picture in 0.01 s \(it is silent\)"):
        Camera(silent, "front").connect(0.01)
    silent.go_on.set()
    missing = Camera(OpenCVCamera(str(tmp_path / "%03d.png")), "front")
    monkeypatch.setattr(missing._first, "wait", lambda patience: wait_until(lambda: missing.error))
    with pytest.raises(UserError, match=r"'front' gave no picture in 1 s \(OpenCV cannot open"):
        missing.connect(1.0)
    with pytest.raises(CameraError, match="no picture yet"):
        missing.read()
    with pytest.raises(UserError, match="fourcc='MJPEG'"):
        OpenCVCamera(0, fourcc="MJPEG")


@pytest.mark.parametrize(
    ("module", "opens", "extra"),
    [
        ("cv2", lambda: Camera(OpenCVCamera(0)).connect(PATIENCE), "robot"),
        ("pyrealsense2", lambda: Camera(RealSenseCamera()).connect(PATIENCE), "realsense"),
        ("rtde_control", lambda: UR("somewhere").connect(), "ur"),
        ("franky", lambda: Franka("somewhere").connect(), "franka"),
        ("serial", lambda: Bus("/dev/null").open(), "robot"),
    ],
)
def test_without_its_library_the_extra_of_a_device_is_named(module, opens, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"vla-rl\[{extra}\]"):
        opens()


class RecordedRealSense:
    """pyrealsense2 as its reference says (github.com/IntelRealSense/librealsense, wrappers/python): a pipeline whose
    ``wait_for_frames`` raises RuntimeError when nothing comes, and frames whose memory belongs to the pipeline."""

    stream, format = SimpleNamespace(color="color"), SimpleNamespace(rgb8="rgb8")

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.memory = np.full((4, 6, 3), 7, np.uint8)
        self.fails = {"start": "", "wait": ""}

    def config(self):
        return SimpleNamespace(**{name: self._noting(name) for name in ("enable_device", "enable_stream")})

    def pipeline(self):
        return SimpleNamespace(
            start=lambda config: self._noting("start")(), stop=self._noting("stop"), wait_for_frames=self.wait
        )

    def wait(self, timeout_ms: int):
        self._fail("wait")
        self.memory += 1
        return SimpleNamespace(get_color_frame=lambda: SimpleNamespace(get_data=lambda: self.memory))

    def _noting(self, name: str):
        def noted(*given: object) -> None:
            self.calls.append((name, *given))
            self._fail(name)

        return noted

    def _fail(self, what: str) -> None:
        if self.fails.get(what):
            raise RuntimeError(self.fails[what])


def test_realsense_is_asked_as_its_reference_says(monkeypatch):
    library = RecordedRealSense()
    monkeypatch.setitem(sys.modules, "pyrealsense2", library)
    source = RealSenseCamera("0123", height=4, width=6, fps=15)
    source.open()
    assert library.calls == [("enable_device", "0123"), ("enable_stream", "color", 6, 4, "rgb8", 15), ("start",)]
    before = time.monotonic()
    first, second = source.grab(), source.grab()
    assert before <= first.captured <= second.captured <= time.monotonic()
    assert first.image.max() == 8 and second.image.max() == 9, "a picture is our own copy"
    library.fails = {"start": "No device connected", "wait": "Frame didn't arrive within 1000"}
    with pytest.raises(CameraError, match="RealSense 0123 is silent: Frame didn't arrive"):
        source.grab()
    source.close()
    source.close()
    assert library.calls[-1] == ("stop",) and library.calls.count(("stop",)) == 1
    with pytest.raises(CameraError, match="does not start: No device connected"):
        source.open()


def test_a_camera_is_opened_by_name_and_has_to_give_frames(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyrealsense2", RecordedRealSense())
    options = {"height": 4, "width": 6}
    camera = open_camera("robot_drivers.cameras.realsense:RealSenseCamera", options, "wrist", max_age=9.0)
    camera.connect(PATIENCE)
    assert camera.read().image.shape == (4, 6, 3) and (camera.name, camera.max_age) == ("wrist", 9.0)
    camera.disconnect()
    with pytest.raises(ContractError, match="made a dict, which has no spec, no open, no grab, no close"):
        open_camera("builtins:dict", {})
