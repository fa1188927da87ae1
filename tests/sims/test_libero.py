"""LIBERO's files of initial states, read without running what is in them; ``make test-sims`` runs the real LIBERO."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch

from sims.libero import _instruction, _rotation_vector, check_fits, make_in_process, read_states
from vla_rl.contract.errors import UserError


def save(path, value):
    """As LIBERO saved its states."""
    torch.save(value, path)
    return path


def test_states_are_those_that_were_saved(tmp_path):
    states = np.random.default_rng(0).normal(size=(50, 47))
    assert np.array_equal(read_states(save(tmp_path / "a.pruned_init", states)), states)


def test_a_file_that_holds_something_else_is_refused_and_not_run(tmp_path):
    for number, value in enumerate([{"a": 1}, np.zeros((2, 3), np.float32), np.zeros(4)]):
        with pytest.raises(UserError, match="holds no table of float64 numbers"):
            read_states(save(tmp_path / f"{number}.pruned_init", value))
    trap = b"\x80\x02cos\nmkdir\nX\x04\x00\x00\x00trap\x85R."
    with zipfile.ZipFile(tmp_path / "trap.pruned_init", "w") as archive:
        archive.writestr("archive/data.pkl", trap)
    with pytest.raises(UserError, match="holds no table"):
        read_states(tmp_path / "trap.pruned_init")


def test_initial_states_of_another_scene_are_refused():
    check_fits("a_task", np.zeros((50, 47)), 47)
    with pytest.raises(UserError, match=r"a_task has 47 numbers and its scene has 61, .*; copy the folder"):
        check_fits("a_task", np.zeros((50, 47)), 61)


def test_without_its_assets_it_says_which_files_go_where(tmp_path, monkeypatch):
    monkeypatch.setattr("sims.libero._package", lambda: tmp_path / "libero")
    with pytest.raises(
        UserError, match=r"no assets in .*/libero/libero/assets, so .*; copy the folder .* of the LIBERO"
    ):
        make_in_process(1)
    with pytest.raises(UserError, match=r"no suite 'libero_gaol'.*did you mean 'libero_goal'\?"):
        make_in_process(1, suite="libero_gaol")


def test_instructions_leave_out_the_scene():
    assert _instruction("pick_up_the_milk") == "pick up the milk"
    assert _instruction("KITCHEN_SCENE10_close_the_drawer") == "close the drawer"
    assert _instruction("LIVING_ROOM_SCENE2_put_it_down") == "put it down"


def test_orientations_are_rotation_vectors():
    half = np.sqrt(0.5)
    assert _rotation_vector(np.array([0, 0, half, half])) == pytest.approx([0, 0, np.pi / 2])
    assert _rotation_vector(np.array([0, 0, 0, 1.0])).tolist() == [0, 0, 0]
