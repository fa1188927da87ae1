"""Suites, also of perturbations: what they play, how they are found, the protocol, curves and the worst case."""

from __future__ import annotations

import inspect
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from sims import catalog
from tests.recipes.quick_suite import quick, save_policy
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.evaluation.report import Report
from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.seed_ranges import TEST, VALIDATION
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.config_files import config_files, functions_of
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.perturbation import PerturbationSuite, perturbation_grid, perturbation_sweep
from vla_rl.recipes.policies import deployed_policy
from vla_rl.recipes.sims import parameters_of
from vla_rl.recipes.suite import differing, find_suite
from vla_rl.recipes.suite_run import RESULTS, SuiteRun

SHIPPED = [
    (path, function)
    for path in config_files("suites")
    for function in functions_of(path)
    if path.parent.name == "suites"
]


@pytest.mark.parametrize(("path", "function"), SHIPPED, ids=str)
def test_every_shipped_suite_is_found_and_plays_test_seeds(path, function):
    name = function.replace("_", "-")
    suite = find_suite(name)
    assert suite == find_suite(f"{path}:{function}") and suite.name == name
    assert suite.seeds[0] == TEST.start and suite.seeds[-1] in TEST
    assert from_json(to_json(suite)).protocol == suite.protocol


@pytest.mark.parametrize("name", ["tabletop", "genesis", "metaworld-mt10", "metaworld-mt50"])
def test_a_suite_fits_its_environments(name):
    """As far as their specs are known without what may not be installed."""
    for task in find_suite(name).tasks:
        task.check(task.env.spec())


@pytest.mark.parametrize(
    ("name", "module", "count"),
    [("robosuite", "robosuite", 5), ("libero", "libero", 40), ("maniskill", "maniskill.make", 4)],
)
def test_a_suite_elsewhere_names_options_that_exist(name, module, count):
    suite, make_in_process = find_suite(name), load(f"sims.{module}:make_in_process")
    assert len(suite.tasks) == count
    for task in suite.tasks:
        assert catalog.CATALOG[task.env.name] == f"sims.{module}:make"
        given = inspect.signature(make_in_process).bind(1, **task.env.options)
        given.apply_defaults()
        limit = given.arguments["time_limit"] or load("sims.libero:TIME_LIMITS")[given.arguments["suite"]]
        assert limit == task.horizon


def test_a_suite_of_ones_own_is_named_by_file_and_function(monkeypatch, tmp_path):
    file = str(Path(__file__).with_name("quick_suite.py"))
    assert find_suite(f"{file}:quick") == quick()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "suites").mkdir(parents=True)
    (tmp_path / "configs" / "suites" / "mine.py").write_text(Path(file).read_text())
    assert find_suite("quick") == quick() == find_suite("mine.py:quick")


def test_a_suite_is_found_beside_one_whose_package_is_missing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "suites").mkdir(parents=True)
    (tmp_path / "configs" / "suites" / "absent.py").write_text(
        "import nothing_of_that_name\n\n\ndef absent():\n    pass\n"
    )
    assert find_suite("tabletop").name == "tabletop"
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        find_suite("absent")


def test_every_change_of_what_is_played_is_another_protocol():
    suite = quick()
    first = suite.tasks[0]
    others = [
        replace(suite, version=2),
        replace(suite, episodes=13),
        replace(suite, first_seed=suite.first_seed + 1),
        replace(suite, noise_seed=2),
        replace(suite, tasks=suite.tasks[:1]),
        replace(suite, tasks=(replace(first, horizon=17), *suite.tasks[1:])),
        replace(suite, tasks=(replace(first, success="once"), *suite.tasks[1:])),
        replace(suite, tasks=(replace(first, env=first.env.with_options(radius=1.0)), *suite.tasks[1:])),
    ]
    protocols = {other.protocol for other in others}
    assert len(protocols) == len(others) and suite.protocol not in protocols
    assert suite.protocol == quick().protocol and suite.protocol.startswith("quick-1:")
    differences = [differing(to_json(suite), to_json(other)) for other in others]
    assert differences[0] == "version: 1 or 2" and differences[5] == "tasks.0.horizon: 16 or 17"
    assert differing(to_json(suite), to_json(quick())) == ""
    assert differing({"a": 1}, {"a": 1, "b": 2}) == "b: None or 2"


