"""Environments by name: every entry resolves, specs come without building, and a user's own module is found."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sims import catalog, installations
from sims.catalog import CATALOG, make, spec_of
from sims.mujoco import env as mujoco_env
from sims.mujoco.tasks import scenes, so101
from sims.mujoco.tasks.lift import LiftExpert
from sims.mujoco.tasks.mixed import MixedExpert
from sims.mujoco.tasks.place import PlaceExpert
from sims.mujoco.tasks.push import PushExpert
from sims.toy.counting import CountingEnv
from tests.catalog_options import (
    IN_AN_INSTALLATION,
    WITH_TESTS_OF_THEIR_OWN,
    entries_that_run_here,
    needed_options,
)
from tests.simulators.parts import SMALL, SUITES
from vla_rl.contract.errors import UserError


def test_every_entry_is_checked_by_name():
    """Those that run here by ``sims/test_conformance.py`` or a file of their own, the others by ``make test-sims``."""
    assert {*entries_that_run_here(), *IN_AN_INSTALLATION, *WITH_TESTS_OF_THEIR_OWN} == set(CATALOG)
    for file in WITH_TESTS_OF_THEIR_OWN.values():
        assert "test_conformance" in Path(file).read_text(encoding="utf-8")
    assert set(IN_AN_INSTALLATION) == set(installations.SHIPPED) == set(SMALL) == set(SUITES)


def test_the_catalogue_imports_no_simulator():
    code = "import sims.catalog, sys; assert not {'mujoco', 'numpy', 'sims.mujoco'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- the spec without the environment ----------------------------------------------------------------------------------

OPTIONS = {
    "lift": {"image_size": 16, "cameras": ("top",), "colours": 5, "threads": 1},
    "place": {"render": False, "cubes": 3},
    "gym": {"id": "Pendulum-v1", "time_limit": 7},
}


@pytest.mark.parametrize("name", entries_that_run_here())
def test_the_spec_of_a_name_is_that_of_its_environment(name):
    for options in (needed_options(name), OPTIONS.get(name, needed_options(name))):
        with closing(make(name, num_envs=2, **options)) as env:
            assert spec_of(name, **options) == env.spec


@pytest.mark.parametrize("name", ["lift", "place", "push", "mixed", "so101", "counting", "point_mass"])
def test_the_spec_is_read_without_building_the_environment(name, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("built")

    monkeypatch.setattr(mujoco_env.MujocoEnv, "__init__", refuse)
    monkeypatch.setattr("sims.base.NumpyEnv.__init__", refuse)
    assert spec_of(name).name == name


# -- what belongs to a task --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expert", "draw"),
    [
        ("lift", LiftExpert, scenes.lift),
        ("place", PlaceExpert, scenes.place),
        ("push", PushExpert, scenes.push),
        ("mixed", MixedExpert, scenes.mixed),
        ("so101", so101.So101Expert, so101.scenes),
    ],
)
def test_every_task_declares_its_own_expert_and_scenes(name, expert, draw):
    assert type(catalog.expert(name, 1)) is expert and catalog.scenes(name) is draw


@pytest.mark.parametrize("name", ["lift", "place"])
def test_swapped_options_keep_the_scene_and_change_the_instruction(name):
    plain, swapped = (
        make(name, num_envs=4, render=False, **options) for options in ({}, catalog.swapped_options(name))
    )
    before, after = (env.reset(np.arange(4), np.arange(4)) for env in (plain, swapped))
    assert np.array_equal(before.state, after.state) and (before.task != after.task).all()


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (
            lambda: catalog.expert("counting", 1),
            r"'counting' declares no scripted expert.*@declare_task\(expert=\.\.\.\)",
        ),
        (lambda: catalog.scenes("gym"), r"'gym' declares no labelled scenes"),
        (lambda: catalog.swapped_options("push"), r"'push' declares no swapped instruction"),
        (
            lambda: catalog.progress("place"),
            r"'place' declares no progress",
        ),
        (
            lambda: catalog.claims("push"),
            r"'push' declares no claims about its pictures",
        ),
    ],
)
def test_what_a_task_does_not_declare_is_refused_in_one_sentence(ask, sentence):
    with pytest.raises(UserError, match=sentence):
        ask()


# -- an environment of the user's own ----------------------------------------------------------------------------------

MODULE = """
from sims.toy.counting import CountingEnv
from vla_rl.contract.task import declare_task


class Expert:
    def __init__(self, horizon):
        self.horizon = horizon


@declare_task(expert=Expert, swapped_options={"longest": 3})
def make(num_envs, longest=8):
    return CountingEnv(num_envs)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the user's module in it, as the console script finds it."""
    (tmp_path / "own_task.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [item for item in sys.path if item])
    yield tmp_path
    sys.modules.pop("own_task", None)


def test_an_environment_of_the_working_folder_is_made_by_its_string(folder):
    env = make("own_task:make", num_envs=3, longest=5)
    assert isinstance(env, CountingEnv) and env.num_envs == 3
    assert spec_of("own_task:make").name == "counting"
    assert catalog.expert("own_task:make", 4).horizon == 4
    assert catalog.swapped_options("own_task:make") == {"longest": 3}


def test_the_working_folder_hides_no_installed_package(folder):
    make("own_task:make", num_envs=1)
    assert sys.path[-1] == str(folder)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("own_task:mkae", {}, r"'own_task' has no 'mkae'.*did you mean 'make'"),
        ("own_task:make", {"longets": 2}, r"'own_task:make' has no option 'longets'.*did you mean 'longest'"),
        ("own_task", {}, r"no environment is called 'own_task'.*'package\.module:make'"),
    ],
)
def test_a_wrong_name_or_option_of_ones_own_gets_help(folder, name, options, sentence):
    with pytest.raises(UserError, match=sentence):
        make(name, num_envs=1, **options)


# -- simulators with an installation of their own ----------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_AN_INSTALLATION)
def test_one_that_is_not_installed_says_how_to_install_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_RL_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, name, None)  # some can also be installed beside vla-rl
    with pytest.raises(UserError, match=f"{name} is not installed.*'vla-rl sims install {name}'"):
        make(name, num_envs=1)
    with pytest.raises(UserError, match=r"has no option 'image_sise'.*did you mean 'image_size'\?"):
        make(name, num_envs=1, image_sise=32)


def test_a_simulator_says_its_spec_and_its_expert_without_being_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_RL_HOME", str(tmp_path))
    assert spec_of("metaworld", tasks="reach", workers=2).tasks == ("reach",)
    assert callable(catalog.expert("metaworld", 1).act)
