"""``vla-rl train recap.py:offline``: of a dataset with failures, by the command; resumed; and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.commands import save_untrained
from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations, save_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.advantage_conditioned import AdvantageConditioned
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.tiny import TinyVLA
from vla_rl.training.tracking import RunFolder

FEW = {
    "method.algorithm.value-steps": 3,
    "method.algorithm.steps": 3,
    "method.algorithm.batch": 4,
    "method.algorithm.draws": 1,
    "validate-every": 0,
    "evaluation.validation": 2,
    "evaluation.test": 2,
    "evaluation.num-envs": 2,
}
LIFT = {"env": "lift", "env.options": '{"deadline": 5}'}


def recorded_failures(folder: Path, failed: Sequence[int] = (1, 3), count: int = 4) -> Path:
    """Demonstrations of lift, cut short where they are to count as failures."""
    main(["collect", "--env", "lift", "--count", str(count), "--out", str(folder / "shown")])
    episodes = load_demonstrations(folder / "shown")
    success = np.asarray(episodes.extras["next.success"]).reshape(-1) & ~np.isin(episodes.episode, failed)
    extras = {**episodes.extras, "next.success": success}
    save_demonstrations(replace(episodes, extras=extras), folder / "data", video="never")
    return folder / "data"


def command(*words: object, **given: object) -> list[str]:
    return ["train", *map(str, words), *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


@pytest.fixture
def blocks_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.recipes.offline._BLOCK", 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_failures(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("policy") / "untrained")


@pytest.mark.usefixtures("blocks_of_one")
def test_a_dataset_with_failures_teaches_and_a_killed_run_goes_on(data, policy, tmp_path, capsys, monkeypatch):
    """It ends with the same weights, bit for bit, and ``eval`` plays its best ones."""
    whole, killed, save = tmp_path / "whole", tmp_path / "killed", RunFolder.save_state

    def save_and_copy(self: RunFolder, step: int, content: dict[str, Any]) -> None:
        save(self, step, content)
        if step == 1 and self.path == whole:
            shutil.copytree(whole, killed)

    monkeypatch.setattr(RunFolder, "save_state", save_and_copy)
    given = {**LIFT, **FEW, "dataset": data, "policy": policy}
    main(command("recap.py:offline", **given, out=whole))
    said = capsys.readouterr().err
    assert "4 episodes of" in said and "2 failures" in said and "only 2 episodes succeeded" in said
    assert "in episodes that it has not seen, the value explains" in said
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["rl"]["episodes"] == 2 and np.isfinite(summary["measure"]["by_value"])
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval/score" in row] == [0, 3]
    assert 0 < rows[-1]["policy/positive"] < 1 and rows[-1]["policy/loss"] > 0
    main(["train", "--resume", str(killed)])
    assert json.loads((killed / "summary.json").read_text())["measure"] == summary["measure"]
    one, other = (load_policy(run / "checkpoints" / "best") for run in (whole, killed))
    assert isinstance(one, AdvantageConditioned) and one.config.guidance == 1.0
    assert all(torch.equal(item, other.state_dict()[name]) for name, item in one.state_dict().items())
    main(["eval", str(whole), "--episodes", "2", "--num-envs", "2"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 2


@pytest.mark.usefixtures("blocks_of_one")
def test_without_an_environment_good_decisions_are_imitated_more_often(data, policy, tmp_path, capsys):
    main(command("recap.py:weighted", **FEW, dataset=data, policy=policy, out=tmp_path / "run"))
    assert "nothing was played: the last weights were kept" in capsys.readouterr().err
    learnt, before = load_policy(tmp_path / "run" / "checkpoints" / "best"), TinyVLA.from_pretrained(policy)
    assert isinstance(learnt, TinyVLA) and not torch.equal(learnt.connector[0].weight, before.connector[0].weight)
    assert torch.equal(next(learnt.backbone.parameters()), next(before.backbone.parameters()))


def test_successes_alone_are_imitated(data, policy, tmp_path, capsys):
    few = {"imitation.fit.steps": 2, "imitation.fit.batch": 4}
    given = {**few, "dataset": data, "policy": policy, "out": tmp_path / "run"}
    main(command("imitate.py:from_dataset", "--only-successes", **given))
    assert "2 episodes, " in capsys.readouterr().err


def test_what_cannot_teach_is_refused_in_a_sentence(policy, data, tmp_path, complaint):
    def said(dataset: Path, *more: str) -> str:
        return complaint(*command("recap.py:offline", *more, dataset=dataset, out=tmp_path / "run"))

    assert "imitate the dataset first" in said(data)
    episodes, given = load_demonstrations(data), ("--policy", str(policy))
    nothing = np.zeros(len(episodes.state), bool)
    lost = replace(episodes, extras={**episodes.extras, "next.success": nothing})
    save_demonstrations(lost, tmp_path / "lost", video="never")
    assert "none of the 4 episodes succeeded" in said(tmp_path / "lost", *given)
    save_demonstrations(replace(episodes, extras={}), tmp_path / "unknown", video="never")
    assert 'add the column "next.success"' in said(tmp_path / "unknown", *given)


def labelled(**columns: np.ndarray) -> Demonstrations:
    """Three episodes of two steps."""
    from tests.experience.makers import recorded

    return replace(Demonstrations.joined([recorded(np.zeros((2, 1), np.float32))] * 3), extras=columns)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"next.success": [0, 1, 0, 0, 0, 1], "next.reward": [1, 1, 1, 1, 1, 1]}, [True, False, True]),
        ({"success": [1, 1, 0, 0, 1, 1]}, [True, False, True]),
        ({"next.reward": [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]}, [False, True, True]),
        ({"next.reward": [0.0, 0.3, 2.0, 0.0, 0.0, 1.0], "next.done": [0, 1, 0, 0, 0, 1]}, [True, False, True]),
        ({"next.done": [0, 1, 0, 1, 0, 1]}, None),
        ({"next.reward": [0.0, 0.3, 2.0, 0.0, 0.0, 1.0]}, None),
        ({}, None),
    ],
)
def test_what_became_of_episodes_is_read_from_what_was_recorded(columns, expected):
    episodes = labelled(**{name: np.array(values) for name, values in columns.items()})
    if expected is None:
        with pytest.raises(UserError, match="which of these 3 episodes succeeded"):
            episodes.successes()
        return
    assert episodes.successes().tolist() == expected
    kept = episodes.of(episodes.successes())
    assert kept.count == sum(expected) and kept.episode.tolist() == [0, 0, 1, 1][: 2 * kept.count]
    assert all(len(values) == len(kept.state) for values in kept.extras.values())
