"""A run that buys real episodes is killed anywhere and ends as an undisturbed one; every purchase is learnt from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.held import Killed
from tests.recipes.imagine.runs import small_recipe
from vla_rl.contract.errors import UserError
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.recipes.imagine import calibrated_model, plan
from vla_rl.recipes.imagine import recipe as imagination
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel, calibrate
from vla_rl.recipes.imagine.plan import CollectConfig, Plan
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.training.loop import Loop, LoopConfig
from vla_rl.training.tracking import RunFolder, read_metrics
from vla_rl.training.world_model import CoevolutionConfig

HORIZONS = (5, 10, 5)  # trusted before any purchase, after the first and after the second
ITERATIONS = 5  # decisions before the third and the fifth


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Imagine:
    """Two purchases of one episode each: the signal of uncertainty always fires."""
    return small_recipe(
        tmp_path_factory.mktemp("before"),
        10,
        LoopConfig(ITERATIONS, validate_every=2, save_every=2),
        collect=CollectConfig(2, 1, 1, calibration=1, held_out=1, num_envs=4),
        coevolution=CoevolutionConfig(budget=2, batch=1, every=2, uncertainty_rise=-1.0),
    )


@pytest.fixture(autouse=True)
def horizons(monkeypatch):
    """The horizons are those of HORIZONS, whatever would be trusted."""

    def chosen(model: Any, trajectories: Trajectories, plan: Plan) -> CalibratedModel:
        found = calibrate(model, trajectories, plan)
        return replace(found, imagination=replace(found.imagination, horizon=HORIZONS[counted["purchases"]]))

    counted = {"purchases": 0}
    use = plan.RunEpisodes.use

    def counting(self: plan.RunEpisodes, purchases: int) -> None:
        counted["purchases"] = purchases
        use(self, purchases)

    monkeypatch.setattr(plan.RunEpisodes, "use", counting)
    for module in (imagination, calibrated_model):
        monkeypatch.setattr(module, "calibrate", chosen)


@dataclass(frozen=True)
class Left:
    """What a run leaves."""

    weights: dict[str, dict[str, torch.Tensor]]
    metrics: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    summary: dict[str, Any]

    @classmethod
    def of(cls, run: Path, summary: dict[str, Any]) -> Left:
        files = ["checkpoints/best/model", "checkpoints/world/model", f"state/{ITERATIONS - 1:08d}/tensors"]
        lines = [{k: v for k, v in line.items() if not k.endswith("_s")} for line in read_metrics(run)]
        return cls(
            {name: load_file(run / f"{name}.safetensors") for name in files},
            sorted(lines, key=lambda line: (line["stage"], line["step"])),
            json.loads((run / "coevolution.json").read_text()),
            {name: value for name, value in summary.items() if name != "seconds"},
        )


def run_of(recipe: Imagine, path: Path) -> Left:
    folder = RunFolder(path, recipe)
    found = recipe.run(folder)
    folder.close()
    return Left.of(path, found)


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> list[Left]:
    return []  # filled by the first test that needs it, under its patches


def raise_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, turn: int, after: bool = False) -> None:
    """``owner.name`` raises Killed the ``turn``-th time that it is called, before or after it has done its work."""
    real, calls = getattr(owner, name), []

    def replaced(*given: Any, **more: Any) -> Any:
        calls.append(None)
        if len(calls) == turn and not after:
            raise Killed
        found = real(*given, **more)
        if len(calls) == turn:
            raise Killed
        return found

    monkeypatch.setattr(owner, name, replaced)


KILLS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "while episodes are bought": lambda patch: raise_at(patch, plan, "collect_trajectories", 1),
    "while learning from the second purchase": lambda patch: raise_at(patch, imagination, "train_model", 2),
    "when the world model has grown": lambda patch: raise_at(patch, imagination.WorldModelRun, "_refit", 1, True),
    "before the state with the grown one": lambda patch: raise_at(patch, Loop, "_revalidate_best", 1),
    "an iteration after the second growth": lambda patch: raise_at(patch, Loop, "_iterate", 5, True),
    "with a state of the grown one": lambda patch: raise_at(patch, imagination.WorldModelRun, "before_iteration", 5),
}


@pytest.mark.full
@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_learns_from_every_purchase_all_the_same(kill, recipe, undisturbed, tmp_path, monkeypatch):
    """The horizon grows with the first purchase and shrinks with the second; states are saved every two iterations."""
    whole = whole_run(recipe, undisturbed, tmp_path)
    folder = RunFolder(tmp_path / "killed", recipe)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        KILLS[kill](patch)
        recipe.run(folder)
    folder.close()
    require_same(whole, resumed_run(recipe, folder.path))


@pytest.mark.full
def test_a_purchase_that_leaves_no_trusted_model_is_kept(recipe, undisturbed, tmp_path, monkeypatch):
    """The run says so, and learns from it again when it is resumed."""
    whole = whole_run(recipe, undisturbed, tmp_path)

    def refuse(*_: Any) -> None:
        raise UserError("no horizon is trusted.")

    folder = RunFolder(tmp_path / "untrusted", recipe)
    with monkeypatch.context() as patch:
        patch.setattr(imagination, "calibrate", refuse)
        with pytest.raises(UserError, match="purchase 1 of real episodes leaves a world model that is not trusted: no"):
            recipe.run(folder)
        folder.close()
        folder = RunFolder.resume(folder.path)
        with pytest.raises(UserError, match="purchase 1 of real episodes"):
            recipe.run(folder)
        folder.close()
    monkeypatch.setattr(plan, "collect_trajectories", None)  # nothing is played twice
    with pytest.raises(TypeError):  # but the second purchase
        resumed_run(recipe, folder.path)
    monkeypatch.undo()
    assert [path.name for path in (folder.path / "episodes").glob("bought-*")] == ["bought-1.npz"]
    assert whole.decisions[1] == json.loads((folder.path / "coevolution.json").read_text())[1]


def whole_run(recipe: Imagine, undisturbed: list[Left], path: Path) -> Left:
    if not undisturbed:
        undisturbed.append(run_of(recipe, path / "whole"))
        assert [one["buy"] for one in undisturbed[0].decisions] == [0, 1, 1]
    return undisturbed[0]


def resumed_run(recipe: Imagine, path: Path) -> Left:
    folder = RunFolder.resume(path)
    try:
        return Left.of(path, recipe.run(folder))
    finally:
        folder.close()


def require_same(whole: Left, resumed: Left) -> None:
    for name, tensors in whole.weights.items():
        assert all(torch.equal(item, resumed.weights[name][key]) for key, item in tensors.items()), name
    assert resumed.decisions == whole.decisions and resumed.metrics == whole.metrics
    assert resumed.summary == whole.summary and resumed.summary["horizon"] == HORIZONS[2]
