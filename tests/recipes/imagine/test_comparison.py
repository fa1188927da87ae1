"""``vla-rl imagine``: a world model is trained, used after a stop, evaluated and reported."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.elsewhere import ELSEWHERE, elsewhere
from tests.recipes.imagine.runs import small_recipe
from tests.world_models.pushing import played
from vla_rl.cli import imagine as commands
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.evaluation.stats import Rate
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imagine import agreement, calibrated_model, comparison
from vla_rl.recipes.imagine.agreement import (
    RANDOM_ACTION_PROBS,
    PolicyRating,
    evaluate_world_model,
    first_observations,
    rate_policies,
)
from vla_rl.recipes.imagine.comparison import _LOSSES, headline_agreement, summarize, write_report
from vla_rl.recipes.imagine.recipe import Imagine, SavedRun, find_run, load_run
from vla_rl.recipes.metrics import watched
from vla_rl.training.fit import FitConfig, fit_probe
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import RunFolder
from vla_rl.training.world_model import fit_world_model

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


def test_a_finished_run_has_its_summary_and_is_not_continued(run):
    found = json.loads((run / "summary.json").read_text())
    assert found["simulator_episodes"] == 5 and found["horizon"] == 5
    with pytest.raises(UserError, match="is finished"):
        commands.imagine(["improve", str(run)])


def test_init_from_reuses_the_episodes_and_the_weights_of_another_run(run, recipe, tmp_path, monkeypatch):
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


def test_an_untrusted_world_model_is_kept_and_can_be_calibrated_again(recipe, tmp_path, monkeypatch):
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


@pytest.mark.full
def test_a_whole_run_on_another_device_is_that_on_the_host(recipe, run, tmp_path, monkeypatch):
    """Policy, critic, learner and world model are on the device, from collecting to the page's numbers."""
    away = replace(recipe, device=str(ELSEWHERE))
    folder = RunFolder(tmp_path / "away", away)
    with elsewhere():
        policy, model_run = away.prepare(folder)
        assert {item.device for item in policy.trainable().values()} == {ELSEWHERE}
        assert model_run.calibrated.model.device == ELSEWHERE
        assert model_run.env_factory.make(2).spec.device == str(ELSEWHERE)
        assert away.prepare(folder)[1].calibrated.model.device == ELSEWHERE, "loaded, this time"
        found, rated = away.run(folder), []
        monkeypatch.setattr(agreement, "rate_policies", lambda *given: rated.append(given) or ratings())
        evaluate_world_model(folder.path, scenes=3)
    ((calibrated, _, policies, *_),) = rated
    assert calibrated.model.device == ELSEWHERE
    assert {item.device for one in policies.values() for item in one.trainable().values()} == {ELSEWHERE}
    assert found.keys() == json.loads((run / "summary.json").read_text()).keys()
    for name in ("first", "best"):
        expected, weights = (
            load_file(path / "checkpoints" / name / "model.safetensors") for path in (run, folder.path)
        )
        for key, item in expected.items():
            if "robot_position" not in key:  # solved from two moments: rounding decides
                torch.testing.assert_close(weights[key], item, rtol=0.0, atol=1e-3, msg=f"{name}: {key}")


