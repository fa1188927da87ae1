"""``vla-rl train`` checks a policy of the user's own before it collects, trains or leaves a run folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import save_untrained
from vla_rl.contract.trust import mark_file
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import collect

OUTSIDE = Path(__file__).parent / "outside"
IMITATE = Path(__file__).parents[2] / "configs" / "imitate.py"
POLICIES = """
import torch
from straight import Straight


class Timeless(Straight):
    def encode(self, obs):
        return {"state": torch.as_tensor(obs.state)}


class Misshapen(Straight):
    def encode(self, obs):
        return {**super().encode(obs), "time": torch.as_tensor(obs.time)[:, None].expand(-1, 2)}


class Unsaved(Straight):
    save_pretrained = None


class Frozen(Straight):
    trainable = None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for path in OUTSIDE.glob("*.py"):
        shutil.copyfile(path, tmp_path / path.name)
    (tmp_path / "broken.py").write_text(POLICIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item])
    yield tmp_path
    for name in ("broken", "straight", "rail"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Timeless", "encode of policy 'Timeless' gives ['state'] but no 'time', which critics read"),
        ("Misshapen", "encode of policy 'Misshapen' gives 'time' of shape [2, 2], so critics cannot read it"),
        ("Unsaved", "policy 'Unsaved' has no 'save_pretrained', so it cannot be trained with"),
        ("Frozen", "policy 'Frozen' has no 'trainable', so it cannot be trained with"),
    ],
)
def test_a_policy_that_breaks_the_contract_leaves_no_run_folder(folder, complaint, kind, sentence):
    assert sentence in complaint("train", "mine.py:named", "--policy", f"broken:{kind}", "--out", folder / "run")
    assert not (folder / "run").exists()


def test_an_earlier_run_gets_its_name_back(folder, complaint):
    kept = folder / "run" / "checkpoints" / "best"
    kept.mkdir(parents=True)
    (folder / "run" / "config.json").write_text("{}")
    complaint("train", "mine.py:named", "--policy", "broken:Frozen", "--out", folder / "run")
    assert kept.exists() and not (folder / "run.1").exists()


class Leaping(TinyVLA):
    """Its actions leave the bounds."""

    def act(self, features, state, mode, generator):
        out, state = super().act(features, state, mode, generator)
        out.action.add_(10.0)
        return out, state


class Unnumbered(TinyVLA):
    """It does not count its weights."""

    def __init__(self, *given):
        super().__init__(*given)
        del self.version


def of_class(kind: type[TinyVLA], folder: Path) -> Path:
    """An untrained checkpoint that names ``kind`` as its class."""
    path = save_untrained(folder)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace("TinyVLA", f"{__name__}:{kind.__name__}"))
    mark_file(path / "config.json")
    return path


def test_imitation_checks_a_policy_of_ones_own(complaint, tmp_path):
    """In the environment where one is named, otherwise its methods alone."""
    save_demonstrations(collect(EnvConfig("lift"), 2, seed=1), tmp_path / "recorded", video="never")
    given = ("train", f"{IMITATE}:from_dataset", "--dataset", tmp_path / "recorded", "--out", tmp_path / "run")
    leaping = ("--policy", of_class(Leaping, tmp_path / "leaping"), "--env", "lift")
    assert "action holds" in complaint(*given, *leaping)
    unnumbered = ("--policy", of_class(Unnumbered, tmp_path / "unnumbered"))
    assert "policy 'Unnumbered' has no 'version'" in complaint(*given, *unnumbered)
    assert not (tmp_path / "run").exists()


def test_imagination_checks_a_policy_of_ones_own_before_it_collects(complaint, monkeypatch, tmp_path):
    monkeypatch.setattr("vla_rl.recipes.imagine.plan.collect_episodes", None)
    leaping = of_class(Leaping, tmp_path / "leaping")
    said = complaint("train", "imagine.py:lift", "--policy", leaping, "--out", tmp_path / "run")
    assert "action holds" in said and not (tmp_path / "run").exists()
