"""Two policies on the same seeds: pairs, tests and intervals, and what cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.recipes.quick_suite import quick
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.results import EpisodeResult, write_tables
from vla_rl.evaluation.stats import Rate, episodes_needed, independent_discordance, mcnemar_exact, pairs_of
from vla_rl.recipes.suite_run import compare, power_table, read_results, results_of
from vla_rl.training.tracking import write_json

SUITE = replace(quick(), episodes=200)


def save(folder, name, seed, chances, suite=SUITE):
    """Results of a policy that succeeds at random; the easier a seed, the sooner any policy does."""
    rng, ease = np.random.default_rng(seed), np.random.default_rng(99).random((2, 200))
    episodes = []
    for i, task in enumerate(suite.tasks):
        for j, number in enumerate(suite.seeds):
            won = bool(0.8 * ease[i, j] + 0.2 * rng.random() < chances[i])
            cause = "success" if won else "time_limit"
            returns = float(won) + 0.01 * float(rng.random())
            episodes.append(EpisodeResult(task.name, number, won, cause, 16, returns, "", 8, 1.0, 2.0))
    folder.mkdir()
    write_tables(folder, episodes)
    write_json(folder / "results.json", results_of(suite, {"name": name, "sha256": "", "device": "cpu"}, episodes))
    return episodes


def test_pairs_are_matched_by_task_and_seed(tmp_path):
    a = save(tmp_path / "a", "a", 1, (0.8, 0.5))
    b = save(tmp_path / "b", "b", 2, (0.7, 0.5))
    pairs = pairs_of(a, b[::-1], by_success=True)
    alone = sum(x.success and not y.success for x, y in zip(a, b, strict=True))
    other = sum(y.success and not x.success for x, y in zip(a, b, strict=True))
    assert (pairs.first_alone, pairs.second_alone, pairs.episodes) == (alone, other, 400) and alone > other > 0
    assert pairs.p_value == mcnemar_exact(alone, other) and pairs.discordant == (alone + other) / 400
    assert pairs.difference.mean == pytest.approx((alone - other) / 400)
    assert pairs.difference.low < pairs.difference.mean < pairs.difference.high
    swapped = pairs_of(b, a, by_success=True)
    assert swapped.p_value == pairs.p_value and swapped.difference.mean == pytest.approx(-pairs.difference.mean)


def test_the_interval_resamples_within_tasks():
    """One policy always wins one task and never the other: within tasks nothing varies."""
    first = [
        EpisodeResult(task, i, task == "x", "", 1, 3.0 * (task == "x"), "", 1, 1.0, 1.0)
        for task in "xy"
        for i in range(40)
    ]
    second = [replace(one, success=False, returns=0.0) for one in first]
    found = pairs_of(first, second, by_success=False).difference
    assert (found.low, found.mean, found.high) == (1.5, 1.5, 1.5)
    won = pairs_of(first, second, by_success=True).difference
    assert won.low < won.mean == 0.5 < won.high, "of successes all pairs count, which is wider and never a point"


def test_a_comparison_has_every_task_and_all_together(tmp_path):
    a, b = save(tmp_path / "a", "a", 1, (0.8, 0.5)), save(tmp_path / "b", "b", 2, (0.6, 0.5))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert json.loads((tmp_path / "a" / "comparison.json").read_text()) == found
    assert list(found["tasks"]) == ["wide", "narrow", "all"] and found["protocol"] == SUITE.protocol
    wide = found["tasks"]["wide"]
    assert wide["episodes"] == 200 and wide["p_value"] < 0.001 < found["tasks"]["narrow"]["p_value"]
    for rate, episodes in zip(wide["rates"], (a, b), strict=True):
        assert Rate(**rate) == Rate.of([one.success for one in episodes if one.task == "wide"])
    assert found["tasks"]["all"]["rates"][0]["episodes"] == 400
    page = (tmp_path / "a" / "comparison.html").read_text()
    assert "a against b" in page and "narrow" in page


def test_a_table_that_lacks_episodes_is_named(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        save(tmp_path / name, name, seed, (0.8, 0.5))
    table = tmp_path / "b" / "episodes.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match=r"b/episodes.csv' has 399 episodes of 400, so they cannot be paired"):
        compare(tmp_path / "a", tmp_path / "b")


def test_without_success_returns_are_compared(tmp_path):
    tasks = tuple(replace(task, success=None) for task in SUITE.tasks)
    suite = replace(SUITE, tasks=tasks)
    a, b = (save(tmp_path / name, name, seed, (0.8, 0.5), suite) for name, seed in (("a", 1), ("b", 2)))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert list(found["tasks"]) == ["wide", "narrow"] and found["tasks"]["wide"]["p_value"] is None
    mean = np.mean([x.returns - y.returns for x, y in zip(a, b, strict=True) if x.task == "wide"])
    assert found["tasks"]["wide"]["difference"]["mean"] == pytest.approx(mean)


def test_other_protocols_are_refused_with_what_differs(tmp_path):
    save(tmp_path / "a", "a", 1, (0.8, 0.5))
    save(tmp_path / "b", "b", 2, (0.8, 0.5), replace(SUITE, noise_seed=2))
    with pytest.raises(UserError, match=r"played by different protocols \(noise_seed: 1 or 2\)"):
        compare(tmp_path / "a", tmp_path / "b")


def test_a_folder_without_results_is_said(complaint, tmp_path):
    with pytest.raises(UserError, match="holds no finished evaluation of a suite"):
        read_results(tmp_path)
    (tmp_path / "results.json").write_text("[]")
    assert "is damaged" in complaint("eval", tmp_path, "--against", tmp_path)


def test_the_command_prints_a_comparison_and_the_episodes_it_takes(capsys, tmp_path):
    save(tmp_path / "a", "a", 1, (0.8, 0.5))
    save(tmp_path / "b", "b", 2, (0.6, 0.5))
    main(["eval", str(tmp_path / "a"), "--against", str(tmp_path / "b"), "--power", "0.05"])
    said = capsys.readouterr().err
    measured = compare(tmp_path / "a", tmp_path / "b")["tasks"]["wide"]
    discordant = (measured["first_alone"] + measured["second_alone"]) / 200
    assert f"{episodes_needed(0.05, discordant):,}, as often as these two disagree" in said
    assert "narrow" in said and "difference" in said
    main(["eval", str(tmp_path / "b"), "--power", "0.05"])
    rate = read_results(tmp_path / "b")["tasks"]["wide"]["success"]
    said = capsys.readouterr().err
    assert f"{episodes_needed(0.05, independent_discordance(rate, 0.05)):,}" in said and "wide" in said
    main(["eval", "--power", "0.05"])
    said = capsys.readouterr().err
    assert "success 50%" in said and "1,606" in said and "success 95%" in said and "157" in said


def test_a_policy_with_no_room_above_is_compared_with_a_worse_one():
    (above,), (below,) = power_table(0.05, [0.97]), power_table(0.05, [0.92])
    assert above[0] == 0.97 and above[1:] == below[1:], "92 and 97 % are the same pair, whichever is named"
    assert power_table(0.6, [0.5]) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--against", "x"), "--against compares two folders and one was named"),
        (("--power", "1.5"), "--power 1.5 is no difference of success rates"),
        (("--power", "0.05", "--level", "3"), "has no field '--level'"),
        (("x", "--agains", "y"), "eval has no option '--agains', so nothing was evaluated; did you mean '--against'?"),
    ],
)
def test_what_is_missing_or_wrong_is_said(complaint, arguments, sentence):
    assert sentence in complaint("eval", *arguments)
