"""An evaluation of a suite: the same tables byte for byte, however it is played or stopped; two policies compared."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.commands import save_untrained
from tests.held import Killed
from tests.recipes.quick_suite import Goal, quick, save_policy, wrong_horizon
from tests.visual_point_mass import tiny_vla
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import wilson
from vla_rl.evaluation.results import EPISODES, JOURNAL, EpisodeResult, Journal, read_episodes, write_tables
from vla_rl.evaluation.run import evaluate
from vla_rl.evaluation.stats import Rate, episodes_needed, independent_discordance, mcnemar_exact, pairs_of
from vla_rl.recipes.suite import find_suite
from vla_rl.recipes.suite_run import SuiteRun, compare, read_results, results_of
from vla_rl.recipes.workers import Engine, on_engine, workers
from vla_rl.training.tracking import write_json

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_policy(tmp_path_factory.mktemp("policy") / "checkpoint")


@pytest.fixture(scope="module")
def whole(policy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation that nothing stopped, one environment at a time."""
    out = tmp_path_factory.mktemp("undisturbed")
    SuiteRun(quick(), policy, out, num_envs=1).run()
    return out


@pytest.fixture(scope="module")
def undisturbed(whole: Path) -> bytes:
    return (whole / EPISODES).read_bytes()


@pytest.fixture
def played(whole: Path, policy: str, tmp_path: Path) -> SuiteRun:
    """An evaluation that has only to write its results again."""
    return SuiteRun(quick(), policy, shutil.copytree(whole, tmp_path / "played"))


@pytest.mark.full
@pytest.mark.parametrize("num_envs", [8, 64])
def test_the_number_of_environments_changes_no_byte(policy, undisturbed, tmp_path, num_envs):
    SuiteRun(quick(), policy, tmp_path, num_envs).run()
    assert (tmp_path / EPISODES).read_bytes() == undisturbed


def test_the_table_is_in_the_order_of_the_suite(played, undisturbed):
    lines = (played.out / JOURNAL).read_text().splitlines(keepends=True)
    (played.out / JOURNAL).write_text("".join(reversed(lines)))
    played.run()
    assert (played.out / EPISODES).read_bytes() == undisturbed


@pytest.mark.full
def test_the_number_of_processes_changes_no_byte(policy, undisturbed, tmp_path):
    run = SuiteRun(quick(), policy, tmp_path, num_envs=3, processes=3)
    assert len(run.blocks([])) == 4  # two for each task
    run.run()
    assert (tmp_path / EPISODES).read_bytes() == undisturbed


class Away(Engine):
    """Processes of this machine, as those of another one are asked for."""

    away = True


