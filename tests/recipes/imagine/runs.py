"""What a run of ``Imagine`` leaves, made of small parts that nobody trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.commands import save_untrained
from tests.world_models import pushing, small_models
from vla_rl.contract.env import Observation
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel, recorded_initial_states
from vla_rl.recipes.imagine.plan import CollectConfig, Plan
from vla_rl.recipes.imagine.play import Steering, steering_of
from vla_rl.recipes.imagine.recipe import Imagine, SavedRun
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.trainers import RLConfig
from vla_rl.training.fit import FitConfig
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import RunFolder
from vla_rl.training.world_model import WorldModelFit
from world_models.config import ImaginationConfig, Limits, WorldModelConfig
from world_models.env import ImaginedEnv
from world_models.initial_states import KeyframeConfig
from world_models.model import WorldModel

NAMES = ("dx", "grip")  # from -0.5 to 0.5, and from -2 to 1
FAR = Limits((1e9, 2e9))  # no uncertainty comes near
CALM = ImaginationConfig(
    horizon=12, batch_size=4, success_threshold=2.0, failure_threshold=2.0
)  # nothing but time and uncertainty ends an imagined rollout


def small_recipe(folder: Path, horizon: int, loop: LoopConfig, decisions: int = 1, **plan: Any) -> Imagine:
    """Lift, imagined by the smallest of everything, and trusted whatever comes out; with two demonstrations."""
    save_demonstrations(collect(EnvConfig("lift"), 2, seed=1), folder / "demonstrations", video="never")
    given = {
        "collect": CollectConfig(2, 1, 2, calibration=1, held_out=2, num_envs=4),
        "demonstrations": str(folder / "demonstrations"),
        "fit": WorldModelFit(*[FitConfig(steps=2, batch=4)] * 4),
        "refit": WorldModelFit(*[FitConfig(steps=1, batch=4)] * 4),
        "trust": TrustConfig(max_hallucinated=1.0, max_missed=1.0),
        **plan,
    }
    imagination = ImaginationConfig(horizon=horizon, deadline=horizon, batch_size=4)
    whole = Plan(WorldModelConfig(backbone=small_models.SMALL), imagination, KeyframeConfig(), **given)
    method = RLConfig(FlowSampler(FlowSde(0.5), LastStep(), 4), WindowConfig(4, decisions), loop=loop)
    evaluation = EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4)
    env = EnvConfig("lift", options={"deadline": max(7, horizon + 2)})
    return Imagine(method, str(save_untrained(folder / "policy")), plan=whole, env=env, evaluation=evaluation)


def one_env(run: SavedRun, recorded: Trajectories | None = None, **numbers: Any) -> ImaginedEnv:
    """A single imagined environment that begins like ``recorded`` or held-out episodes; nothing ends a rollout."""
    config = replace(CALM, **{"resamples": 0, "mid_call_steps": 0, "batch_size": 1, **numbers})
    pool = recorded_initial_states(run.calibrated.model, recorded or run.held_out)
    return ImaginedEnv(run.calibrated.model, pool, 1, None, config)


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
