"""Suites: what they play, how they are found, and the protocol that says which numbers are comparable."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest

from sims import catalog
from tests.recipes.quick_suite import quick
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.evaluation.seed_ranges import TEST, VALIDATION
from vla_rl.recipes.config_files import config_files, functions_of
from vla_rl.recipes.suite import Suite, differing, find_suite

SHIPPED = [
    (path, function)
    for path in config_files("suites")
    for function in functions_of(path)
    if path.parent.name == "suites"
]


def test_tabletop_is_among_the_shipped_suites():
    assert ("tabletop.py", "tabletop") in [(path.name, function) for path, function in SHIPPED]


@pytest.mark.parametrize(("path", "function"), SHIPPED, ids=str)
def test_every_shipped_suite_is_found_by_its_short_name_and_plays_test_seeds(path, function):
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
def test_a_suite_of_another_installation_names_options_that_its_environment_takes(name, module, count):
    suite, make_in_process = find_suite(name), load(f"sims.{module}:make_in_process")
    assert len(suite.tasks) == count
    for task in suite.tasks:
        assert catalog.CATALOG[task.env.name] == f"sims.{module}:make"
        given = inspect.signature(make_in_process).bind(1, **task.env.options)
        given.apply_defaults()
        limit = given.arguments["time_limit"] or load("sims.libero:TIME_LIMITS")[given.arguments["suite"]]
        assert limit == task.horizon


def test_libero_is_played_from_every_initial_state():
    assert {seed % 50 for seed in find_suite("libero-spatial").seeds} == set(range(50))


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


def test_a_suite_that_does_not_exist_is_said():
    with pytest.raises(UserError, match=r"no suite 'tabletopp', so nothing can be evaluated; did you mean 'tabletop'"):
        find_suite("tabletopp")
    with pytest.raises(UserError, match="returns a EnvConfig and no suite"):
        find_suite(f"{Path(__file__).with_name('quick_suite.py')}:no_suite")


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


def test_a_suite_whose_tasks_have_one_name_is_refused():
    task = quick().tasks[0]
    for tasks in ((), (task, task)):
        with pytest.raises(UserError, match="results could not be told apart"):
            Suite("twice", 1, tasks)
    with pytest.raises(UserError, match=r"Suite.episodes is 0"):
        replace(quick(), episodes=0)
