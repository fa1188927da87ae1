"""``vla-rl imagine`` and ``compare imagination``: a world model is used after a stop, evaluated, and reported."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.imagine.runs import small_recipe
from tests.world_models.pushing import played
from vla_rl.cli import imagine as commands
from vla_rl.cli.train import compare
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.compare import Cell
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imagine import agreement, calibrated_model, comparison
from vla_rl.recipes.imagine.agreement import (
    PolicyRating,
    evaluate_world_model,
    first_observations,
    rate_policies,
)
from vla_rl.recipes.imagine.comparison import ImagineStudy, summarize, write_report
from vla_rl.recipes.imagine.recipe import Imagine, SavedRun, find_run, load_run
from vla_rl.recipes.metrics import watched
from vla_rl.training.fit import FitConfig, fit_probe
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import RunFolder

ENV = EnvConfig("lift", options={"deadline": 7})
SCENES = [1_100_000_000 + i for i in range(3)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Imagine:
    return small_recipe(tmp_path_factory.mktemp("before"), 5, LoopConfig(1, validate_every=1))


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory) -> Path:
    """A world model was trained, the process ended, and RL went on in it."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "imagination", recipe)
    recipe.prepare(folder)
    folder.close()
    before = (folder.checkpoint("world") / "model.safetensors").stat().st_mtime_ns
    commands.imagine(["improve", str(folder.path)])
    after = (folder.checkpoint("world") / "model.safetensors").stat().st_mtime_ns
    assert after == before, "nothing was learnt again, which would have ended with the same weights"
    decisions = json.loads((folder.path / "coevolution.json").read_text())
    assert [one["iteration"] for one in decisions] == [0], "the baseline is measured once"
    return folder.path


@pytest.mark.full
def test_a_finished_run_has_its_summary_and_is_not_continued(run):
    found = json.loads((run / "summary.json").read_text())
    assert found["simulator_episodes"] == 5 and found["horizon"] == 5
    with pytest.raises(UserError, match="is finished"):
        commands.imagine(["improve", str(run)])


@pytest.mark.full
def test_init_from_reuses_episodes_and_weights_of_a_run(run, recipe, tmp_path, monkeypatch):
    """Its trusted horizon and its thresholds are chosen anew."""
    monkeypatch.setattr("vla_rl.recipes.imagine.plan.collect_episodes", None)  # nothing is played
    other = replace(recipe, plan=replace(recipe.plan, init_from=str(run), trust=TrustConfig(1.0, (0.3,), (1.0,), 1.0)))
    folder = RunFolder(tmp_path / "other", other)
    model_run = other.prepare(folder)[1]
    folder.close()
    for name in ("learnt", "calibration", "held_out"):
        one, two = (Trajectories.load(path / "episodes" / f"{name}.npz") for path in (run, folder.path))
        assert np.array_equal(one.state, two.state) and one.state.size
    first, mine = (load_file(path / "checkpoints" / "first" / "model.safetensors") for path in (run, folder.path))
    assert all(torch.equal(item, mine[name]) for name, item in first.items())
    assert model_run.calibrated.imagination.success_threshold == 0.3 and all(
        limit == np.inf for limit in model_run.calibrated.limits.values
    )


def test_an_untrusted_world_model_can_be_calibrated_again(recipe, tmp_path, monkeypatch):
    strict = replace(recipe, plan=replace(recipe.plan, trust=TrustConfig(1e-9)))
    folder = RunFolder(tmp_path / "strict", strict)
    with pytest.raises(
        UserError, match=rf"no imagined rollouts to learn from.*--plan.init-from {folder.path} calibrates it again"
    ):
        strict.prepare(folder)
    assert not (folder.checkpoint("world") / "config.json").exists(), "there is nothing to imagine with"
    monkeypatch.setattr("vla_rl.recipes.imagine.calibrated_model.fit_world_model", None)  # nothing is learnt
    milder = replace(recipe, plan=replace(recipe.plan, init_from=str(folder.path)))
    assert milder.prepare(RunFolder(tmp_path / "milder", milder))[1].calibrated.imagination.horizon == 5


def test_imagined_rollouts_begin_with_the_pictures_of_the_scenes(run):
    initial = first_observations(ENV, SCENES, SavedRun.load(run).calibrated.model)
    env = ENV.make(1)
    for i, scene in enumerate(SCENES):
        obs = env.reset(np.array([0]), np.array([scene]))
        picture = np.moveaxis(np.concatenate([obs.images[name][0] for name in sorted(obs.images)], -1), -1, 0)
        assert all(np.array_equal(picture, past) for past in initial.pictures[i])
        assert np.array_equal(obs.state[0], initial.state[i]) and obs.task[0] == initial.task[i]
    env.close()


