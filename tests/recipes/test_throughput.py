"""Predicted seconds of an iteration, by hand; figures of GPUs; what ``vla-rl inspect --hardware`` says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recipes.quick import improve
from vla_rl.cli.inspect import main
from vla_rl.contract.errors import UserError
from vla_rl.recipes.hardware import GPUS, hardware_of
from vla_rl.recipes.throughput import HOST, LAUNCH, UTILISATION, Measured, Plan, Traffic, config_of, predict
from vla_rl.recipes.throughput_tables import compute_factor, optimizer_steps, rollout_size
from vla_rl.training.tracking import RunFolder

MEASURED = Measured(simulate=8.0, infer=4.0, learn=6.0, other=1.0, steps=1000.0)
MB = Traffic(trained=1e6, optimizer_steps=10)
CASES = [
    (Plan(), 8 + 4 + 6 + 1),
    (Plan(collectors=2), (8 + 4) / 2 + 6 + 2e6 / HOST + 1),
    (Plan(collectors=2, rollouts_ahead=1), 6 + 2e6 / HOST + 1),
    (Plan(collectors=4, rollouts_ahead=1), 6 + 1),  # learning is longer
    (Plan(collectors=4, rollouts_ahead=1, cores=2), (8 + 4 + 6) / 2 + 1),
    (Plan(collectors=4, shared_gpu=True), 8 / 4 + 4 + 6 + 4e6 / HOST + 1),
    (Plan(collectors=2, ranks=2, link=1e6), (8 + 4) / 4 + 6 / 2 + 10 * 1.0 + 2e6 / HOST + 1),
    (Plan(ranks=4, link=1e6), (8 + 4) / 4 + 6 / 4 + 10 * 1.5 + 1),
]


@pytest.mark.parametrize(("plan", "seconds"), CASES)
def test_an_iteration_by_hand(plan, seconds):
    found = predict(MEASURED, plan, MB)
    assert found.iteration == pytest.approx(seconds, rel=1e-12)
    assert found.steps_per_second == pytest.approx(1000 / seconds)


def test_the_longest_part_is_named_and_rollouts_and_devices_scale_their_parts():
    assert predict(MEASURED, Plan()).dominant == "collect"
    assert predict(MEASURED, Plan(collectors=4)).dominant == "learn"
    assert Measured(16, 8, 12, 2, 2000) == MEASURED * 2
    assert MEASURED.computing(0.5) == replace(MEASURED, infer=2.0, learn=3.0)


def line(step: int, **seconds: float) -> dict:
    return {"step": step, "env/steps": 100.0, **{name.replace("__", "/"): value for name, value in seconds.items()}}


def test_what_was_measured_is_in_sum_over_all_processes_without_validation_and_the_first_iterations():
    slow = dict(time__iteration_s=100.0, time__env_s=90.0, time__learn_s=5.0)
    own = dict(time__iteration_s=12.0, time__validate_s=3.0, time__env_s=4.0, time__encode_s=1.0, time__act_s=0.5)
    lines = [{"step": 0, "eval/score": 0.5}, line(1, **slow), line(2, **slow), *[line(3, **own, time__learn_s=2.0)] * 2]
    assert Measured.of(lines, collectors=1) == Measured(4.0, 1.5, 2.0, 12 - 3 - 5.5 - 2, 100.0)
    beside = dict(
        time__iteration_s=10.0, time__wait_s=7.0, time__learn_s=2.0, collector__env_s=4.0, collector__act_s=2.0
    )
    assert Measured.of([line(i, **beside) for i in range(4)], collectors=3) == Measured(12.0, 6.0, 2.0, 1.0, 100.0)
    with pytest.raises(UserError, match=r"no more than 2 iterations with a clock"):
        Measured.of(lines[:3], collectors=1)


def test_the_policy_takes_what_its_flops_or_its_operations_take():
    h100 = hardware_of("2xH100")
    large, peak = 1e16, UTILISATION * 989e12
    assert compute_factor(MEASURED, large, 0, h100) == pytest.approx(large / peak / 4.0)
    assert compute_factor(MEASURED, 1.0, 1000, h100) == pytest.approx(1000 * LAUNCH * 2 / 4.0)
    assert compute_factor(MEASURED, 0.0, 1000, h100) == 1.0


def test_sizes_of_a_rollout_and_of_its_updates():
    rl = improve().rl
    assert rollout_size(rl) == 8
    small = replace(rl, algorithm=replace(rl.algorithm, epochs=3, minibatch=3))
    assert optimizer_steps(small) == 9  # of 8 decisions, the last minibatch of an epoch smaller


def test_hardware_is_read_as_people_write_it():
    assert [str(hardware_of(text)) for text in ("8xH100", "h100", "64 X a100", "2xRTX 4090", "4*l40s")] == [
        "8xH100", "1xH100", "64xA100", "2xRTX4090", "4xL40S",
    ]  # fmt: skip
    assert hardware_of("8xH100").one_way == 450e9 and GPUS["L40S"].memory == 48


@pytest.mark.parametrize("text", ["", "0xH100", "-1", "8x", "8xB300", "H100x8"])
def test_other_hardware_is_refused_in_one_sentence(text):
    with pytest.raises(UserError, match=r"nothing can be predicted for it; [^.]*[.?]$"):
        hardware_of(text)


@pytest.mark.full
def test_inspect_says_the_memory_of_a_rank_and_the_speed(tmp_path, quick, capsys, untrained, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    recipe = replace(improve(), policy=str(untrained()))
    folder = RunFolder(tmp_path / "run", recipe)
    seconds = {"time/env_s": 4.0, "time/act_s": 2.0, "time/learn_s": 1.0, "time/iteration_s": 8.0, "env/steps": 40.0}
    for step in range(1, 5):
        folder.log("rl", step, seconds)
    folder.close()
    main([quick, "--policy", str(untrained()), "--hardware", "2xH100", "--measured", str(folder.path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "Memory of each of 2 learner ranks" in said and "fits into the 80 GB of one H100" in said
    assert "as measured │ 6 │ 1 │ 0 │ 1 │ 8 │ 5 │ collect" in said
    assert "2 x 1, ahead │" in said and "2 x 4" not in said, "four environments, which eight processes cannot share"
    assert "simulating 4 s, inferring 2 s, learning 1 s, other 1 s" in said


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--hardware", "8xH101"], "did you mean 'H100'"),
        (["--hardware", "3xH100"], "cannot be shared equally by 3 processes"),
        (["--measured", "runs/nowhere"], "add --hardware"),
    ],
)
def test_inspect_refuses_what_it_cannot_predict(options, complaint, quick):
    with pytest.raises(UserError, match=complaint):
        main([quick, "--policy", "", *options])


def test_a_run_that_was_not_measured_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json, so it is no run"):
        config_of(str(tmp_path))
