"""Rendering: our renderer against ``mujoco.Renderer``, used as documented."""

from __future__ import annotations

import copy
import importlib
from contextlib import closing
from typing import Any
from unittest.mock import patch

import mujoco
import numpy as np

from sims.mujoco.generators import Generators
from sims.mujoco.render import Renderer
from sims.mujoco.tasks.lift import LiftTask
from tests.benchmarks.measure import Contender, Row, interleave, rate_row

CAMERA = "front"


def render_vs_mujoco(quick: bool = False) -> list[Row]:
    """Pictures per second of 64x64 pixels from the same states, model, camera, colours and OpenGL."""
    count, size, repeats = (2, 64, 1) if quick else (64, 64, 15)
    task = LiftTask()
    qpos, colours = _states(task, count)
    ours, pictures = Renderer(task, size), np.empty((count, size, size, 3), np.uint8)
    opengl, nowhere = type(ours._canvas.gl), np.empty((count, 0, 3))  # lift has no marks
    theirs = _Theirs(task, size, opengl, qpos, colours)
    with closing(ours), closing(theirs.renderer):
        contenders = {
            "ours": Contender(lambda: ours.render(qpos, colours, nowhere, CAMERA, pictures)),
            "other": Contender(lambda: theirs.render(mujoco.mj_forward)),
            "kinematics": Contender(lambda: theirs.render(mujoco.mj_kinematics)),
        }
        seconds = interleave(contenders, repeats)
    assert np.array_equal(pictures, theirs.pictures), "the pictures differ, so the comparison is not fair"
    detail = {"backend": opengl.__module__, "other_with_mj_kinematics_only": round(count / seconds["kinematics"])}
    pair = (seconds["ours"], seconds["other"])
    return [
        rate_row("render_vs_mujoco", "render_vs_mujoco", count, pair, "pictures/s", batch=count, size=size, **detail)
    ]


class _Theirs:
    """``mujoco.Renderer`` with a buffer and a scene of the same size as ours."""

    def __init__(self, task: LiftTask, size: int, opengl: type, qpos: np.ndarray, colours: np.ndarray) -> None:
        self.model = copy.copy(task.model)
        self.model.vis.global_.offheight = self.model.vis.global_.offwidth = size
        self.data, self.painted = mujoco.MjData(self.model), np.asarray(task.painted)
        self.qpos, self.colours = qpos, colours
        self.pictures = np.empty((len(qpos), size, size, 3), np.uint8)
        # It chooses its OpenGL when mujoco is imported; this makes it use the backend of our renderer.
        with patch.object(importlib.import_module("mujoco.rendering.classic.gl_context"), "GLContext", opengl):
            self.renderer = mujoco.Renderer(self.model, size, size, max_geom=self.model.ngeom + 8)
        mujoco.mj_forward(self.model, self.data)

    def render(self, compute: Any) -> None:
        """For every state: set it, ``compute`` the derived quantities, update the scene, render."""
        for row, (qpos, colours) in enumerate(zip(self.qpos, self.colours, strict=True)):
            self.data.qpos[:] = qpos
            self.model.geom_rgba[self.painted] = colours
            compute(self.model, self.data)
            self.renderer.update_scene(self.data, CAMERA)
            self.renderer.render(out=self.pictures[row])


def _states(task: LiftTask, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Initial states of ``count`` episodes: ``qpos`` [count,nq] and colours [count,painted,4]."""
    episodes = task.sample_episodes(Generators.of_seeds(np.arange(count)))
    return episodes.qpos, task.colours(episodes.task_state)
