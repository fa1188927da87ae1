"""Lift in Genesis against Genesis alone: what the environment around the physics costs."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from typing import Any

import numpy as np
import torch

from sims import genesis as ours
from sims.catalog import make
from tests.benchmarks.measure import Contender, NotRun, Row, interleave, rate_row

GROUP = "genesis_vs_alone"


def genesis_vs_alone(quick: bool = False) -> list[Row]:
    """Control steps per second in chunks of 5, without pictures; raises NotRun without Genesis.

    The opponent is Genesis with the same arm, cubes, settings and number of environments, in this process: it is given
    the joint targets that our actions amount to, steps as often and hands out its state.  It has no actions, rules,
    episodes or observations, and does not survive an environment that diverges.  This runs on a GPU where there is one.
    """
    if importlib.util.find_spec("genesis") is None:
        raise NotRun("not run: genesis is not installed beside vla-rl; pip install 'vla-rl[genesis]'")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_envs, chunk, repeats = (2, 1, 1) if quick else (4096 if device == "cuda" else 64, 5, 7)
    env = make("genesis", num_envs=num_envs, device=device, cameras=[])
    env_ids = np.arange(num_envs)
    actions = np.random.default_rng(0).uniform(-0.02, 0.02, (num_envs, chunk, 4)).astype(np.float32)
    with closing(env), closing(_Alone(actions, device)) as alone:

        def play() -> None:
            step = env.step(actions)
            _finish(device)
            assert step.valid.all()

        def play_alone() -> None:
            alone.play()
            _finish(device)

        contenders = {
            "ours": Contender(play, lambda: env.reset(env_ids, env_ids)),
            "alone": Contender(play_alone, alone.begin),
        }
        seconds = interleave(contenders, repeats)
    pair = (seconds["ours"], seconds["alone"])
    return [rate_row(GROUP, GROUP, num_envs * chunk, pair, "steps/s", envs=num_envs, device=device)]


class _Alone:
    """A scene of Genesis with what our environment has in it, and nothing of ours around it."""

    def __init__(self, actions: np.ndarray, device: str) -> None:
        """``actions`` [E,H,D] are turned into joint targets here, once."""
        env, env_ids = make("genesis", num_envs=len(actions), device=device, cameras=[]), np.arange(len(actions))
        env.reset(env_ids, env_ids)
        self._start = env._rows[env_ids]
        self._targets = []
        for number in range(actions.shape[1]):
            env.step(actions[:, number : number + 1])
            fingers = env._ctrl[:, 3:].expand(-1, 2)
            self._targets.append(torch.cat([ours.joints_at(env._ctrl[:, :3]), fingers], 1))
        self._steps, self.close = env._steps, env.close
        self._scene, self._solver, self._arm = env._scene._scene, env._scene._solver, env._scene._arm

    def begin(self) -> None:
        """The scenes that ours begin with, at rest."""
        self._solver.set_qpos(self._start.qpos)
        self._solver.set_dofs_velocity(self._start.vel)

    def play(self) -> list[Any]:
        """One control step for each of ours; returns positions and velocities after each."""
        found = []
        for target in self._targets:
            self._arm.control_dofs_position(target)
            for _ in range(self._steps):
                self._scene.step()
            found.append((self._solver.get_qpos(), self._solver.get_dofs_velocity()))
        return found


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
