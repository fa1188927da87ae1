"""``vla-rl train`` checks an environment of the user's own before it starts a run."""

from __future__ import annotations

import sys

import pytest

from vla_rl.cli import main

MODULE = """
from dataclasses import replace

import numpy as np

from sims.toy.point_mass import PointMassEnv


class Wide(PointMassEnv):
    def reset(self, env_ids, seeds):
        obs = super().reset(env_ids, seeds)
        return replace(obs, state=obs.state.astype(np.float64))


def make(num_envs):
    return Wide(num_envs)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "wide_task.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item])
    yield tmp_path
    sys.modules.pop("wide_task", None)


def test_a_foreign_environment_is_checked_before_the_run_folder_exists(folder, capsys):
    command = ["train", "demo.py:small", "--out", str(folder / "run"), "--env.name", "wide_task:make"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--env.training-options", "{}"])
    assert ended.value.code == 2 and not (folder / "run").exists()
    assert "state is float64[2, 2] but float32[2, 2] is declared" in capsys.readouterr().err
