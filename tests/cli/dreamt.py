"""What a run of ``Imagine`` leaves, made of small parts that nobody trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.world_models import dreams, pushing
from vla_rl.cli.configs import load_config
from vla_rl.cli.dreamt import Dreamt
from vla_rl.cli.play import steering_of
from vla_rl.cli.steering import Steering
from vla_rl.contract.env import Observation
from vla_rl.policies.function import FunctionPolicy
from vla_rl.training.tracking import RunFolder
from vla_rl.training.world_model import save_world
from world_models.env import DreamConfig
from world_models.model import WorldModel
from world_models.uncertainty import Limits

NAMES = ("dx", "grip")  # from -0.5 to 0.5, and from -2 to 1
CALM = DreamConfig(horizon=12, part=4, done=2.0, failed=2.0)  # nothing but time and doubt ends a dream


def world_model(names: tuple[str, ...] = NAMES, cameras: tuple[str, ...] = ("front",)) -> WorldModel:
    made = dreams.model(cameras)
    made.spec = replace(made.spec, action=replace(made.spec.action, names=names, unit="m,1"))
    return made


def run_folder(
    path: Path,
    dream: DreamConfig = CALM,
    limits: tuple[float, ...] = (np.inf,),
    names: tuple[str, ...] = NAMES,
    policy: bool = True,
) -> Path:
    """A run in ``path`` with ten held-out episodes and, unless told otherwise, a policy."""
    folder, model = RunFolder(path, replace(load_config("configs/imagine.py:lift"), dream=dream)), world_model(names)
    save_world(model, folder.checkpoint("world"), {"limits": list(limits)})
    (path / "episodes").mkdir()
    pushing.played(10, seed=3).save(path / "episodes" / "held_out.npz")
    if policy:
        FunctionPolicy(model.spec, push, "tests.cli.dreamt:push").save_pretrained(folder.checkpoint("best"))
    return path


def steered(run: Dreamt, steps: int) -> Steering:
    """A dream of ``run`` under limits that it never reaches: it is of a model that nobody trained."""
    return steering_of(replace(run, limits=Limits((1e3, 2e3))), steps)[0]


def push(obs: Observation) -> np.ndarray:
    """[E,2,2]: two control steps that depend on what is seen, the gripper nearly closed at last."""
    along = np.asarray(obs.images["front"], float).mean((1, 2, 3)) / 255 - 0.5
    return np.stack([np.stack([along, 0 * along], 1), np.stack([-along, 0 * along + 0.9], 1)], 1)