def test_foresight_is_the_auroc_of_what_is_not_decided_yet(run, monkeypatch):
    """By all pairs: at the same control step, the last call of every episode left out."""
    trained, chooser = load_run(run)[1], np.random.default_rng(0)
    parts = [played(1, seed=0).select([0]) for _ in range(30)]
    for number, part in enumerate(parts):  # longer ones, of either outcome
        index = np.zeros(int(chooser.integers(8, 20)), int)
        last = np.arange(len(index)) == len(index) - 1
        taken = {name: getattr(part, name)[index] for name in ("state", "action", "task", "failed", "seed", "reward")}
        images = {name: item[index] for name, item in part.images.items()}
        episode = np.zeros(len(index), np.int64)
        parts[number] = Trajectories(images, success=last & bool(number % 2), episode=episode, **taken)
    episodes = Trajectories.joined(parts)
    value = np.round(chooser.uniform(size=len(episodes.state)), 1)
    monkeypatch.setattr(calibrated_model, "success_probability", lambda model, trajectories: value)
    above, pairs = 0.0, 0
    spans, won = episodes.spans(), episodes.outcomes
    for good, bad in itertools.product(np.flatnonzero(won), np.flatnonzero(~won)):
        for time in (5, 10, 15):
            if all(spans[i][1] - 1 - spans[i][0] - time > 5 for i in (good, bad)):
                one, other = (value[spans[i][0] + time] for i in (good, bad))
                above, pairs = above + (one > other) + 0.5 * (one == other), pairs + 1
    assert pairs > 5 and trained.foresight(episodes) == (pytest.approx(above / pairs), pairs)


def test_every_policy_is_rated_both_ways_with_random_actions(run, monkeypatch):
    monkeypatch.setattr(agreement, "RANDOM_ACTION_PROBS", (0.0, 0.5))
    recipe, trained = load_run(run)
    policy = TinyVLA.from_pretrained(run / "checkpoints" / "start")
    ratings = rate_policies(trained, recipe.env, {"one": policy, "other": policy}, SCENES, num_envs=2, seed=1)
    assert [one.name for one in ratings] == ["one", "one, 50% random", "other", "other, 50% random"]
    assert all(one.imagined.episodes == one.true.episodes == len(SCENES) for one in ratings)
    assert [replace(one, name="") for one in ratings[:2]] == [replace(one, name="") for one in ratings[2:]]


