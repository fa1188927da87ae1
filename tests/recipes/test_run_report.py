"""What is said of a run: its page, success while exploring, its metrics as they are read, where its time went."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.report import Series
from vla_rl.recipes.improve import exploring, windows
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
    """Curves of ten validations keep all points, long ones are thinned, and what is constant is one line."""
    run(Counting(), str(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h1>run</h1>" in page and "Counts &lt;iterations&gt; up." in page and "<td>iterations</td>" in page
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["Validation (rl)", "Exploration (rl)", "Policy (rl)", "Training (imitation)", "Settings"]
    tiles = re.findall(r'<span class="name">(.*?)</span>\s*<span class="value">(.*?)</span>', page)
    assert tiles[:2] == [("before", "0.7%"), ("after RL", "50.0%")]
    assert "64 validation episodes" in page and "77 test episodes" in page
    score, kl = [json.loads(chart)["series"][0] for chart in re.findall(r"data-chart='(.*?)'", page)]
    assert score["x"] == [1000.0 * i + 70 for i in range(10)] and score["y"][-1] == 0.907 and len(kl["x"]) == 300
    assert (score["low"][-1], score["high"][-1]) == (pytest.approx(0.807), pytest.approx(1.007))
    assert "eval/score_low" not in page and "<code>rollout/groups</code> 3." in page


@pytest.mark.parametrize("count", [0, 1, 2, 299, 301, 1000])
def test_a_long_curve_is_thinned_from_its_first_to_its_last_point(count):
    steps = [line["step"] for line in thinned([{"step": i} for i in range(count)])]
    assert len(steps) == min(count, 300) and steps == sorted(set(steps))
    assert not steps or (steps[0], steps[-1]) == (0, count - 1)
    gaps = {after - before for before, after in pairwise(steps)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_page_of_the_recipe_is_kept_or_one_is_made(tmp_path):
    @dataclass(frozen=True)
    class Quiet:
        def run(self, folder):
            return {}

    run(Counting(1, "its own"), str(tmp_path / "run"))
    run(Quiet(), str(tmp_path / "quiet"))
    assert (tmp_path / "run" / "report.html").read_text() == "its own"
    assert "Settings" in (tmp_path / "quiet" / "report.html").read_text()


def row(steps: int, successes: float, episodes: float) -> dict[str, float]:
    return {"env/steps_total": steps, "rollout/successes": successes, "rollout/episodes": episodes}


def test_windows_end_with_the_iteration_in_which_they_are_full():
    """Of ten: 4 of 11 by step 20, 2 of 20 by step 40 (9 were too few); the last nine are none."""
    lines = [{"env/steps_total": 0, "eval/score": 0.5}, row(10, 3, 5), row(20, 1, 6), row(30, 0, 9), row(40, 2, 11)]
    lines += [row(50, 9, 9)]
    assert windows(lines, 10) == [(pytest.approx(4 / 11), 11, 20), (pytest.approx(0.1), 20, 40)]
    assert exploring(lines) == {}


def test_the_summary_names_the_first_the_lowest_and_the_last():
    lines = [row(steps, successes, 64) for steps, successes in ((100, 48), (200, 32), (300, 56))]
    found = exploring(lines)["exploring"]
    assert found == {"windows": 3, "episodes": 64, "first": 0.75, "lowest": 0.5, "lowest_at": 200, "last": 0.875}


# -- metrics -----------------------------------------------------------------------------------------------------------


def _written(path, lines):
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_validations_count_the_episodes_before_them(tmp_path):
    score = {"eval/score": 0.5, "eval/score_low": 0.25, "eval/score_high": 0.75, "eval/episodes": 8}
    clock = [{"rollout/episodes": 10 * i, "env/steps_total": 99 * i, "elapsed_s": i} for i in range(3)]
    lines = [{"stage": "rl", "step": i, **one, **(score if i % 2 == 0 else {})} for i, one in enumerate(clock)]
    found = watched(_written(tmp_path, [{"stage": "imitation", "step": 1, "loss": 1.0}, *lines]))
    rate = {"played": 8, "success": 0.5, "low": 0.25, "high": 0.75}
    before = {"episodes": 0, "env_steps": 0, "elapsed_s": 0}, {"episodes": 30, "env_steps": 198, "elapsed_s": 2}
    assert found == [{**one, **rate} for one in before]


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


# -- the terminal ------------------------------------------------------------------------------------------------------

SECONDS = {"iteration": 10.0, "env": 5.0, "encode": 1.0, "act": 1.0, "sync": 0.01, "learn": 2.0}
ITERATION = {f"time/{name}_s": seconds for name, seconds in SECONDS.items()} | {"env/steps": 90.0}
AHEAD = {"time/iteration_s": 4.0, "time/wait_s": 1.0, "time/learn_s": 3.0}
AHEAD |= {"collector/env_s": 3.0, "collector/act_s": 0.5, "collector/encode_s": 0.5}


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
    assert shares(AHEAD) == "waiting 25%, learning 75%; collectors: simulation 75%, inference 25%"


def test_the_largest_part_and_the_speed_of_an_iteration_are_said():
    assert mostly(ITERATION) == "50% simulation" and mostly(AHEAD) == "75% learning"
    assert mostly({"env/steps_total": 0.0}) == ""
    assert steps_per_second(ITERATION) == 9.0
    assert steps_per_second(ITERATION | {"time/iteration_s": 15.0, "time/validate_s": 5.0}) == 9.0
