"""What was learnt from recorded data alone survives a kill: it is saved before the first validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import save_untrained
from tests.recipes import quick
from vla_rl.algorithms.offline import WSRL
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.recipes import evaluators
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.metrics import rows
from vla_rl.training.tracking import RunFolder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Improve:
    folder = tmp_path_factory.mktemp("before")
    save_demonstrations(collect(EnvConfig("lift"), 2, seed=1), folder / "recorded", video="never")
    policy = save_untrained(folder / "policy")
    made = quick.warm_start()
    rl = replace(made.rl, loop=replace(made.rl.loop, iterations=2))
    return replace(made, rl=rl, policy=str(policy), demonstrations=str(folder / "recorded"))


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory) -> Path:
    return finished(RunFolder(tmp_path_factory.mktemp("whole") / "run", recipe))


def finished(folder: RunFolder) -> Path:
    folder.config.run(folder)
    folder.close()
    return folder.path


def stopped(recipe: Improve, path: Path) -> Path:
    folder = RunFolder(path, recipe)
    with pytest.raises(KeyboardInterrupt):
        recipe.run(folder)
    folder.close()
    return path


def stop(*given, **named):
    raise KeyboardInterrupt


def lines(run: Path) -> list[dict[str, float]]:
    """The metrics without wall-clock times."""
    return [{name: value for name, value in line.items() if not name.endswith("_s")} for line in rows(run)]


@pytest.mark.full
@pytest.mark.parametrize("at", ["the first validation", "the first state"])
def test_a_run_killed_after_pre_training_goes_on_without_it(at, recipe, whole, tmp_path, monkeypatch):
    """Before the first validation, or after it and before its state is saved; both end as one that never was."""
    with monkeypatch.context() as patched:
        if at == "the first validation":
            patched.setattr(evaluators, "evaluate", stop)
        else:
            save = RunFolder.save_state
            patched.setattr(
                RunFolder, "save_state", lambda self, step, state: (stop if step == 0 else save)(self, step, state)
            )
        run = stopped(recipe, tmp_path / "run")
    monkeypatch.setattr(WSRL, "pretrain", None)
    finished(RunFolder.resume(run))
    assert lines(run) == lines(whole) and len(lines(run)) == 3
    expected, found = (load_file(path / "checkpoints" / "best" / "model.safetensors") for path in (whole, run))
    assert all(torch.equal(found[name], item) for name, item in expected.items())


@pytest.mark.full
def test_a_run_that_is_killed_while_pre_training_begins_anew(recipe, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(WSRL, "pretrain", stop)
        run = stopped(recipe, tmp_path / "run")
    finished(RunFolder.resume(run))
    assert lines(run) == lines(whole)


def test_on_policy_runs_save_nothing_before_their_first_iteration(tmp_path, monkeypatch):
    recipe = replace(quick.improve(), policy=str(save_untrained(tmp_path / "policy")))
    monkeypatch.setattr(evaluators, "evaluate", stop)
    assert not (stopped(recipe, tmp_path / "run") / "state").exists()