def test_init_from_refuses_a_run_without_episodes(recipe, tmp_path):
    lost = replace(recipe, plan=replace(recipe.plan, init_from=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="nowhere' holds no collected episodes"):
        lost.prepare(RunFolder(tmp_path / "run", lost))


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


def test_every_policy_is_rated_in_the_simulator_and_in_imagination_with_random_actions(run):
    recipe, trained = load_run(run)
    policy = TinyVLA.from_pretrained(run / "checkpoints" / "start")
    ratings = rate_policies(trained, recipe.env, {"one": policy, "other": policy}, SCENES, num_envs=2, seed=1)
    assert [one.name for one in ratings[: len(RANDOM_ACTION_PROBS)]] == [
        "one",
        *(f"one, {s:.0%} random" for s in RANDOM_ACTION_PROBS[1:]),
    ]
    assert len(ratings) == 2 * len(RANDOM_ACTION_PROBS) >= 12
    assert all(one.imagined.episodes == one.true.episodes == len(SCENES) for one in ratings)
    assert [asdict(one) for one in ratings[:6]] == [
        asdict(replace(one, name=one.name.replace("other", "one"))) for one in ratings[6:]
    ]


@pytest.mark.parametrize("policy", ["", "mine"])
def test_the_device_of_the_comparison_is_that_of_its_runs(policy, tmp_path, monkeypatch):
    cells = []
    monkeypatch.setattr("vla_rl.recipes.compare.run_cells", lambda found, *given: cells.extend(found))
    monkeypatch.setattr(comparison, "evaluate_world_model", stop := MagicMock(side_effect=RuntimeError))
    given = ["--out", str(tmp_path), "--policy", policy, "--device", "cuda"]
    with pytest.raises(RuntimeError):
        commands.imagine(given)
    names = [cell.out.name for cell in cells]
    assert names == ["imagination", "simulator"] if policy else ["imitation", "imagination", "simulator"]
    assert all(cell.arguments[cell.arguments.index("--device") + 1] == "cuda" for cell in cells)
    cells.clear()
    with pytest.raises(RuntimeError):
        commands.imagine(given[:-2])
    assert stop.call_count == 2 and not any("--device" in cell.arguments for cell in cells)


def ratings() -> list[PolicyRating]:
    rates = [(0.1, 0.0), (0.3, 0.2), (0.5, 0.6), (0.8, 0.9)]
    return [PolicyRating(f"policy {i}", Rate(x, 0.0, 1.0, 10), Rate(y, 0.0, 1.0, 10)) for i, (x, y) in enumerate(rates)]


def test_the_report_is_made_from_the_files_of_the_runs(run, tmp_path, monkeypatch):
    """A policy whose success is never reached in the simulator, and one whose is."""
    monkeypatch.setattr(agreement, "rate_policies", lambda *given: ratings())
    monkeypatch.setattr(agreement, "fit_probe", partial(fit_probe, config=FitConfig(steps=2, batch=8)))
    out = run.parent
    found = evaluate_world_model(run, scenes=3)
    assert found["test_episodes"] == 12 and found["policies"]["policies"] == 4
    (out / "simulator").mkdir(exist_ok=True)
    lines = [
        {
            "stage": "rl",
            "step": 0,
            "eval/score": 0.0,
            "eval/score_low": 0,
            "eval/score_high": 1,
            "eval/episodes": 4,
        },
        {"stage": "imitation", "step": 0, "rollout/episodes": 1000},
        {"stage": "rl", "step": 1, "rollout/episodes": 30, "rollout/successes": 3},
        {
            "stage": "rl",
            "step": 2,
            "rollout/episodes": 20,
            "eval/score": 0.5,
            "eval/score_low": 0,
            "eval/score_high": 1,
            "eval/episodes": 4,
        },
    ]
    (out / "simulator" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"rl": asdict(Rate(0.5, 0.0, 1.0, 4)), "episodes": 50, "seconds": {"rl": 2.0, "evaluation": 1.0}}
    (out / "simulator" / "summary.json").write_text(json.dumps(result))
    assert [(row["episodes"], row["played"]) for row in watched(out / "simulator")] == [(0, 4), (50, 4)]
    summary = summarize(out, found)
    assert set(summary) == {"imitation", "imagined_rl", "simulator_rl", "gain", "agreement"}
    for way in ("imitation", "imagined_rl", "simulator_rl"):
        assert {"success", "low", "high", "episodes", "simulator_episodes", "seconds"} <= set(summary[way])
    assert summary["imagined_rl"]["simulator_episodes"] == 5 and summary["imitation"]["simulator_episodes"] == 0
    assert summary["simulator_rl"]["simulator_episodes"] == 50 and summary["simulator_rl"]["validation_episodes"] == 8
    assert summary["simulator_rl"]["episodes_to_imagined_success"] == (
        0 if summary["imagined_rl"]["success"] == 0 else 50
    )
    assert find_run(out) == find_run(run) == run  # commands take the folder of the whole comparison as well
    write_report(out, summary, found)
    page = (out / "report.html").read_text()
    assert "after reinforcement learning in imagination" in page and "r = " in page
    assert "will succeed above one that will fail" in page
    needed = summary["simulator_rl"]["episodes_to_imagined_success"]  # 0 when the beginning is as good already
    assert re.search(rf"first as good after <[a-z]+>{needed}</[a-z]+> episodes", page)
    assert "as many as plan.coevolution.budget allows; 0 were." in page
    found["policies"]["optimism"] = -0.087
    bought = shutil.copytree(out, tmp_path / "bought")
    decisions = json.loads((run / "coevolution.json").read_text())
    (bought / run.name / "coevolution.json").write_text(json.dumps([decisions[-1] | {"buy": 7}]))
    write_report(bought, summary, found)
    page = (bought / "report.html").read_text()
    assert "imagined rates are 8.7 points too low on average" in page and "; 7 were." in page


def test_the_page_plots_losses_that_there_are(run, recipe, tmp_path):
    second = replace(recipe, plan=replace(recipe.plan, init_from=str(run)))
    model_run, said = second.prepare(RunFolder(tmp_path / "run", second))[1], set()
    fit_world_model(
        model_run.calibrated.model,
        model_run.episodes.learnt,
        recipe.plan.fit,
        torch.Generator().manual_seed(0),
        lambda step, info: said.update(info),
    )
    assert set(_LOSSES) <= said


def test_the_table_of_the_horizon_that_rl_used_is_the_one_reported():
    tables = [
        {
            "horizon": h,
            "accuracy": {"success": h / 10},
            "hallucinated": None if h == 5 else {"success": 0.1, "high": 0.2},
        }
        for h in (5, 10)
    ]
    policies = {"policies": 12, "r": 0.9, "r_low": 0.8, "r_high": 1.0}
    assert headline_agreement({"replays": tables, "horizon": 10, "policies": policies})["accuracy"] == 1.0
    found = headline_agreement({"replays": tables, "horizon": 5, "policies": policies})
    assert found["hallucinated"] is None and found["hallucinated_high"] == 1.0  # nothing speaks for less


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


def test_a_run_of_another_recipe_is_refused(tmp_path):
    RunFolder(tmp_path / "run", EvaluationConfig()).close()
    with pytest.raises(UserError, match="is a run of EvaluationConfig, which has no world model"):
        load_run(tmp_path / "run")
