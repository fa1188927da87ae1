"""The benchmark against ManiSkill alone, without ManiSkill: its rows, and what it says when it cannot run."""

from __future__ import annotations

import os
import sys

import pytest

from tests.benchmarks import maniskill
from tests.benchmarks.measure import NotRun


@pytest.fixture
def script(tmp_path, monkeypatch):
    """``script(text)`` is what runs where ManiSkill is."""
    monkeypatch.setattr(maniskill, "child_python", lambda: (sys.executable, dict(os.environ)))
    monkeypatch.setattr(maniskill, "_SCRIPT", tmp_path / "script.py")
    return (tmp_path / "script.py").write_text


def test_a_row_for_state_and_one_for_pixels_compare_control_steps_per_second(script):
    script(
        "import json, sys\nprint('noise')\nepisodes = int(sys.argv[2])\n"
        "print(json.dumps({'steps': 50, 'ours': 0.1 if sys.argv[1] == 'state' else 0.5, 'alone': 0.08 * episodes}))"
    )
    state, rgb = maniskill.maniskill_vs_alone(quick=True)
    assert (state.name, rgb.name) == ("maniskill_vs_alone, state", "maniskill_vs_alone, rgb")
    assert (state.ours, state.other, state.ratio) == pytest.approx((500, 625, 0.8)) and rgb.ours == pytest.approx(100)
    assert maniskill.maniskill_vs_alone()[0].ratio == pytest.approx(4.8)  # six episodes then


def test_a_side_that_fails_says_its_last_words(script):
    script("import sys\nsys.exit('no Vulkan')")
    with pytest.raises(NotRun, match=r"^not run: no Vulkan$"):
        maniskill.maniskill_vs_alone(quick=True)


def test_without_maniskill_it_says_how_it_is_had(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_RL_HOME", str(tmp_path))
    monkeypatch.setattr("sims.maniskill.make._is_here", lambda: False)
    with pytest.raises(NotRun, match=r"not run: maniskill is not installed.*vla-rl sims install maniskill"):
        maniskill.maniskill_vs_alone()
