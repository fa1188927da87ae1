"""What is said of a run: its metrics as they are read, its page, where its time went on the terminal, and its clips."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.commands import save_untrained
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.report import Series
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.demo import record_clips
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.metrics import rows, validation_curve, watched
from vla_rl.recipes.recipe import run, thinned
from vla_rl.recipes.terminal import Clock, mostly, steps_per_second


@dataclass(frozen=True)
class Counting:
    """Counts <iterations> up."""

    iterations: int = 1000
    title: str = ""

    def run(self, folder):
        if self.title:
            (folder.path / "report.html").write_text(self.title)
        for step in range(self.iterations):
            share, counts = step / self.iterations, {"policy/kl": 0.1 + step, "rollout/groups": 3.0}
            score = {"eval/score": share, "eval/score_low": share - 0.1, "eval/score_high": share + 0.1}
            score = {**score, "eval/episodes": 64.0} if step % 100 == 7 else {}
            folder.log("rl", step, {"env/steps_total": 10.0 * step, **counts, **score})
        folder.log("imitation", 0, {"loss": 0.5})
        rate = {"success": 0.5, "low": 0.4, "high": 0.6, "episodes": 77}
        return {"rl": rate, "return": {**rate, "mean": 12.5}, "seconds": {"rl": 1.26}}


def test_results_metrics_and_settings_are_on_the_page(tmp_path):
    """A score is one band beside its beginning, with every point; other long curves are thinned."""
    run(Counting(), str(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Counts &lt;iterations&gt; up." in page and "77 test episodes" in page and "64 validation episodes" in page
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["Validation (rl)", "Exploration (rl)", "Policy (rl)", "Training (imitation)", "Settings"]
    assert "eval/score_low" not in page and "<code>rollout/groups</code> 3." in page
    assert "<td>iterations</td>" in page and "1000" in page
    score, kl = (json.loads(chart)["series"][0] for chart in re.findall(r"data-chart='(.*?)'", page))
    assert score["x"] == [1000.0 * i + 70 for i in range(10)] and score["y"][-1] == 0.907
    assert score["low"][-1] == pytest.approx(0.807) and score["high"][-1] == pytest.approx(1.007)
    assert len(kl["x"]) == 300
    tiles = re.findall(r'<span class="name">(.*?)</span>\s*<span class="value">(.*?)</span>', page)
    assert tiles[:2] == [("before", "0.7%"), ("after RL", "50.0%")]


@pytest.mark.parametrize("count", [0, 1, 299, 301, 1000])
def test_a_long_curve_is_thinned_from_its_first_to_its_last_point(count):
    steps = [line["step"] for line in thinned([{"step": i} for i in range(count)])]
    assert len(steps) == min(count, 300) and steps == sorted(set(steps))
    assert not steps or (steps[0], steps[-1]) == (0, count - 1)
    gaps = {after - before for before, after in pairwise(steps)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_page_of_the_recipe_is_kept(tmp_path):
    run(Counting(1, "its own"), str(tmp_path / "run"))
    assert (tmp_path / "run" / "report.html").read_text() == "its own"


def test_a_run_without_metrics_has_a_page(tmp_path):
    @dataclass(frozen=True)
    class Quiet:
        def run(self, folder):
            return {}

    run(Quiet(), str(tmp_path / "run"))
    assert "Settings" in (tmp_path / "run" / "report.html").read_text()


# -- metrics -----------------------------------------------------------------------------------------------------------


def _written(path, lines):
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_validations_count_the_episodes_before_them(tmp_path):
    score = {"eval/score": 0.5, "eval/score_low": 0.25, "eval/score_high": 0.75, "eval/episodes": 8}
    lines = [{"stage": "rl", "step": i, "rollout/episodes": 10 * i, **(score if i % 2 == 0 else {})} for i in range(3)]
    found = watched(_written(tmp_path, [{"stage": "imitation", "step": 1, "loss": 1.0}, *lines]))
    assert found == [{"episodes": n, "played": 8, "success": 0.5, "low": 0.25, "high": 0.75} for n in (0, 30)]


def test_there_is_one_reader_of_metrics(tmp_path):
    """A line that was cut off by a kill is left out, a damaged one is named, a run that logged nothing has none."""
    line = {"stage": "rl", "step": 1, "loss": 0.5}
    assert rows(tmp_path) == []
    _written(tmp_path, [line])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    assert rows(tmp_path) == [line]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(line) + "\n")
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl' is damaged .*; delete that line"):
        rows(tmp_path, "rl")


def test_the_validation_curve_has_every_validation():
    score = {"eval/score": 0.5, "eval/score_low": 0.25, "eval/score_high": 0.75}
    lines = [{"step": 1}, {"step": 2, "env/steps_total": 64, **score}, {"step": 4, "env/steps_total": 128, **score}]
    assert validation_curve("deployed", lines, "step") == Series("deployed", [2, 4], [0.5] * 2, [0.25] * 2, [0.75] * 2)
    assert validation_curve("deployed", lines, "env/steps_total").x == [64, 128]


def test_metrics_of_an_older_version_are_refused_in_one_sentence(tmp_path):
    _written(tmp_path, [{"stage": "imitation", "step": 1}, {"stage": "rl", "step": 1, "env_steps": 0.5}])
    assert len(rows(tmp_path, "imitation")) == 1
    with pytest.raises(UserError, match=r"names of an older vla-rl \(env_steps\).*or run it again"):
        rows(tmp_path, "rl")


# -- the terminal ------------------------------------------------------------------------------------------------------

ITERATION = {
    "time/iteration_s": 10.0,
    "time/env_s": 5.0,
    "time/encode_s": 1.0,
    "time/act_s": 1.0,
    "time/sync_s": 0.01,
    "time/learn_s": 2.0,
    "env/steps": 90.0,
}

AHEAD = {
    "time/iteration_s": 4.0,
    "time/wait_s": 1.0,
    "time/learn_s": 3.0,
    "collector/env_s": 3.0,
    "collector/act_s": 0.5,
    "collector/encode_s": 0.5,
}


def shares(*iterations: dict[str, float]) -> str:
    clock = Clock()
    for metrics in iterations:
        clock.add(metrics)
    return clock.shares()


def test_shares_are_of_the_wall_time_of_all_iterations():
    assert shares(ITERATION) == "simulation 50%, inference 20%, learning 20%, other 10%"
    validated = ITERATION | {"time/iteration_s": 30.0, "time/validate_s": 20.0}
    assert shares(ITERATION, validated) == "simulation 25%, inference 10%, learning 10%, validation 50%, other 5%"
    assert shares({"time/validate_s": 3.0}, ITERATION) == shares(ITERATION)
    assert shares() == shares({"time/validate_s": 3.0, "env/steps_total": 0.0}) == "", "no iteration, no shares"


def test_what_collectors_did_beside_is_said_apart():
    assert shares(AHEAD) == "waiting 25%, learning 75%; collectors: simulation 75%, inference 25%"


def test_the_largest_part_of_an_iteration_is_named():
    assert mostly(ITERATION) == "50% simulation" and mostly(AHEAD) == "75% learning"
    assert mostly({"env/steps_total": 0.0}) == ""


def test_the_speed_leaves_validation_out():
    assert steps_per_second(ITERATION) == 9.0
    assert steps_per_second(ITERATION | {"time/iteration_s": 15.0, "time/validate_s": 5.0}) == 9.0


# -- clips -------------------------------------------------------------------------------------------------------------

LIFT = EnvConfig("lift", {"deadline": 6})


@pytest.mark.parametrize(
    ("env", "size"),
    [
        (LIFT, 192),
        pytest.param(
            EnvConfig("isolated", {"env": "lift", "options": LIFT.options}), 64, marks=pytest.mark.full, id="isolated"
        ),
    ],
)
def test_a_clip_has_a_picture_of_every_control_step(env, size, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    policy = TinyVLA.from_pretrained(save_untrained(tmp_path / "untrained"))
    clips = record_clips(env, policy, np.array([3, 4]), seed=1)
    assert [clip.frames.shape for clip in clips] == [(7, size, size, 3)] * 2
    assert all(clip.label.endswith(": too late") for clip in clips)
    assert not np.array_equal(clips[0].frames[0], clips[1].frames[0])
    assert not np.array_equal(clips[0].frames[0], clips[0].frames[-1])
