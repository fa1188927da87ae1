"""Every run folder has its page, and a summary of success while exploring."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest

from vla_rl.recipes.improve import exploring, windows
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


def test_a_page_of_the_recipe_is_kept_and_one_without_metrics_made(tmp_path):
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
    rows = [{"env/steps_total": 0, "eval/score": 0.5}, row(10, 3, 5), row(20, 1, 6), row(30, 0, 9), row(40, 2, 11)]
    rows += [row(50, 9, 9)]
    assert windows(rows, 10) == [(pytest.approx(4 / 11), 11, 20), (pytest.approx(0.1), 20, 40)]
    assert exploring(rows) == {}


def test_the_summary_names_the_first_the_lowest_and_the_last():
    rows = [row(steps, successes, 64) for steps, successes in ((100, 48), (200, 32), (300, 56))]
    found = exploring(rows)["exploring"]
    assert found == {"windows": 3, "episodes": 64, "first": 0.75, "lowest": 0.5, "lowest_at": 200, "last": 0.875}
