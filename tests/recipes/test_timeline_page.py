"""``timeline.html``: a lane for every process, the shares of each kind, and what a run waits for."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.recipes.quick import improve
from vla_rl.experience.spans import KINDS, OWN
from vla_rl.recipes.bottleneck import Arguments, bottleneck
from vla_rl.recipes.timeline_page import TimelinePage, closest, report_of, shares_of
from vla_rl.training.timeline import Period, Timeline
from vla_rl.training.tracking import RunFolder

WAITING, SIMULATING, INFERRING, SYNCING, LEARNING, VALIDATING, SAVING = range(len(KINDS))
ONE_PROCESS = Arguments("--rl.loop.", 1, 0, 1, 4)


def recorded() -> Timeline:
    """Two iterations of 10 s, the second with a validation; a collector simulates for the third."""
    line = Timeline()
    line.periods = [
        Period(1, 1, 0.0, 10.0, {OWN: {"waiting": 6.0, "learning": 4.0}, "collector 1": {"simulating": 5.0}}),
        Period(2, 2, 10.0, 20.0, {OWN: {"waiting": 4.0, "validating": 5.0}, "collector 1": {"simulating": 4.0}}),
    ]
    line.recent = {
        1: {OWN: [(WAITING, 0.0, 6.0), (LEARNING, 6.0, 10.0)], "collector 1": [(SIMULATING, 1.0, 6.0)]},
        2: {OWN: [(WAITING, 10.0, 14.0), (VALIDATING, 15.0, 20.0)], "collector 1": [(SIMULATING, 8.0, 12.0)]},
    }
    return line


def test_shares_are_of_the_wall_time_of_all_iterations():
    assert shares_of(recorded()) == {
        OWN: {"waiting": 0.5, "learning": 0.2, "validating": 0.25},
        "collector 1": {"simulating": 0.45},
    }


def test_the_page_has_a_lane_for_every_process_and_only_what_happened_then():
    page = report_of(recorded(), ONE_PROCESS, "mine").html()
    first, second = re.findall(r'<figure class="card lanes">.*?</figure>', page, re.S)
    assert "<figcaption>Iteration 1</figcaption>" in first and "validating" not in first
    assert re.findall(r'class="lane"><span>([^<]+)', first) == ["learner", "collector 1"]
    # In the window from 0 to 10 s: the span from 1 to 6 s, and that of the next iteration, cut at 10 s.
    assert 'd="M10.0 0H60.0V10H10.0zM80.0 0H100.0V10H80.0z"' in first
    assert "<title>collector 1: simulating 7 s</title>" in first
    assert "<figcaption>Iterations 1 to 2</figcaption>" in second and "validating" in second
    assert "<td>learner</td><td class=n>50.0%</td>" in page and "<td class=n>55.0%</td></tr>" in page
    assert "http" not in re.sub(r"<meta[^>]*>", "", page), "nothing is loaded"


def test_the_iteration_that_is_shown_closely_is_one_whose_collectors_have_delivered():
    line = recorded()
    line.recent[3] = {OWN: [(WAITING, 20.0, 25.0)]}
    assert closest(line) == (1, 0.0, 10.0)
    line.recent[4] = {OWN: [(WAITING, 25.0, 29.0)]}
    assert closest(line) == (3, 20.0, 25.0)


CASES = [
    ({"simulating": 0.6, "inferring": 0.1, "learning": 0.3}, {}, ONE_PROCESS, "simulation", "collectors 2"),
    ({"simulating": 0.1, "inferring": 0.6}, {}, ONE_PROCESS, "inference", "collectors 2"),
    ({"waiting": 0.9}, {}, ONE_PROCESS, "simulators in other processes", "more workers"),
    (
        {"waiting": 0.9, "learning": 0.1},
        {"simulating": 0.8},
        Arguments("--x.", 2, 0, 1, 4),
        "collectors",
        "--x.collectors 3",
    ),
    (
        {"waiting": 0.6, "learning": 0.3},
        {"inferring": 0.6},
        Arguments("--x.", 2, 0, 1, 2),
        "inference",
        "rollouts-ahead 1",
    ),
    ({"waiting": 0.6, "learning": 0.3}, {"inferring": 0.6}, Arguments("--x.", 2, 1, 1, 2), "inference", "more cores"),
    ({"waiting": 0.3, "learning": 0.6}, {}, ONE_PROCESS, "updates", "rollouts-ahead 1"),
    ({"waiting": 0.3, "learning": 0.6}, {}, Arguments("--x.", 1, 1, 1, 4), "updates", "torchrun"),
    ({"simulating": 0.6}, {}, Arguments.without_collectors(), "simulation", "torchrun"),
    ({"validating": 0.6}, {}, ONE_PROCESS, "validation", "--evaluation.processes 2"),
    ({"validating": 0.6}, {}, Arguments.without_collectors(), "validation", "--loop.validate-every"),
    ({"saving": 0.6}, {}, ONE_PROCESS, "saved states", "save-every"),
    ({"syncing": 0.6}, {}, ONE_PROCESS, "device", "--device"),
]


@pytest.mark.parametrize(("own", "collector", "arguments", "what", "cure"), CASES)
def test_one_sentence_names_what_is_waited_for_and_the_argument(own, collector, arguments, what, cure):
    sentence = bottleneck({OWN: own, **({"collector 1": collector} if collector else {})}, arguments)
    assert what in sentence and cure in sentence.partition("to change that")[2]
    assert sentence.endswith(".") and ". " not in sentence


def test_without_records_nothing_is_said():
    assert bottleneck({OWN: {}}, ONE_PROCESS) == ""


def test_a_run_writes_its_timeline_and_a_resumed_one_continues_it(tmp_path, untrained):
    recipe = replace(improve(), policy=str(untrained()))
    folder = RunFolder(tmp_path / "run", recipe)
    page = TimelinePage(folder, ONE_PROCESS)
    assert page.write() is None and not (folder.path / "timeline.html").exists(), "nothing was recorded"
    recipe.run(folder)
    folder.close()
    saved = json.loads((folder.path / "timeline.json").read_text())
    assert [period["first"] for period in saved["periods"]] == list(range(recipe.rl.loop.iterations + 1))
    learner = saved["periods"][-1]["seconds"][OWN]
    assert learner.keys() >= {"simulating", "inferring", "learning", "syncing", "validating", "saving"}
    assert "Where the time goes: run" in (folder.path / "timeline.html").read_text(encoding="utf-8")
    resumed = RunFolder.resume(folder.path)
    again = TimelinePage(resumed, ONE_PROCESS)
    resumed.close()
    assert [period.first for period in again.timeline.periods] == [period["first"] for period in saved["periods"]]
