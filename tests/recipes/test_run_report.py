"""Every run folder has its page."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest

from vla_rl.recipes.recipe import run, thinned


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
    run(Counting(), str(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Counts &lt;iterations&gt; up." in page and "77 test episodes" in page and "50.0%" in page
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["Validation (rl)", "Exploration (rl)", "Policy (rl)", "Training (imitation)", "Settings"]
    assert (
        "<h1>run</h1>" in page
        and "eval/score" in page
        and "policy/kl" in page
        and "loss" in page
        and "control steps" in page
    )
    assert "<td>iterations</td>" in page and "1000" in page


@pytest.mark.parametrize("count", [0, 1, 2, 299, 300, 301, 450, 1000])
def test_a_long_curve_is_thinned_from_its_first_to_its_last_point(count):
    steps = [line["step"] for line in thinned([{"step": i} for i in range(count)])]
    assert len(steps) == min(count, 300) and steps == sorted(set(steps))
    assert not steps or (steps[0], steps[-1]) == (0, count - 1)
    gaps = {after - before for before, after in pairwise(steps)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_rare_metrics_keep_all_their_points(tmp_path):
    """Ten validations among a thousand iterations."""
    run(Counting(), str(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    charts = _charts(page)
    assert charts[0]["x"] == [1000.0 * i + 70 for i in range(10)] and charts[0]["y"][-1] == 0.907
    assert len(charts[1]["x"]) == 300


def _charts(page):
    return [json.loads(chart)["series"][0] for chart in re.findall(r"data-chart='(.*?)'", page)]


def test_a_score_is_one_band_beside_its_beginning_and_what_is_constant_is_one_line(tmp_path):
    run(Counting(), str(tmp_path / "run"))
    page = (tmp_path / "run" / "report.html").read_text()
    score, kl = _charts(page)
    assert (
        score["low"][-1] == pytest.approx(0.807) and score["high"][-1] == pytest.approx(1.007) and len(kl["x"]) == 300
    )
    assert "eval/score_low" not in page and "<code>rollout/groups</code> 3." in page
    assert re.findall(r'<span class="name">(.*?)</span>\s*<span class="value">(.*?)</span>', page)[:2] == [
        ("before", "0.7%"),
        ("after RL", "50.0%"),
    ]
    assert "64 validation episodes" in page and "77 test episodes" in page


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
