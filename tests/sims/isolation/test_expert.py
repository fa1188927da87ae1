"""Scripted experts in the workers: their actions come with the observations, and demonstrations are made by them."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from sims import catalog
from sims.catalog import make
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import UserError
from vla_rl.experience.collect import collect_demonstrations

ACTION = "privileged/expert_action"
LIFT = {"render": False, "threads": 1}


def test_the_expert_in_the_worker_does_what_it_does_here():
    near, expert = make("lift", num_envs=2, **LIFT), catalog.expert("lift", 1)
    with closing(make("isolated", num_envs=2, env="lift", options=LIFT, workers=2, expert=True)) as far:
        assert far.spec.extras[ACTION].low == near.spec.action.low and len(check_env(far)) == 7
        here, there = near.reset([0, 1], [5, 6]), far.reset([0, 1], [5, 6])
        for i in range(20):
            action = expert.act(here)[:, :1]
            assert np.array_equal(
                there.extras[ACTION], np.clip(action[:, 0], near.spec.action.low, near.spec.action.high)
            )
            here, step = near.step(action).obs, far.step(action, observe="all" if i % 2 else "last")
            there = step.obs
            assert all(ACTION in frame.extras for frame in step.frames)
        saved = far.snapshot([1])
        other = far.reset([1], [9])
        assert np.array_equal(far.restore([1], saved).extras[ACTION][1], there.extras[ACTION][1])
        assert not np.array_equal(other.extras[ACTION][1], there.extras[ACTION][1])


def test_demonstrations_are_those_of_the_expert_here():
    near, expert = make("lift", num_envs=2, **LIFT), catalog.expert("lift", 1)
    expected = collect_demonstrations(near, expert.act, [3, 4])
    with closing(make("isolated", num_envs=2, env="lift", options=LIFT, expert=True)) as far:
        found = collect_demonstrations(far, catalog.expert("isolated", 1, env="lift").act, [3, 4])
    assert np.array_equal(found.action, expected.action) and np.array_equal(found.state, expected.state)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: make("isolated", num_envs=1, env="counting", expert=True), "'counting' declares no scripted expert"),
        (lambda: catalog.expert("isolated", 4, env="lift"), "knows its next action only, so it cannot plan 4"),
        (
            lambda: catalog.expert("isolated", 1, env="lift").act(make("counting", num_envs=1).reset([0], [0])),
            "make the isolated environment with expert=True",
        ),
    ],
)
def test_what_no_expert_can_do_is_said(ask, sentence):
    with pytest.raises(UserError, match=sentence):
        ask()


def test_scenes_and_instructions_are_those_of_the_environment():
    assert catalog.scenes("isolated", env="lift") is catalog.scenes("lift")
    assert catalog.swapped_options("isolated", env="lift")["options"] == catalog.swapped_options("lift")
