"""Training the world model of a run: at first, from nothing or another run's, and again after a purchase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.contract.trust import read_json
from vla_rl.recipes import world_models
from vla_rl.recipes.context import generator
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel, calibrate
from vla_rl.recipes.imagine.plan import Plan
from vla_rl.recipes.imagine.run_episodes import RunEpisodes
from vla_rl.recipes.progress import bar
from vla_rl.training.precision import fastest_precision
from vla_rl.training.tracking import RunFolder, write_json
from vla_rl.training.world_model import WorldModelFit, fit_world_model, load_world_model, save_world_model, statistics

_SHOWN = ("state_dynamics", "mode_classifier", "pose", "video", "outcome", "reward")  # losses beside the progress bar


def load_or_train(
    folder: RunFolder, spec: EnvSpec, episodes: RunEpisodes, plan: Plan, seed: int, device: torch.device
) -> CalibratedModel:
    """The calibrated world model before any purchase, as an earlier part of the run left it or new ("first", "world").

    The weights come from training, or from the run ``plan.init_from``; the calibration is always this run's.  Raises
    UserError when no horizon is trusted; the weights are kept, for a run that asks for less.
    """
    kept = world_after(folder, 0)
    if (kept / "config.json").exists():
        return CalibratedModel.load(kept, plan.imagination, device)
    if plan.init_from:
        model = load_world_model(Path(plan.init_from) / "checkpoints" / "first", spec)[0].to(device)
    else:
        model = _new_model(folder, spec, episodes, plan, seed, device)
        train_model(model, episodes, plan.fit, seed, folder)
    save_world_model(model, folder.checkpoint("first"))
    try:
        calibrated = calibrate(model, episodes.calibration, plan)
    except UserError as error:
        hint = f"The world model is kept: --plan.init-from {folder.path} calibrates it again without training."
        raise UserError(f"{error} {hint}") from error
    calibrated.save(kept)
    return calibrated


def world_after(folder: RunFolder, purchases: int) -> Path:
    """The checkpoint of the world model after so many purchases: "world", or "world-<n>" where that is a later one."""
    earlier = folder.checkpoint(f"world-{purchases}")
    return earlier if (earlier / "config.json").exists() else folder.checkpoint("world")


def train_model(
    model: world_models.WorldModel, episodes: RunEpisodes, fit: WorldModelFit, seed: int, folder: RunFolder
) -> None:
    """Train ``model`` in place on all of ``episodes.learnt``."""

    def report(step: int, info: dict[str, float]) -> None:
        update(step + 1, ", ".join(f"{name} {info[name]:.3f}" for name in _SHOWN if name in info))
        if (step + 1) % 25 == 0:
            folder.log(f"world after {episodes.bought} bought", step, info)

    with bar("train the world model", fit.steps) as update:
        fit_world_model(model.train(), episodes.learnt, fit, generator(seed, 2000 + episodes.bought), report)
    model.eval()


def _new_model(
    folder: RunFolder, spec: EnvSpec, episodes: RunEpisodes, plan: Plan, seed: int, device: torch.device
) -> world_models.WorldModel:
    torch.manual_seed(seed)  # module initialisation has no generator argument
    config = replace(plan.model, precision=_precision(folder, plan, device))
    return world_models.new_model(spec, config, statistics(episodes.learnt)).to(device)


def _precision(folder: RunFolder, plan: Plan, device: torch.device) -> str:
    """The plan's precision; "auto" is measured once in a run and kept in ``RUN/precision.json``."""
    if plan.model.precision != "auto":
        return str(plan.model.precision)
    kept = folder.path / "precision.json"
    if not kept.exists():
        write_json(kept, fastest_precision(device))
    return str(read_json(kept))
