"""The cameras of simulators with many tasks: pictures are those of the task, and few renderers are open."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sims.base import CameraRig
from sims.mujoco.canvas import Canvas

SCENE = """<mujoco><worldbody><light pos="0 0 2"/><camera name="top" pos="0 0 1"/>
<geom type="box" size="0.3 0.3 0.1" rgba="{} 1"/></worldbody></mujoco>"""
COLOURS = {"red": "1 0 0", "green": "0 1 0", "blue": "0 0 1"}


@pytest.fixture
def scenes():
    models = {name: mujoco.MjModel.from_xml_string(SCENE.format(colour)) for name, colour in COLOURS.items()}
    scenes = {name: (model, mujoco.MjData(model)) for name, model in models.items()}
    for model, data in scenes.values():
        mujoco.mj_forward(model, data)
    return scenes


def test_every_task_has_its_own_picture_and_the_renderer_that_was_used_longest_ago_is_closed(scenes, monkeypatch):
    closed = []
    real = Canvas.close
    monkeypatch.setattr(Canvas, "close", lambda one: closed.append(one) or real(one))
    rig = CameraRig(["top"], 16, most=2)
    for name in ("red", "green", "red", "blue", "red", "green"):
        picture = rig.images(name, *scenes[name])["top"]
        assert picture.shape == (16, 16, 3) and np.argmax(picture[8, 8]) == list(COLOURS).index(name)
    assert len(closed) == 2  # green's for blue, blue's for green
    rig.close()
    rig.close()
    assert len(closed) == 4


def test_without_cameras_nothing_is_rendered(scenes):
    rig = CameraRig([], 16, most=1)
    assert rig.images("red", *scenes["red"]) == {} and not rig._canvases
