"""The rules of the tabletop's tasks on numpy arrays and on torch tensors: the same numbers, types and shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sims.mujoco.scene import CUBES_QPOS, FINGER_QPOS
from sims.mujoco.task import Constant, cases_of, count, first_case, pick
from sims.mujoco.tasks.lift import LiftTask
from sims.mujoco.tasks.mixed import MixedTask
from sims.mujoco.tasks.place import PlaceTask
from sims.mujoco.tasks.push import PushTask

TASKS = {
    "lift": lambda: LiftTask(deadline=11),
    "distractor": lambda: LiftTask(cubes=4, colours=6, instruct="distractor"),
    "place": lambda: PlaceTask(cubes=3, deadline=9),
    "push": lambda: PushTask(deadline=9),
    "mixed": lambda: MixedTask({"lift": 10}),
}
ENVS, STEPS = 48, 12


def tensors(arrays):
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def situations(task):
    """The states [ENVS,nq] that the rules see, step by step, with cubes that are up or at a mark."""
    rng = np.random.default_rng(0)
    episodes = [task.sample_episode(np.random.Generator(np.random.PCG64(seed))) for seed in range(ENVS)]
    task_state = {name: np.stack([np.asarray(item.task_state[name]) for item in episodes]) for name in task.task_state}
    states = []
    for step in range(STEPS):
        qpos = np.stack([item.qpos for item in episodes])
        qpos[:, CUBES_QPOS:] += rng.normal(0, 1e-3, qpos[:, CUBES_QPOS:].shape)
        qpos[:, FINGER_QPOS] = rng.uniform(0.024, 0.03, (ENVS, 1))
        if step > 2:
            qpos[::3, CUBES_QPOS + 2] = 0.07
            if "mark_xy" in task_state:
                qpos[1::3, CUBES_QPOS : CUBES_QPOS + 2] = task_state["mark_xy"][1::3, 0]
        states.append(qpos)
    return states, np.stack([item.ctrl for item in episodes]), task_state


def everything(task, qpos, ctrl, action, task_state):
    """One control step by the rules, and all that is observed after it; the targets and the task state come first."""
    ctrl = task.control(ctrl, action)
    result = task.evaluate(qpos, task_state)
    after = result.task_state
    seen = {"reward": result.reward, "success": result.success, "failure": result.failure, "ctrl": ctrl}
    seen |= {"state": task.proprioception(qpos, ctrl), "instruction": task.instruction(after)}
    seen |= {"colours": task.colours(after), "marks": task.mark_positions(after)}
    return ctrl, after, seen | after | task.observe_extras(qpos, after)


@pytest.mark.parametrize("name", TASKS)
def test_the_rules_run_on_numpy_and_on_torch_alike(name):
    task, rng = TASKS[name](), np.random.default_rng(1)
    states, ctrl, task_state = situations(task)
    ctrl_tensor, state_tensors, failures = torch.from_numpy(ctrl), tensors(task_state), set()
    for qpos in states:
        action = rng.uniform(-0.04, 0.04, (ENVS, 4)).astype(np.float32)
        ctrl, task_state, arrays = everything(task, qpos, ctrl, action, task_state)
        ctrl_tensor, state_tensors, found = everything(
            task, torch.from_numpy(qpos), ctrl_tensor, torch.from_numpy(action), state_tensors
        )
        failures |= {
            -2 if success else int(cause) for success, cause in zip(arrays["success"], arrays["failure"], strict=True)
        }
        assert arrays.keys() == found.keys()
        for key, array in arrays.items():
            assert isinstance(array, np.ndarray) and isinstance(found[key], torch.Tensor), key
            assert found[key].numpy().dtype == array.dtype and np.array_equal(found[key].numpy(), array), key
    assert failures >= {-2, -1, 0}  # success, running and the first failure


def test_what_is_observed_has_the_declared_types():
    for build in TASKS.values():
        task = build()
        states, _, task_state = situations(task)
        for library in (lambda x: x, torch.from_numpy):
            extras = task.observe_extras(library(states[0]), {n: library(v) for n, v in task_state.items()})
            for name, item in extras.items():
                assert np.asarray(item).dtype == task.extras[name].dtype and item.shape[1:] == task.extras[name].shape


@pytest.mark.parametrize("library", [np.asarray, torch.tensor])
def test_tools_of_rules(library):
    rows = library([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert pick(rows, library([2, 0])).tolist() == [3.0, 4.0]
    assert pick(rows, library([-1, 1])).tolist() == [3.0, 5.0]
    cases = [(library([True, False, False]), 5), (library([True, True, False]), 7)]
    assert first_case(cases).tolist() == [5, 7, -1]
    assert cases_of(library([1, 0]), (rows, -rows)).tolist() == [[-1.0, -2.0, -3.0], [4.0, 5.0, 6.0]]
    assert count(3, rows).tolist() == [0, 1, 2] and type(count(3, rows)) is type(rows)
    constant = Constant([1, 2], np.float32)
    assert type(constant.beside(rows)) is type(rows) and constant.beside(rows) is constant.beside(rows)