@pytest.mark.full
def test_a_killed_process_of_an_engine_doubles_nothing(policy, undisturbed, tmp_path, monkeypatch):
    """On another machine even one process is a worker; the next one plays the block again from its beginning."""
    append, killed = Journal.append, []

    def killing(journal, episode):
        append(journal, episode)
        if len(journal.episodes) == 3 and not killed:
            killed.append(workers(1).all[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Journal, "append", killing)
    monkeypatch.setattr("vla_rl.recipes.suite.Block.play", None)
    with on_engine(Away()):
        SuiteRun(quick(), policy, tmp_path, num_envs=3).run()
    assert killed and (tmp_path / EPISODES).read_bytes() == undisturbed
    episodes = [(line["task"], line["seed"]) for line in map(json.loads, (tmp_path / JOURNAL).open())]
    assert len(episodes) == len(set(episodes)) == len(quick().keys)
    assert not list(tmp_path.glob(".seen-*"))


def test_the_table_has_one_line_per_seed_and_task_in_order(policy, undisturbed, tmp_path):
    (tmp_path / EPISODES).write_bytes(undisturbed)
    rows = list(csv.DictReader(undisturbed.decode().splitlines()))
    assert list(rows[0]) == ["task", "seed", "success", "cause", "length", "return", "video"]
    assert [(row["task"], int(row["seed"])) for row in rows] == quick().keys
    episodes = read_episodes(tmp_path)
    wins = {name: sum(one.success for one in episodes if one.task == name) for name in ("wide", "narrow")}
    assert 0 < wins["narrow"] < wins["wide"] < 12
    assert {one.cause for one in episodes} == {"success", "time_limit"} and {one.length for one in episodes} == {16}
    env = Goal(1, 1.2)
    seen = evaluate(env, tiny_vla(env.spec), quick().seeds, quick().noise_seed)
    assert [one.returns for one in episodes[:12]] == seen.returns.tolist()
    assert [one.success for one in episodes[:12]] == seen.success.tolist()
    assert [bool(one.video) for one in episodes] == [*[True] * 2, *[False] * 10] * 2


@pytest.mark.full
@pytest.mark.parametrize("num_envs", [1, 8, 64])
def test_stopped_at_any_episode_it_goes_on_to_the_same_bytes(policy, undisturbed, tmp_path, monkeypatch, num_envs):
    """Every start is killed while it writes its third episode, of which half a line stays behind."""
    append, starts = Journal.append, 0

    def killed(journal, episode):
        counts.append(episode.key)
        if len(counts) == 3:
            with (tmp_path / JOURNAL).open("ab") as file:
                file.write(b'{"task": "wi')
            raise Killed
        append(journal, episode)

    monkeypatch.setattr(Journal, "append", killed)
    played: list[tuple[str, int]] = []
    for _ in range(50):
        counts: list[tuple[str, int]] = []
        starts += 1
        try:
            SuiteRun(quick(), policy, tmp_path, num_envs).run()
        except Killed:
            played += counts[:2]
            continue
        played += counts
        break
    assert starts == 12 and sorted(played) == sorted(quick().keys)  # two of 24 each, and nothing twice
    assert (tmp_path / EPISODES).read_bytes() == undisturbed


@pytest.mark.parametrize("part", ["video", pytest.param("table", marks=pytest.mark.full)])
def test_killed_while_a_file_is_written_it_goes_on_the_same(policy, undisturbed, tmp_path, monkeypatch, part):
    real, writes = os.replace, 0

    def replace_file(source, target):
        nonlocal writes
        writes += 1
        if Path(target).suffix == {"video": ".mp4", "table": ".csv"}[part]:
            raise Killed
        real(source, target)

    with monkeypatch.context() as context, pytest.raises(Killed):
        context.setattr(os, "replace", replace_file)
        SuiteRun(quick(), policy, tmp_path, num_envs=4).run()
    assert writes and not (tmp_path / EPISODES).exists()
    SuiteRun(quick(), policy, tmp_path, num_envs=4).run()
    assert (tmp_path / EPISODES).read_bytes() == undisturbed
    videos = [row.video for row in read_episodes(tmp_path) if row.video]
    assert len(videos) == 4 and all((tmp_path / video).stat().st_size > 100 for video in videos)


def test_ctrl_c_says_how_to_go_on(policy, tmp_path, monkeypatch):
    append = Journal.append

    def stopped(journal, episode):
        append(journal, episode)
        if len(journal.episodes) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", stopped)
    with pytest.raises(KeyboardInterrupt, match="stopped after 5 of 24 episodes, which are kept; the same command"):
        SuiteRun(quick(), policy, tmp_path).run()


def test_the_results_have_protocol_intervals_causes_and_versions(played):
    found = played.run()
    assert found == json.loads((played.out / "results.json").read_text())
    assert found["protocol"] == quick().protocol and len(found["policy"]["sha256"]) == 64
    episodes = read_episodes(played.out)
    for name, task in found["tasks"].items():
        own = [one for one in episodes if one.task == name]
        wins = sum(one.success for one in own)
        assert (task["low"], task["high"]) == wilson(wins, 12) and task["success"] == wins / 12
        assert task["causes"] == {"success": wins, "time_limit": 12 - wins}
        assert task["returns"]["mean"] == pytest.approx(sum(one.returns for one in own) / 12)
    assert found["score"]["episodes"] == 24
    assert found["score"]["success"] == sum(one.success for one in episodes) / 24
    assert {"vla-rl", "torch", "numpy", "python"} <= set(found["versions"])
    assert 0 < found["latency_ms"]["mean"] <= found["latency_ms"]["max"]
    page = (played.out / "report.html").read_text()
    assert quick().protocol in page and page.count("<video") == 4 and "narrow" in page
    decisions = [int(row["decisions"]) for row in csv.DictReader((played.out / "latency.csv").open())]
    assert decisions == [8] * 24  # chunks of two in episodes of sixteen


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda run: replace(run, suite=replace(run.suite, episodes=11)), "suite.episodes: 12 or 11"),
        (lambda run: replace(run, policy=save_policy(run.out.parent / "other")), "policy.name"),
        (lambda run: other_weights(run), "policy.sha256"),
    ],
)
def test_results_of_another_evaluation_are_not_mixed_in(tmp_path, change, difference):
    run = SuiteRun(replace(quick(), tasks=quick().tasks[:1]), save_policy(tmp_path / "policy"), tmp_path / "out")
    run.run()
    with pytest.raises(UserError, match=f"holds the episodes of another evaluation .{difference}"):
        change(run).run()


def other_weights(run: SuiteRun) -> SuiteRun:
    """One bit of the policy's file is another one."""
    weights = Path(run.policy, "model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return run


def test_an_evaluation_without_episodes_frees_the_folder(policy, tmp_path):
    with pytest.raises(UserError, match="has the horizon 20"):
        SuiteRun(wrong_horizon(), policy, tmp_path).run()
    SuiteRun(replace(quick(), episodes=1), policy, tmp_path).run()
    assert len(read_episodes(tmp_path)) == 2


def test_instructions_that_a_policy_does_not_know_are_named(tmp_path):
    lift, out = str(save_untrained(tmp_path / "lift")), tmp_path / "out"
    with pytest.raises(UserError, match=r"not trained for the instructions of place, push, .*: --tasks lift"):
        SuiteRun(find_suite("tabletop"), lift, out).run()
    assert not out.exists()
    with pytest.raises(UserError, match="instructions of place, so it cannot play them; evaluate it on its own tasks"):
        SuiteRun(find_suite("tabletop").of(["place"], 1, "test"), lift, out).run()


@pytest.mark.parametrize("name", ["report.html", "journal.jsonl"])
def test_the_page_of_a_run_is_not_overwritten(policy, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=rf"holds {name} of something else, which would be overwritten"):
        SuiteRun(quick(), policy, tmp_path).run()
    assert (tmp_path / name).read_text() == "mine" and not (tmp_path / "suite.json").exists()


def test_a_damaged_journal_is_named(played):
    lines = (played.out / JOURNAL).read_text().splitlines(keepends=True)
    (played.out / JOURNAL).write_text("".join([*lines[:3], "nonsense\n", *lines[4:]]))
    with pytest.raises(UserError, match=r"line 4 of .*journal.jsonl' is damaged \('nonsense'\)"):
        played.run()


# -- two policies on the same seeds ------------------------------------------------------------------------------------

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
    assert pairs.p_value == mcnemar_exact(alone, other)
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


def test_the_command_compares_and_says_how_many_it_takes(capsys, tmp_path):
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
