"""Where the time of a run went, as it is printed."""

from __future__ import annotations

from vla_rl.recipes.terminal import Clock, mostly, steps_per_second

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


def test_what_collectors_did_beside_is_said_apart():
    assert shares(AHEAD) == "waiting 25%, learning 75%; collectors: simulation 75%, inference 25%"


def test_the_largest_part_and_the_speed_of_an_iteration_are_named():
    assert mostly(ITERATION) == "50% simulation" and mostly(AHEAD) == "75% learning"
    assert mostly({"env/steps_total": 0.0}) == ""
    assert steps_per_second(ITERATION) == 9.0
    assert steps_per_second(ITERATION | {"time/iteration_s": 15.0, "time/validate_s": 5.0}) == 9.0
