"""Failures in mid-run: saved files stay whole, and one sentence names the cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.patience import PATIENCE
from vla_rl.cli import main
from vla_rl.cli.override import override
from vla_rl.contract.errors import ContractError, NonFiniteError
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.recipe import run
from vla_rl.training.loop import PolicyStore

# Imitates a full disk: a write fails with EFBIG instead of ENOSPC.
FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes}, {bytes}))
"""
NO_OPENGL = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("mujoco.egl", "mujoco.osmesa"):
            raise ImportError(f"library of {name} not found")
sys.meta_path.insert(0, Missing())
"""
BOGUS = "import os; os.environ['MUJOCO_GL'] = 'bogus'"


def vla_rl(before: str, *arguments) -> tuple[int, str]:
    """Status and stderr of ``vla-rl`` in a process that first runs ``before``."""
    code = f"{before}\nfrom vla_rl.cli import main; main({[str(item) for item in arguments]!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"}
    environment.pop("MUJOCO_GL", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stderr


# -- the disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_full_disk_keeps_the_checkpoint_that_was_there(untrained, quick, tmp_path):
    """The run dies while it writes over ``best``; a small limit lets configs and metrics pass, but no weights."""
    folder, out = untrained(), tmp_path / "run"
    best = out / "checkpoints" / "best"
    for name in ("best", "start"):
        TinyVLA.from_pretrained(folder).save_pretrained(best.with_name(name))
    files = {path.name: path.read_bytes() for path in best.iterdir()}
    status, said = vla_rl(FULL_DISK.format(bytes=50_000), "train", quick, "--policy", folder, "--out", out)
    assert status == 2 and "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith(f"vla-rl: the checkpoint {str(best)!r} could not be written")
    assert "the one before it is kept; free some disk space" in said
    assert {path.name: path.read_bytes() for path in best.iterdir()} == files
    assert sorted(path.name for path in best.parent.iterdir()) == ["best", "start"]


@pytest.mark.full
def test_a_full_disk_while_recording_or_logging_is_said(untrained, quick, tmp_path):
    limit = FULL_DISK.format(bytes=1000)
    status, said = vla_rl(limit, "collect", "--env", "lift", "--count", "1", "--out", tmp_path / "episodes")
    assert status == 2 and "could not be written to" in said and not list(tmp_path.glob("episodes*"))
    status, said = vla_rl(limit, "train", quick, "--policy", untrained(), "--out", tmp_path / "run")
    assert status == 2 and "config.json' could not be written (File too large)" in said and "Traceback" not in said


def test_an_earlier_run_is_moved_aside_and_nothing_is_lost(untrained, quick, tmp_path, capsys):
    out = tmp_path / "run"
    for _ in range(2):
        main(["train", quick, "--policy", str(untrained()), "--out", str(out), "--rl.loop.iterations", "0"])
    said = capsys.readouterr().err.replace("\n", "")
    assert f"an earlier run was in {out}; it is now {out}.1" in said
    runs = [out, out.with_name("run.1")]
    assert all(json.loads((folder / "summary.json").read_text())["rl"]["episodes"] == 4 for folder in runs)
    assert all(TinyVLA.from_pretrained(folder / "checkpoints" / "best") for folder in runs)


# -- numbers that are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("validate_every", "logged"), [(1, [0, 1]), (4, [0, 1, 2])])
def test_a_nan_ends_the_run_with_good_weights_on_disk(untrained, quick, tmp_path, monkeypatch, validate_every, logged):
    """The weights become NaN in the second iteration, which its validation, or else the next rollout, detects."""
    publish = PolicyStore.publish

    def poison(store, weights, progress=0.0):
        version = publish(store, weights, progress)
        if version == 2:
            with torch.no_grad():
                weights["connector.0.weight"][0, 0] = float("nan")
        return version

    monkeypatch.setattr(PolicyStore, "publish", poison)
    best = tmp_path / "run" / "checkpoints" / "best"
    recipe = override(load_config(quick), [f"--rl.loop.validate_every={validate_every}"], "test")
    sentence = r"the policy \(version 2\) chose a non-finite action in environment 0, so nothing was executed"
    with pytest.raises(NonFiniteError, match=sentence) as error:
        run(replace(recipe, policy=str(untrained())), str(tmp_path / "run"))
    assert str(error.value).endswith(f"The last good weights are in {str(best)!r}.")
    policy = TinyVLA.from_pretrained(best)
    assert all(parameter.isfinite().all() for parameter in policy.parameters())
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == logged


def test_a_nan_in_the_learner_names_the_tensor(untrained, quick, tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rl.algorithms.ppo.gae", lambda *given: (given[4] * float("nan"),) * 2)
    with pytest.raises(NonFiniteError, match=r"critic gradient of 'body\.0\.weight' .* iteration 0.*last good weights"):
        run(replace(load_config(quick), policy=str(untrained())), str(tmp_path / "run"))
    assert TinyVLA.from_pretrained(tmp_path / "run" / "checkpoints" / "best")


# -- the machine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (NO_OPENGL, ("no OpenGL works here (egl: library", "; osmesa: library", "apt-get install libegl1")),
        pytest.param(BOGUS, ("MUJOCO_GL: bogus", "egl or osmesa"), marks=pytest.mark.full),
    ],
    ids=["none", "bogus"],
)
def test_without_opengl_it_says_what_to_install(before, words, tmp_path):
    status, said = vla_rl(before, "collect", "--env", "lift", "--count", "1", "--out", tmp_path / "episodes")
    assert status == 2 and "Traceback" not in said
    assert all(word in said.strip().splitlines()[-1] for word in words)


# -- policies that do not fit ------------------------------------------------------------------------------------------


def test_a_chunk_of_another_shape_is_refused(untrained, quick, tmp_path, monkeypatch):
    act = TinyVLA.act

    def wide(self, *given):
        out, state = act(self, *given)
        return replace(out, action=out.action[..., :3]), state

    monkeypatch.setattr(TinyVLA, "act", wide)
    with pytest.raises(ContractError, match=r"shape \(4, 5, 3\), so nothing was executed; give \[4,H,4\]"):
        run(replace(load_config(quick), policy=str(untrained())), str(tmp_path / "run"))


def test_a_checkpoint_of_another_environment_is_refused(complaint, untrained, quick, tmp_path):
    folder = untrained(image_size=32)
    assert "trained for images" in complaint("train", quick, "--policy", folder, "--out", tmp_path / "run")
