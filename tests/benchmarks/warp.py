"""The tabletop on MuJoCo-Warp against MuJoCo-Warp alone: what the environment around the physics costs."""

from __future__ import annotations

import copy

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp

from sims.catalog import make
from sims.mujoco.generators import Generators
from sims.mujoco.task import Task
from sims.warp_env import CONSTRAINTS, CONTACTS
from tests.benchmarks.measure import Contender, Row, interleave, rate_row

_SIZE = 64  # pixels


def warp_vs_alone(quick: bool = False) -> list[Row]:
    """Control steps per second in chunks of 5, without and with a picture of 64x64 of every chunk.

    The opponent calls ``mujoco_warp.step`` as often from the same scenes with as much room for contacts, and renders
    with the same settings; it has no actions, rules, episodes or observations.  Both record their steps as a graph;
    this runs on a GPU where there is one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_envs, chunk, repeats = (2, 1, 1) if quick else (4096 if device == "cuda" else 64, 5, 5)
    return [measured(num_envs, chunk, repeats, device, pictures) for pictures in (False, True)]


def measured(num_envs: int, chunk: int, repeats: int, device: str, pictures: bool) -> Row:
    """One row of :func:`warp_vs_alone`."""
    env = make("warp", num_envs=num_envs, device=device, render=pictures, image_size=_SIZE)
    env_ids = np.arange(num_envs)
    actions = np.random.default_rng(0).uniform(-0.02, 0.02, (num_envs, chunk, 4)).astype(np.float32)

    def play() -> None:
        step = env.step(actions)
        if device == "cuda":
            torch.cuda.synchronize()
        assert step.valid.all()

    contenders = {
        "ours": Contender(play, lambda: env.reset(env_ids, env_ids)),
        "alone": _alone(env.task, num_envs, chunk * env.task.substeps, device, pictures),
    }
    seconds = interleave(contenders, repeats)
    name = "warp_vs_alone" + (f", pictures of {_SIZE}x{_SIZE}" if pictures else "")
    pair = (seconds["ours"], seconds["alone"])
    return rate_row(name, "warp_vs_alone", num_envs * chunk, pair, "steps/s", envs=num_envs, device=device)


def _alone(task: Task, num_envs: int, substeps: int, device: str, pictures: bool) -> Contender:
    """``substeps`` steps of the bare library from the same scenes, and a picture of every world after them."""
    episodes = task.sample_episodes(Generators.of_seeds(np.arange(num_envs)))
    host = copy.copy(task.model)
    host.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    with wp.ScopedDevice(device):
        model = mjw.put_model(host)
        model.opt.warn_overflow = 0
        data = mjw.make_data(host, nworld=num_envs, nconmax=CONTACTS, njmax=CONSTRAINTS)
        mjw.step(model, data)  # compiles
        with wp.ScopedCapture() as capture:
            mjw.step(model, data)
        camera = mjw.create_render_context(
            host,
            num_envs,
            (_SIZE, _SIZE),
            render_rgb=True,
            render_depth=False,
            render_seg=False,
            use_textures=False,
            cam_active=["front"] if pictures else [],
            enable_specular=False,
            enable_emission=False,
        )

    def prepare() -> None:
        data.qpos.assign(episodes.qpos)
        data.ctrl.assign(episodes.ctrl)
        for zero in (data.qvel, data.qacc_warmstart):
            zero.zero_()

    def play() -> None:
        with wp.ScopedDevice(device):
            for _ in range(substeps):
                wp.capture_launch(capture.graph)
            if pictures:
                mjw.refit_bvh(model, data, camera)
                mjw.render(model, data, camera)
            wp.synchronize_device()

    return Contender(play, prepare)
