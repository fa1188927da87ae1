"""Clips of the demo's report, of an environment in this process and in another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.commands import save_untrained
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.demo import record_clips
from vla_rl.recipes.env_config import EnvConfig

LIFT = EnvConfig("lift", {"deadline": 6})


@pytest.mark.parametrize(
    ("env", "size"), [(LIFT, 192), (EnvConfig("isolated", {"env": "lift", "options": LIFT.options}), 64)]
)
def test_a_clip_has_a_picture_of_every_control_step(env, size, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    policy = TinyVLA.from_pretrained(save_untrained(tmp_path / "untrained"))
    clips = record_clips(env, policy, np.array([3, 4]), seed=1)
    assert [clip.frames.shape for clip in clips] == [(7, size, size, 3)] * 2
    assert all(clip.label.endswith(": too late") for clip in clips)
    assert not np.array_equal(clips[0].frames[0], clips[1].frames[0])
    assert not np.array_equal(clips[0].frames[0], clips[0].frames[-1])
