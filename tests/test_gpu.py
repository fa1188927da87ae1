"""The script of `make gpu` without a GPU: it runs small, says so, and goes on after what fails."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from sims.catalog import check_options, declared_spec
from sims.maniskill.make import make_in_process
from tests import gpu
from tests.benchmarks.measure import NotRun

TINY = gpu.Plan.of("cpu")


@pytest.fixture
def some(monkeypatch):
    """Only these parts, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda **parts: monkeypatch.setattr(gpu, "parts", lambda: parts)


def test_without_a_gpu_it_runs_small_and_says_so(some, tmp_path, capsys):
    some(bench=partial(gpu.benchmark, "env_vs_rollout"), speed=gpu.parts()["speed MuJoCo lift"])
    gpu.main(["--out", str(tmp_path)])
    assert capsys.readouterr().out.startswith("There is no GPU: no number says how fast a GPU is.")
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["about"]["small"] is True and written["about"]["device"].startswith("cpu (")
    assert [(line["part"], line["what"]) for line in written["lines"]] == [
        ("bench", "env_vs_rollout"),
        ("speed", "lift, 2 environments"),
        ("speed", "lift, 2 environments, no pictures"),
    ]
    assert all(line["value"] > 0 for line in written["lines"])
    table = (tmp_path / "results.md").read_text().splitlines()
    assert table[0].startswith("There is no GPU") and table[2] == "| part | what | value | aim | note |"
    assert len(table) == 7 and table[5].startswith("| speed | lift, 2 environments | ")


def fails(plan: gpu.Plan) -> list[gpu.Line]:
    raise RuntimeError("no kernel | for this")


def endless(plan: gpu.Plan) -> list[gpu.Line]:
    while True:
        torch.ones(1).sum()


def missing(plan: gpu.Plan) -> list[gpu.Line]:
    raise NotRun("pip install it")


def works(plan: gpu.Plan) -> list[gpu.Line]:
    return [gpu.Line("works", "", 1.0)]


def test_what_fails_is_slow_or_is_missing_is_a_line_and_the_others_go_on(some, tmp_path, monkeypatch):
    some(one=fails, two=endless, three=missing, four=works)
    monkeypatch.setattr(gpu.Plan, "of", classmethod(lambda kind, device: replace(TINY, seconds=0.2)))
    lines = gpu.main(["--out", str(tmp_path)]).lines
    notes = ["failed: RuntimeError: no kernel / for this", "not finished after 0 s", "pip install it", ""]
    assert [line.note for line in lines] == notes and [line.value for line in lines] == [None, None, None, 1.0]


def test_every_part_has_its_place():
    names = list(gpu.parts())
    assert names[0] == "tests" and "models" in names and "bench imagined_vs_simulator" in names
    for name, simulator in gpu.SIMULATORS.items():
        assert {f"speed {name}", f"PPO {name}"} <= set(names)
        if simulator.env == "maniskill":  # which builds a task to know its spec
            options = simulator.options("cuda")
            check_options(name, make_in_process, options)
            assert (options["obs"] == "rgb") == bool(simulator.cameras) and options["device"] == "cuda"
            continue
        seen = declared_spec(simulator.env, **simulator.options("cpu"))
        blind = declared_spec(simulator.env, **simulator.options("cpu"), **simulator.blind)
        assert set(simulator.cameras) <= set(seen.images) and (not simulator.blind or not blind.images)


@pytest.mark.full
def test_a_run_of_ppo_tells_its_speed_its_return_and_where_the_time_went():
    speed, outcome = gpu.train(gpu.SIMULATORS["MuJoCo lift"], TINY)
    assert speed.what == "lift, 2 environments x 2 decisions" and speed.value > 0 and speed.unit == "steps/s"
    assert "simulation" in speed.note and "learning" in speed.note
    assert outcome.what == "lift, test return" and outcome.note == "8 steps" and outcome.value >= 0