def test_a_part_of_a_suite():
    suite = quick()
    assert suite.of((), 0, "test") == suite
    part = suite.of(("narrow",), 3, "validation")
    assert [task.name for task in part.tasks] == ["narrow"] and part.seeds == [VALIDATION.start + i for i in range(3)]
    with pytest.raises(UserError, match="has no task 'narow'; did you mean 'narrow'"):
        suite.of(("narow",), 0, "test")
    with pytest.raises(UserError, match="no 'tests' seeds; did you mean 'test'"):
        suite.of((), 0, "tests")


# -- perturbations -----------------------------------------------------------------------------------------------------

LIFT = EnvConfig("lift", {"cubes": 2})


def test_a_sweep_varies_one_parameter_at_a_time():
    """With the nominal point once; without values all parameters that the environment declares."""
    suite = perturbation_sweep("s", 1, LIFT, 60, {"friction": (0.1, 1.0, 2.0), "latency": (0.0, 1.0)})
    assert [task.name for task in suite.tasks] == ["nominal", "friction=0.1", "friction=2", "latency=1"]
    assert suite.tasks[2].env == EnvConfig(
        "randomize", {"env": "lift", "options": {"cubes": 2}, "parameters": {"friction": 2.0}}
    )
    assert [parameter.name for parameter in suite.varied] == ["friction", "latency"]
    declared, whole = parameters_of("lift"), perturbation_sweep("s", 1, LIFT, 60)
    assert whole.varied == declared
    assert len(whole.tasks) == 1 + sum(len(parameter.grid(7)) - 1 for parameter in declared)


def test_a_grid_has_all_combinations():
    suite = perturbation_grid("g", 1, LIFT, 60, {"friction": (0.1, 1.0), "latency": (0.0, 1.0, 2.0)})
    assert len(suite.tasks) == 6 and suite.tasks[-1].name == "friction=1,latency=2"
    assert from_json(json.loads(json.dumps(to_json(suite)))) == suite


def test_the_shipped_perturbations_are_played_by_the_expert():
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


def test_the_page_shows_every_curve_and_the_worst_point(analyzed, tmp_path):
    suite, results = analyzed
    report = Report("page")
    results["perturbation"]["worst_case"]["ties"] = 3
    suite.draw(report, results)
    page = report.write(tmp_path / "report.html").read_text()
    assert "friction (factor), nominal 1" in page and "latency (control steps), nominal 0" in page
    assert "<strong>friction 0.1, latency 2</strong>: success 0.0% [0.0%, 80.2%]" in page and "56.2%" in page
    assert page.count("In the other half 3 more points were as bad.") == 1
    assert suite.shown(results) == ["nominal", "friction=0.1,latency=2"], "not the videos of all points"


def test_an_evaluation_writes_them(tmp_path):
    policy = save_policy(tmp_path / "policy")
    env = EnvConfig("tests.recipes.quick_suite:make", {"radius": 1.2})
    suite = perturbation_sweep("s", 1, env, 16, {"action_noise": (0.0, 1.0)}, "at_end", episodes=4)
    SuiteRun(suite, policy, tmp_path / "out", num_envs=4, videos=0).run()
    written = json.loads((tmp_path / "out" / RESULTS).read_text())
    curve, tasks = written["perturbation"]["curves"]["action_noise"], written["tasks"].values()
    assert [item["value"] for item in curve] == [0.0, 1.0]
    assert [item["score"] for item in curve] == [task["success"] for task in tasks]
    assert "action_noise (half ranges), nominal 0" in (tmp_path / "out" / "report.html").read_text()
    assert len({task["returns"]["mean"] for task in tasks}) == 2, "the noise was really there"
