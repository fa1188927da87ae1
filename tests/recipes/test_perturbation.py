"""Perturbation suites: their points, and curves and the worst case in the results and on the page."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from tests.recipes.quick_suite import save_policy
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.report import Report
from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.perturbation import PerturbationSuite, perturbation_grid, perturbation_sweep
from vla_rl.recipes.policies import deployed_policy
from vla_rl.recipes.sims import parameters_of
from vla_rl.recipes.suite import Suite, find_suite
from vla_rl.recipes.suite_run import RESULTS, SuiteRun

LIFT = EnvConfig("lift", {"cubes": 2})


def names(suite):
    return [task.name for task in suite.tasks]


def test_a_sweep_varies_one_parameter_at_a_time_and_has_the_nominal_point_once():
    suite = perturbation_sweep("s", 1, LIFT, 60, {"friction": (0.1, 1.0, 2.0), "latency": (0.0, 1.0)})
    assert names(suite) == ["nominal", "friction=0.1", "friction=2", "latency=1"]
    assert suite.tasks[2].env == EnvConfig(
        "randomize", {"env": "lift", "options": {"cubes": 2}, "parameters": {"friction": 2.0}}
    )
    assert [parameter.name for parameter in suite.varied] == ["friction", "latency"]


def test_a_sweep_without_values_covers_all_that_the_environment_declares():
    suite = perturbation_sweep("s", 1, LIFT, 60)
    declared = parameters_of("lift")
    assert suite.varied == declared
    assert len(suite.tasks) == 1 + sum(len(parameter.grid(7)) - 1 for parameter in declared)


def test_a_grid_has_all_combinations():
    suite = perturbation_grid("g", 1, LIFT, 60, {"friction": (0.1, 1.0), "latency": (0.0, 1.0, 2.0)})
    assert len(suite.tasks) == 6 and names(suite)[-1] == "friction=1,latency=2"


@pytest.mark.parametrize(("values", "sentence"), [({"fricton": (1.0,)}, "'friction'"), ({"friction": (9.0,)}, "be 9")])
def test_what_cannot_be_varied_is_refused_when_the_suite_is_made(values, sentence):
    for build in (perturbation_sweep, perturbation_grid):
        with pytest.raises(UserError, match=sentence):
            build("s", 1, LIFT, 60, values)


def test_a_suite_survives_json_and_its_protocol_depends_on_the_points():
    one, other = (perturbation_sweep("s", 1, LIFT, 60, {"friction": (0.1, high)}) for high in (1.5, 2.0))
    assert from_json(json.loads(json.dumps(to_json(one)))) == one and one.protocol != other.protocol


def test_the_shipped_suites_are_played_by_the_expert_of_the_wrapped_task():
    for name, count in (("perturbation-lift", 100), ("perturbation-lift-grid", 54)):
        suite = find_suite(name)
        assert isinstance(suite, PerturbationSuite) and len(suite.tasks) >= count
        for task in suite.tasks[:2]:
            assert task.env.spec().time_limit == task.horizon
        assert deployed_policy("expert", suite.tasks[0].env)


def episode(task, seed, success):
    return EpisodeResult(
        task, seed, success, "success" if success else "time_limit", 10, float(success), "", 1, 1.0, 1.0
    )


@pytest.fixture
def analyzed():
    suite = perturbation_grid("g", 1, LIFT, 60, {"friction": (0.1, 1.0), "latency": (0.0, 2.0)}, episodes=4)
    wins = {
        "friction=0.1,latency=0": 2,
        "friction=1,latency=0": 4,
        "friction=0.1,latency=2": 0,
        "friction=1,latency=2": 3,
    }
    episodes = [episode(name, seed, seed < count) for (name, count), seed in itertools.product(wins.items(), range(4))]
    return suite, suite.analyze(episodes)


def test_results_hold_the_curves_and_the_worst_case(analyzed):
    found = analyzed[1]["perturbation"]
    assert [(item["value"], item["score"]) for item in found["curves"]["friction"]] == [(0.1, 0.5), (1.0, 1.0)]
    assert [(item["value"], item["low"]) for item in found["curves"]["latency"]] == [
        (0.0, Rate.of([True] * 4).low),
        (2.0, Rate.of([True] * 3 + [False]).low),
    ]
    worst = found["worst_case"]
    assert worst["values"] == {"friction": 0.1, "latency": 2.0} and worst["points"] == 4
    assert worst["score"]["score"] == 0.0 and worst["score"]["episodes"] == 2
    assert worst["mean"] == pytest.approx((0.5 + 1.0 + 0.0 + 0.75) / 4)


def test_the_page_shows_every_curve_with_its_unit_and_the_worst_point(analyzed, tmp_path):
    suite, results = analyzed
    report = Report("page")
    suite.draw(report, results)
    results["perturbation"]["worst_case"]["ties"] = 3
    suite.draw(report, results)
    page = report.write(tmp_path / "report.html").read_text()
    assert "friction: friction of fingers, cubes and table" in page
    assert "friction (factor), nominal 1" in page and "latency (control steps), nominal 0" in page
    assert "<strong>friction 0.1, latency 2</strong>: success 0.0% [0.0%, 80.2%]" in page and "56.2%" in page
    assert page.count("In the other half 3 more points were as bad.") == 1


def test_the_page_has_the_videos_of_the_worst_point_and_not_those_of_all(analyzed):
    suite, results = analyzed
    assert suite.shown(results) == ["nominal", "friction=0.1,latency=2"]
    assert suite.shown(results)[1] in [task.name for task in suite.tasks]
    assert Suite.shown(suite, results) == [task.name for task in suite.tasks]


def test_an_evaluation_writes_them(tmp_path):
    policy = save_policy(tmp_path / "policy")
    env = EnvConfig("tests.recipes.quick_suite:make", {"radius": 1.2})
    suite = perturbation_sweep("s", 1, env, 16, {"action_noise": (0.0, 1.0)}, "at_end", episodes=4)
    results = SuiteRun(suite, policy, tmp_path / "out", num_envs=4, videos=0).run()
    written = json.loads((tmp_path / "out" / RESULTS).read_text())
    curve = written["perturbation"]["curves"]["action_noise"]
    assert curve == results["perturbation"]["curves"]["action_noise"]
    assert [item["value"] for item in curve] == [0.0, 1.0]
    assert [item["score"] for item in curve] == [written["tasks"][name]["success"] for name in names(suite)]
    assert "action_noise (half ranges), nominal 0" in (tmp_path / "out" / "report.html").read_text()
    returns = [np.array(written["tasks"][name]["returns"]["mean"]) for name in names(suite)]
    assert returns[0] != returns[1]  # the noise was really there
