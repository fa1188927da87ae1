"""What a run of ``Imagine`` leaves, made of small parts that nobody trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.world_models import pushing, small_models
from vla_rl.contract.env import Observation
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel
from vla_rl.recipes.imagine.play import Steering, steering_of
from vla_rl.recipes.imagine.recipe import SavedRun
from vla_rl.training.tracking import RunFolder
from world_models.config import ImaginationConfig, Limits
from world_models.model import WorldModel

NAMES = ("dx", "grip")  # from -0.5 to 0.5, and from -2 to 1
FAR = Limits((1e9, 2e9))  # no uncertainty comes near
CALM = ImaginationConfig(
    horizon=12, batch_size=4, success_threshold=2.0, failure_threshold=2.0
)  # nothing but time and uncertainty ends an imagined rollout


def world_model(names: tuple[str, ...] = NAMES, cameras: tuple[str, ...] = ("front",)) -> WorldModel:
    """Weights so small that probabilities are neither 0 nor 1."""
    made = small_models.model(cameras)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.7)
    made.spec = replace(made.spec, action=replace(made.spec.action, names=names, unit="m,1"))
    return made


def run_folder(
    path: Path,
    imagination: ImaginationConfig = CALM,
    limits: tuple[float, ...] = (np.inf,),
    names: tuple[str, ...] = NAMES,
    policy: bool = True,
) -> Path:
    """A run in ``path`` with ten held-out episodes, two of calibration and, by default, a policy."""
    recipe, model = load_config("configs/imagine.py:lift"), world_model(names)
    folder = RunFolder(path, replace(recipe, plan=replace(recipe.plan, imagination=imagination)))
    CalibratedModel(model, Limits(limits), imagination).save(folder.checkpoint("world"))
    (path / "episodes").mkdir()
    for name, count, seed in (("held_out", 10, 11), ("calibration", 2, 12)):
        pushing.played(count, seed=seed).save(path / "episodes" / f"{name}.npz")
    if policy:
        FunctionPolicy(model.spec, push, "tests.recipes.imagine.runs:push").save_pretrained(folder.checkpoint("best"))
    return path


def steered(run: SavedRun, steps: int) -> Steering:
    """An imagined rollout of ``run`` under limits that it never reaches: it is of a model that nobody trained."""
    return steering_of(changed(run, limits=FAR), steps)[0]


def changed(run: SavedRun, **parts: Any) -> SavedRun:
    """``run`` with other limits or another imagined rollout."""
    return replace(run, calibrated=replace(run.calibrated, **parts))


def push(obs: Observation) -> np.ndarray:
    """[E,2,2]: two control steps that depend on the picture; in the second the gripper is nearly closed."""
    along = np.asarray(obs.images["front"], float).mean((1, 2, 3)) / 255 - 0.5
    return np.stack([np.stack([along, 0 * along], 1), np.stack([-along, 0 * along + 0.9], 1)], 1)
