"""Meta-World's spec, options and expert, which need no Meta-World; ``make test-sims`` runs the real one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sims.metaworld import MT10, TASKS, Expert, spec
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.foreign import check_spec
from vla_rl.contract.spec import EnvSpec


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
        ({"time_limit": 501}, "not within Meta-World's 1 to 500"),
    ],
)
def test_a_wrong_option_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        spec(**options)


def test_the_expert_hands_on_the_action_that_comes_with_the_observation():
    action = np.arange(8, dtype=np.float32).reshape(2, 4)
    zeros = np.zeros(2, np.int64)
    obs = Observation({}, np.zeros((2, 4), np.float32), zeros, zeros, {"privileged/expert_action": action})
    assert Expert().act(obs).tolist() == action[:, None].tolist()
    with pytest.raises(UserError, match="plan one action, not 5"):
        Expert(horizon=5)