@pytest.mark.parametrize("policy", ["", "mine"])
def test_a_comparisons_device_is_that_of_its_runs(policy, tmp_path, monkeypatch):
    cells = []
    monkeypatch.setattr("vla_rl.recipes.compare.run_cells", lambda found, *given: cells.extend(found))
    monkeypatch.setattr(comparison, "evaluate_world_model", MagicMock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        commands.imagine(["--out", str(tmp_path), "--policy", policy, "--device", "cuda"])
    names = [cell.out.name for cell in cells]
    assert names == ["imagination", "simulator"] if policy else ["imitation", "imagination", "simulator"]
    assert all(cell.arguments[cell.arguments.index("--device") + 1] == "cuda" for cell in cells)


def ratings() -> list[PolicyRating]:
    rates = [(0.1, 0.0), (0.3, 0.2), (0.5, 0.6), (0.8, 0.9)]
    return [PolicyRating(f"policy {i}", Rate(x, 0.0, 1.0, 10), Rate(y, 0.0, 1.0, 10)) for i, (x, y) in enumerate(rates)]


def test_the_report_is_made_from_the_files_of_the_runs(run, monkeypatch):
    monkeypatch.setattr(agreement, "rate_policies", lambda *given: ratings())
    monkeypatch.setattr(agreement, "fit_probe", partial(fit_probe, config=FitConfig(steps=2, batch=8)))
    out = run.parent
    found = evaluate_world_model(run, scenes=3)
    assert found["test_episodes"] == 12 and found["policies"]["policies"] == 4
    (out / "simulator").mkdir(exist_ok=True)
    clock = {"env/steps_total": 0, "elapsed_s": 0.0}
    validated = {"eval/score_low": 0, "eval/score_high": 1, "eval/episodes": 4, **clock}
    lines = [
        {"stage": "rl", "step": 0, "eval/score": 0.0, **validated},
        {"stage": "imitation", "step": 0, "rollout/episodes": 1000},
        {"stage": "rl", "step": 1, "rollout/episodes": 30, "rollout/successes": 3},
        {"stage": "rl", "step": 2, "rollout/episodes": 20, "eval/score": 0.5, **validated},
    ]
    (out / "simulator" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"rl": asdict(Rate(0.5, 0.0, 1.0, 4)), "episodes": 50, "seconds": {"rl": 2.0, "evaluation": 1.0}}
    (out / "simulator" / "summary.json").write_text(json.dumps(result))
    assert [(row["episodes"], row["played"]) for row in watched(out / "simulator")] == [(0, 4), (50, 4)]
    summary = summarize(out)
    assert set(summary) == {"imitation", "imagined_rl", "simulator_rl", "gain"}
    assert summary["imagined_rl"]["simulator_episodes"] == 5 and summary["imitation"]["simulator_episodes"] == 0
    assert summary["simulator_rl"]["simulator_episodes"] == 50 and summary["simulator_rl"]["validation_episodes"] == 8
    needed = summary["simulator_rl"]["episodes_to_imagined_success"]
    assert needed == (0 if summary["imagined_rl"]["success"] == 0 else 50), "0 when the beginning is as good already"
    assert find_run(out) == find_run(run) == run  # commands take the folder of the whole comparison as well
    write_report(out, summary, found)
    page = (out / "report.html").read_text()
    assert "after reinforcement learning in imagination" in page and "r = " in page
    assert re.search(rf"first as good after <[a-z]+>{needed}</[a-z]+> episodes", page)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["impove"], "did you mean 'improve'"),
        (["improve"], "needs one run folder"),
        (["agreement", "nowhere"], "holds no run that could be read"),
        (["agreement", "nowhere", "--scenes", "many"], "is no number of scenes"),
    ],
)
def test_mistakes_are_reported_in_a_sentence(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        commands.imagine(arguments)


# -- one part more or less ---------------------------------------------------------------------------------------------

SHARING = "no_uncertainty", "with_keyframes", "with_resampling"
SUCCESS = {"lift": 0.7, "with_coevolution": 0.6, "residual_td3": 0.9}


@pytest.fixture
def asked(monkeypatch) -> list[list[Cell]]:
    """The cells in the order of their runs; each writes at once the files that a real one writes after minutes."""
    turns: list[list[Cell]] = []

    def run(cells: list[Cell], processes: int, what: str) -> None:
        turns.append(cells)
        for cell in cells:
            _leave(cell.out)

    monkeypatch.setattr("vla_rl.recipes.compare.run_cells", run)
    return turns


def _leave(out: Path) -> None:
    method, _, seed = out.name.rpartition("-")
    success = SUCCESS.get(method, 0.5) + int(seed) / 100
    rate = {"success": success, "low": success - 0.1, "high": success + 0.1, "episodes": 512}
    found = {"seconds": {"world": 100.0, "rl": 20.04}}
    out.mkdir(parents=True)
    if method == "residual_td3":
        found |= {"rl": rate, "episodes": 1000}
    elif method == "imitate":
        (out / "test.json").write_text(json.dumps({"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 512}))
    else:
        gain = {"mean": success - 0.5, "low": success - 0.55, "high": success - 0.45, "mcnemar_p": 0.01}
        found |= {"imagined_rl": rate, "simulator_episodes": 1375, "gain": gain}
    (out / "summary.json").write_text(json.dumps(found))
    validation = {"eval/score": 0.5, "eval/score_low": 0.4, "eval/score_high": 0.6, "eval/episodes": 256}
    line = {"stage": "rl", "step": 0, "rollout/episodes": 0, "env/steps_total": 0, "elapsed_s": 0.0, **validation}
    (out / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_methods_share_a_world_model_and_are_tabled_over_seeds(asked, tmp_path):
    """Those that would train the same one on the same episodes; all of them imitate alike, on the named device."""
    compare(["imagination", "--out", str(tmp_path), "--device", "cuda:1"])
    imitation, own, rest = asked
    assert {cell.out.name for cell in imitation} == {f"imitate-{seed}" for seed in (1, 2, 3)}
    assert {cell.out.name for cell in own} == {f"{method}-{seed}" for method in SUCCESS for seed in (1, 2, 3)}
    assert {cell.out.name for cell in rest} == {f"{method}-{seed}" for method in SHARING for seed in (1, 2, 3)}
    for cell in own + rest:
        method, _, seed = cell.out.name.rpartition("-")
        given = dict(zip(cell.arguments[::2], cell.arguments[1::2], strict=True))
        assert cell.config == f"imagine.py:{method}" and (given["--seed"], given["--device"]) == (seed, "cuda:1")
        assert given["--policy"] == str(tmp_path / f"imitate-{seed}" / "checkpoints" / "imitation")
        assert given.get("--plan.init-from") == (str(tmp_path / f"lift-{seed}") if method in SHARING else None)
        assert ("--demonstrations" in given) == (method == "residual_td3")
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in results[::3]] == list(ImagineStudy().methods)
    assert [row["seed"] for row in results] == [1, 2, 3] * 6
    found = {(row["method"], row["seed"]): row for row in results}
    assert found["lift", 2]["rl"]["success"] == 0.72 and found["lift", 2]["simulator_episodes"] == 1375
    assert found["residual_td3", 1]["simulator_episodes"] == 1000 + 256, "validation is paid for as well"
    assert [bool(found[method, 1]["validations"]) for method in ("lift", "residual_td3")] == [False, True]
    assert found["with_keyframes", 3]["seconds"] == 120.0
    page = (tmp_path / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert cells[1] == ["imitation", *["50.0% [40.0, 60.0]"] * 3, "50.0% (50.0% to 50.0%)"], "on the test scenes"
    assert cells[3][0] == "lift" and cells[3][-1] == "72.0% (71.0% to 73.0%)"
    won = {row[0]: row[1:] for row in cells[8:]}
    assert won["lift"] == ["+21.0 [16.0, 26.0]", "+22.0 [17.0, 27.0]", "+23.0 [18.0, 28.0]", "–", "1375", "120"]
    assert won["residual td3"] == ["+41.0", "+42.0", "+43.0", "–", "1256", "120"]
