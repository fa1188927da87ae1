"""Simulators that pin other packages, as far as they are not needed; ``make test-sims`` runs the real ones.

A worker of theirs runs with what the simulator's pins bring, whatever else is installed here.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from sims import catalog, installations, libero, metaworld, robosuite
from sims.base import CameraRig, TaskPool
from sims.catalog import CATALOG, find
from sims.isolated import ExpertInWorker
from sims.metaworld import MT10, TASKS, MetaWorld
from tests.catalog_options import IN_AN_INSTALLATION
from vla_rl.contract.check import check_spec
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import extras_of

ROOT = Path(__file__).resolve().parents[2]
# Packages that are called otherwise than their distribution and are not installed here.
PACKAGES = {"hf-libero": "libero", "genesis-world": "genesis"}
TABLETOP = ("sims.mujoco.tabletop", "sims.mujoco.render", "sims.mujoco.scene")
LIFT = ("genesis", "maniskill_lift")  # the rules of our tabletop in another simulator


def robots(task, *names):
    return lambda: robosuite._check_task(task, list(names))


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: metaworld.spec(tasks="raech"), r"no task 'raech'.*did you mean 'reach'\?"),
        (lambda: metaworld.spec(tasks=["reach", "reach-v3"]), "names no task or one twice"),
        (lambda: metaworld.spec(cameras=["corner9"]), r"no camera 'corner9'.*did you mean 'corner'\?"),
        (lambda: metaworld.spec(image_size=0), "image_size=0 is less than 1"),
        (lambda: metaworld.spec(time_limit=101, action_repeat=5), "not within Meta-World's 1 to 500"),
        (robots("Lfit", "Panda"), r"no task 'Lfit'.*did you mean 'Lift'\?"),
        (robots("Lift", "Pamda"), r"'Pamda' is no robot .*did you mean 'Panda'\?"),
        (robots("TwoArmLift", "Panda"), r"by 2 robot\(s\) of one arm, not by \['Panda'\], .*robots=\[\"Panda\", "),
        (lambda: libero.make_in_process(1), r"no assets in .*/libero/libero/assets, so .*; copy the folder "),
        (lambda: libero.make_in_process(1, suite="libero_gaol"), r"no suite 'libero_gaol'.*did you mean 'libero_goal'"),
    ],
)
def test_what_cannot_be_played_is_refused(ask, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("sims.libero._package", lambda: tmp_path / "libero")
    with pytest.raises(UserError, match=sentence):
        ask()
    robots("TwoArmLift", "Panda", "Sawyer")()
    assert len(set(robosuite.INSTRUCTIONS.values())) == len(robosuite.INSTRUCTIONS) == 17


# -- Meta-World --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tasks", "names"), [("MT10", MT10), ("MT50", TASKS), ("reach-v3", ("reach",))])
def test_instructions_come_from_the_names_of_the_tasks(tasks, names):
    found = metaworld.spec(tasks=tasks)
    check_spec(found)
    assert found.families == names and found.tasks == tuple(name.replace("-", " ") for name in names)
    assert EnvSpec.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert len(set(MT10)) == 10 and len(set(TASKS)) == 50 and set(MT10) < set(TASKS)


def test_the_expert_hands_on_the_action_of_the_observation():
    action = np.arange(8, dtype=np.float32).reshape(2, 4)
    zeros = np.zeros(2, np.int64)
    obs = Observation({}, np.zeros((2, 4), np.float32), zeros, zeros, {"privileged/expert_action": action})
    assert ExpertInWorker().act(obs).tolist() == action[:, None].tolist()
    with pytest.raises(UserError, match="cannot plan 5"):
        ExpertInWorker(horizon=5)


class Door:
    """A Meta-World environment whose task is fulfilled after its fifth step, and then no more."""

    def __init__(self):
        self.steps = 0

    def seed(self, seed):
        self.steps = 0

    def reset(self):
        return np.zeros(39), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(39), 4.5, False, False, {"success": float(self.steps == 5)}


def played(action_repeat, shaped, actions):
    """Rewards and successes of so many actions."""
    rig, pool = CameraRig((), 64, 1), TaskPool(lambda task: Door(), 1)
    door = MetaWorld(["door-open"], rig, {}, pool, shaped, action_repeat)
    door.reset(0)
    return [door.act(np.zeros(4, np.float32)) for _ in range(actions)]


def test_rewards_are_metaworlds_or_success():
    assert played(1, True, 5) == [(4.5, False)] * 4 + [(4.5, True)]
    assert played(1, False, 5) == [(0.0, False)] * 4 + [(1.0, True)]
    assert catalog.spec_of("metaworld", shaped=False) == metaworld.spec()


def test_a_repeated_action_adds_up_rewards_and_ends_with_success():
    assert played(3, True, 2) == [(13.5, False), (9.0, True)]
    slower = metaworld.spec(action_repeat=4, time_limit=100)
    assert slower.control_dt == 4 * metaworld.spec().control_dt and "0.04 m" in slower.action.unit


# -- LIBERO's files of initial states ----------------------------------------------------------------------------------


def save(path, value):
    """As LIBERO saved its states."""
    torch.save(value, path)
    return path


def test_states_are_those_that_were_saved(tmp_path):
    states = np.random.default_rng(0).normal(size=(50, 47))
    assert np.array_equal(libero.read_states(save(tmp_path / "a.pruned_init", states)), states)


def test_a_file_that_holds_something_else_is_refused_and_not_run(tmp_path):
    for number, value in enumerate([{"a": 1}, np.zeros((2, 3), np.float32), np.zeros(4)]):
        with pytest.raises(UserError, match="holds no table of float64 numbers"):
            libero.read_states(save(tmp_path / f"{number}.pruned_init", value))
    trap = b"\x80\x02cos\nmkdir\nX\x04\x00\x00\x00trap\x85R."
    with zipfile.ZipFile(tmp_path / "trap.pruned_init", "w") as archive:
        archive.writestr("archive/data.pkl", trap)
    with pytest.raises(UserError, match="holds no table"):
        libero.read_states(tmp_path / "trap.pruned_init")


def test_initial_states_of_another_scene_are_refused():
    libero.check_fits("a_task", np.zeros((50, 47)), 47)
    with pytest.raises(UserError, match=r"a_task has 47 numbers and its scene has 61, .*; copy the folder"):
        libero.check_fits("a_task", np.zeros((50, 47)), 61)


def test_instructions_leave_out_the_scene():
    assert libero._instruction("pick_up_the_milk") == "pick up the milk"
    assert libero._instruction("KITCHEN_SCENE10_close_the_drawer") == "close the drawer"
    assert libero._instruction("LIVING_ROOM_SCENE2_put_it_down") == "put it down"


def test_orientations_are_rotation_vectors():
    half = np.sqrt(0.5)
    assert libero._rotation_vector(np.array([0, 0, half, half])) == pytest.approx([0, 0, np.pi / 2])
    assert libero._rotation_vector(np.array([0, 0, 0, 1.0])).tolist() == [0, 0, 0]


# -- what a worker imports ---------------------------------------------------------------------------------------------


@cache
def pinned(name: str) -> frozenset[str]:
    """The packages that the pins of the installation ``name`` bring."""
    lines = (installations.SIMS.pins / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    names = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines if not line.startswith("#")}
    here = {package for package, owners in distributions().items() if names & set(owners)}
    return frozenset(here | {PACKAGES.get(one, one.replace("-", "_")) for one in names})


@cache
def distributions() -> dict[str, list[str]]:
    """{package: the distributions here that bring it}, without our own."""
    found = metadata.packages_distributions()
    ours = {"vla_rl", "sims", "world_models", "robot_drivers"}
    return {
        package: [re.sub(r"[-_.]+", "-", owner).lower() for owner in owners]
        for package, owners in found.items()
        if package not in ours
    }


@cache
def imported(module: str) -> frozenset[str]:
    """What ``module`` of ours imports, anywhere in it: modules of ours, and packages of others."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    return frozenset(name for node in ast.walk(tree) for name in _names(node) if name != "__future__")


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (item.name for item in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None and not node.level, "imports are absolute here"
        inner = [f"{node.module}.{item.name}" for item in node.names]
        yield from (name for name in [node.module, *inner] if name == node.module or ours(name))


def ours(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return name.partition(".")[0] in ("vla_rl", "sims") and (path.is_dir() or path.with_suffix(".py").is_file())


def needed(name: str) -> tuple[set[str], set[str]]:
    """The modules of ours and the packages of others that a worker of the catalogue's entry ``name`` imports."""
    expert = extras_of(find(name)).expert
    modules = ["sims.isolation.worker", CATALOG[name].partition(":")[0]]
    modules += [expert.partition(":")[0]] if isinstance(expert, str) else []
    found: set[str] = set()
    others: set[str] = set()
    while modules:
        module = modules.pop()
        if module in found:
            continue
        found.add(module)
        modules += [one for one in imported(module) if ours(one)]
        others |= {top for one in imported(module) if not ours(one) and (top := one.partition(".")[0]) != "sims"}
    return found, others - sys.stdlib_module_names


@pytest.mark.parametrize("name", sorted({*IN_AN_INSTALLATION, "maniskill_lift"}))
def test_a_worker_imports_what_its_simulators_pins_bring(name):
    allowed = pinned("maniskill" if name == "maniskill_lift" else name)
    own, packages = needed(name)
    assert packages <= allowed, f"{sorted(packages - allowed)} are in no pin of {name}"
    assert name in LIFT or not own & set(TABLETOP), f"{name} imports our tabletop"
