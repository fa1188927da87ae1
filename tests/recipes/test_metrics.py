"""Metrics of a run: their names have prefixes, and runs with the names of an older version are refused."""

from __future__ import annotations

import json

import pytest

from vla_rl.contract.errors import UserError
from vla_rl.evaluation.report import Series
from vla_rl.recipes.metrics import rows, validation_curve, watched


def _written(path, lines):
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_validations_count_the_episodes_before_them(tmp_path):
    score = {"eval/score": 0.5, "eval/score_low": 0.25, "eval/score_high": 0.75, "eval/episodes": 8}
    lines = [{"stage": "rl", "step": i, "rollout/episodes": 10 * i, **(score if i % 2 == 0 else {})} for i in range(3)]
    found = watched(_written(tmp_path, [{"stage": "imitation", "step": 1, "loss": 1.0}, *lines]))
    assert found == [{"episodes": n, "played": 8, "success": 0.5, "low": 0.25, "high": 0.75} for n in (0, 30)]


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


def test_the_validation_curve_has_a_point_and_an_interval_for_every_validation():
    score = {"eval/score": 0.5, "eval/score_low": 0.25, "eval/score_high": 0.75}
    lines = [{"step": 1}, {"step": 2, "env/steps_total": 64, **score}, {"step": 4, "env/steps_total": 128, **score}]
    assert validation_curve("deployed", lines, "step") == Series("deployed", [2, 4], [0.5] * 2, [0.25] * 2, [0.75] * 2)
    assert validation_curve("deployed", lines, "env/steps_total").x == [64, 128]


@pytest.mark.parametrize("name", ["validation", "env_steps", "env_steps_total"])
def test_metrics_of_an_older_version_are_refused_in_one_sentence(tmp_path, name):
    _written(tmp_path, [{"stage": "imitation", "step": 1}, {"stage": "rl", "step": 1, name: 0.5}])
    assert len(rows(tmp_path, "imitation")) == 1
    with pytest.raises(UserError, match=rf"names of an older vla-rl \({name}\).*or run it again") as caught:
        rows(tmp_path, "rl")
    assert str(caught.value).count(". ") == 0
