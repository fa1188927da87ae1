"""Meta-World's spec, options and expert, which need no Meta-World; ``make test-sims`` runs the real one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sims import catalog
from sims.base import CameraRig, TaskPool
from sims.isolated import ExpertInWorker
from sims.metaworld import MT10, TASKS, MetaWorld, spec
from vla_rl.contract.check import check_spec
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.errors import UserError


@pytest.mark.parametrize(("tasks", "names"), [("MT10", MT10), ("MT50", TASKS), ("reach-v3", ("reach",))])
def test_instructions_come_from_the_names_of_the_tasks(tasks, names):
    found = spec(tasks)
    check_spec(found)
    assert found.families == names and found.tasks == tuple(name.replace("-", " ") for name in names)
    assert EnvSpec.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_there_are_ten_and_fifty_tasks():
    assert len(set(MT10)) == 10 and len(set(TASKS)) == 50 and set(MT10) < set(TASKS)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tasks": "raech"}, r"no task 'raech'.*did you mean 'reach'\?"),
        ({"tasks": ["reach", "reach-v3"]}, "names no task or one twice"),
        ({"tasks": []}, "names no task or one twice"),
        ({"cameras": ["corner9"]}, r"no camera 'corner9'.*did you mean 'corner'\?"),
        ({"camera_positions": {"top": (0, 0, 1)}}, r"no camera 'top'.*did you mean 'topview'\?"),
        ({"image_size": 0}, "image_size=0 is less than 1"),
        ({"time_limit": 501}, "not within Meta-World's 1 to 500"),
        ({"time_limit": 101, "action_repeat": 5}, "not within Meta-World's 1 to 500"),
        ({"action_repeat": 0}, "not within Meta-World's 1 to 500"),
    ],
)
def test_a_wrong_option_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        spec(**options)


def test_the_expert_hands_on_the_action_that_comes_with_the_observation():
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
    door = MetaWorld(
        ["door-open"],
        CameraRig((), 64, 1),
        {},
        TaskPool(lambda task: Door(), 1),
        shaped,
        action_repeat,
    )
    door.reset(0)
    return [door.act(np.zeros(4, np.float32)) for _ in range(actions)]


def test_rewards_are_metaworlds_or_success():
    assert played(1, True, 5) == [(4.5, False)] * 4 + [(4.5, True)]
    assert played(1, False, 5) == [(0.0, False)] * 4 + [(1.0, True)]
    assert catalog.spec_of("metaworld", shaped=False) == spec()


def test_a_repeated_action_adds_up_rewards_and_ends_with_success():
    assert played(3, True, 2) == [(13.5, False), (9.0, True)]
    slower = spec(action_repeat=4, time_limit=100)
    assert slower.control_dt == 4 * spec().control_dt and "0.04 m" in slower.action.unit
