"""``vla-rl compare``: the same start for all, a row per validation, a page, and nothing is run twice."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from vla_rl.cli import main
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.compare import Cell, Compared, steps_to, write_page

CONFIG = str(Path(__file__).parent / "quick.py")


def test_every_method_starts_from_the_imitation_policy_and_demonstrations_of_its_seed(tmp_path, monkeypatch):
    asked: dict[str, list[Cell]] = {}

    def noted(out, steps, processes) -> None:
        asked.update({what: list(cells) for what, cells in steps.items()})
        raise KeyboardInterrupt

    monkeypatch.setattr("vla_rl.recipes.compare.run_sweep", noted)
    command = ["compare", "--config", CONFIG, "--seeds", "2", "3", "--lift", "improve", "mixed", "--place"]
    with pytest.raises(SystemExit):
        main([*command, "--out", str(tmp_path)])
    lift = tmp_path / "lift"
    assert list(asked) == ["imitate", "improve"]
    assert [cell.out for cell in asked["imitate"]] == [lift / "imitate-2", lift / "imitate-3"]
    for cell in asked["improve"]:
        name, _, seed = cell.out.name.partition("-")
        start = lift / f"imitate-{seed}"
        given = (
            "--policy",
            str(start / "checkpoints" / "imitation"),
            "--demonstrations",
            str(start / "demonstrations"),
        )
        assert cell.config == f"{CONFIG}:{name}" and cell.arguments == ("--seed", seed, *given)
    assert {cell.out.name for cell in asked["improve"]} == {"improve-2", "improve-3", "mixed-2", "mixed-3"}


@pytest.mark.full
def test_everything_starts_from_the_same_policy_and_is_tabled(tmp_path, capsys, complaint):
    out = tmp_path / "compared"
    command = ["compare", "--config", CONFIG, "--seeds", "2", "--lift", "improve", "mixed"]
    command += ["--place", "--out", str(out)]
    main(command)
    results = json.loads((out / "results.json").read_text())
    names = {"algorithm", "task", "seed", "env_steps", "seconds", "success", "low", "high", "episodes"}
    assert all(row.keys() == names for row in results)
    assert {(row["algorithm"], row["seed"]) for row in results} == {("improve", 2), ("mixed", 2)}
    for algorithm in ("improve", "mixed"):
        mine = [row for row in results if row["algorithm"] == algorithm]
        assert len(mine) == 5 and all(
            row["episodes"] == 4 and row["low"] <= row["success"] <= row["high"] for row in mine
        )
        steps = [row["env_steps"] for row in mine]
        assert steps[0] == 0 and steps == sorted(steps) and len(set(steps)) == 5
        config = json.loads((out / "lift" / f"{algorithm}-2" / "config.json").read_text())
        assert config["policy"] == str(out / "lift" / "imitate-2" / "checkpoints" / "imitation")
        assert config["demonstrations"] == str(out / "lift" / "imitate-2" / "demonstrations")
    page = (out / "report.html").read_text()
    assert all(text in page for text in ("imitation", "mixed", "control steps to 85%", "seed 2", "validation success"))
    assert json.loads((out / "lift" / "imitate-2" / "test.json").read_text())["episodes"] == 4
    assert "<strong>mixed</strong>" in page and "half of every batch from demonstrations." in page
    before = (out / "lift" / "mixed-2" / "summary.json").stat().st_mtime_ns
    main(command)
    assert (out / "lift" / "mixed-2" / "summary.json").stat().st_mtime_ns == before
    assert "no config function 'imitate_place'" in complaint(*command, "--place", "improve")


@pytest.mark.full
def test_samplers_are_compared_by_the_same_runner(tmp_path):
    out = tmp_path / "study"
    config = tmp_path / "samplers.py"
    config.write_text(Path(CONFIG).read_text() + "\n\ndef imitate() -> Imitate:\n    return imitate_lift()\n")
    main(["compare", "samplers", "--config", str(config), "--seeds", "2", "--samplers", "improve", "--out", str(out)])
    assert {row["algorithm"] for row in json.loads((out / "results.json").read_text())} == {"improve"}
    assert (out / "imitate-2" / "checkpoints" / "imitation").is_dir() and (out / "improve-2" / "summary.json").is_file()
    assert "vla-rl compare samplers" in (out / "report.html").read_text()


def test_the_frozen_base_is_the_same_file_afterwards(tmp_path, untrained, quick):
    policy = untrained()
    main(["train", quick.replace("improve", "residual"), "--policy", str(policy), "--out", str(tmp_path / "run")])
    kept = tmp_path / "run" / "checkpoints" / "best"
    digests = {
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() for folder in (policy, kept / "base")
    }
    assert len(digests) == 1
    assert type(load_policy(kept)).__name__ == "DeterministicResidual"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["critic/steps"] > 10, "it learnt"


def test_demonstrations_that_are_needed_and_missing_are_asked_for(untrained, quick, tmp_path, complaint):
    arguments = ("--policy", untrained(), "--out", tmp_path / "run")
    assert "add --demonstrations" in complaint("train", quick.replace("improve", "mixed"), *arguments)


@pytest.mark.parametrize(
    ("successes", "expected"), [((0.8, 0.9, 0.8, 0.9), None), ((0.8, 0.85, 0.9), 1), ((0.9, 0.9), 0), ((0.9,), None)]
)
def test_the_target_is_reached_at_the_first_of_two_validations_in_a_row(successes, expected):
    assert steps_to([{"env_steps": i, "success": value} for i, value in enumerate(successes)], 0.85) == expected


def test_what_is_worse_than_imitation_is_shown_as_such_with_the_reason(tmp_path):
    def rate(success: float) -> dict[str, float | int]:
        return {"success": success, "low": success - 0.1, "high": success + 0.1, "episodes": 100}

    def algorithm(name: str, about: str, one: float, two: float) -> Compared:
        curve = [{"env_steps": 0, **rate(0.5)}, {"env_steps": 9, **rate(one)}]
        after = {seed: {"rl": rate(value), "seconds": {"rl": 3.0}} for seed, value in ((1, one), (2, two))}
        return Compared(name, "lift", about, {1: curve, 2: curve}, after)

    good = algorithm("good", "It learns.\n\nBy trying.", 0.7, 0.45)
    bad = algorithm("bad", "It guesses.\n\nIt never looks.", 0.6, 0.2)
    page = tmp_path / "report.html"
    write_page(page, [bad, good], {"lift": {1: rate(0.5), 2: rate(0.4)}}, target=0.85)
    text = page.read_text()
    assert "<strong>Worse than imitation: bad on seed 2 (-20.0 points).</strong> It never looks." in text
    assert "Worse than imitation: good" not in text and "+20.0, +5.0" in text and "+10.0, -20.0" in text
    table = text[text.index("<tbody>") :]
    assert table.index("imitation") < table.index(">good<") < table.index(">bad<"), "the best first"
