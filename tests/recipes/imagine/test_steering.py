"""A steered imagined rollout: keys are bound to actions by name, and going back restores the earlier step."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.recipes.imagine.runs import CALM, FAR, changed, one_env, push, run_folder, steered, world_model
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.policy import ActionOut
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes.imagine.play import Steering, View, idle_action, keys_of, steering_of
from vla_rl.recipes.imagine.recipe import SavedRun
from world_models.config import Limits

OPEN, CLOSED = -2.0, 1.0  # of "grip" in these runs; most recordings start closer to the first


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SavedRun:
    return SavedRun.load(run_folder(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture
def hands(run) -> Steering:
    return steered(run, 8)


def limits(*values: float) -> Limits:
    return Limits(values)


def same(one: View, other: View) -> bool:
    """Whether both have the same view."""
    a, b = ({**asdict(view), "pictures": view.pictures[-1].tolist()} for view in (one, other))
    return a == b


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_do_what_actions_are_called_and_say_when_they_do_nothing():
    lift = ArraySpec(
        (4,), "float32", (-0.03, -0.03, -0.02, -1), (0.03, 0.03, 0.04, 1), "m,m,m,1", "", ("dx", "dy", "dz", "grip")
    )
    found = {name: (key.entry, key.sign, key.does) for key in keys_of(lift) for name in key.keys}
    assert found["arrowright"] == found["d"] == (0, 1, "dx +0.03 m") and found["arrowleft"] == found["a"] == (
        0,
        -1,
        "dx -0.03 m",
    )
    assert found["arrowup"] == found["w"] == (1, 1, "dy +0.03 m") and found["arrowdown"] == found["s"] == (
        1,
        -1,
        "dy -0.03 m",
    )
    assert found["q"] == found["pageup"] == (2, 1, "dz +0.04 m") and found["e"] == found["pagedown"] == (
        2,
        -1,
        "dz -0.02 m",
    )
    assert found[" "] == (3, 0, "grip: the other way")
    mixed = replace(lift, names=("gripper_position", "delta_z", "yaw", "X"), unit="")
    found = {name: (key.entry, key.does) for key in keys_of(mixed) for name in key.keys}
    assert found[" "][0] == 0 and found["q"][0] == 1 and found["d"] == (3, "X +1")
    assert found["w"] == found["s"] == (None, "nothing: no action is called y")
    assert all(key.entry is None for key in keys_of(replace(lift, names=())))


@pytest.mark.parametrize(("first", "held"), [([-0.8, -1.9, 0.9], OPEN), ([-0.2, 0.8, -1.9], CLOSED)])
def test_the_gripper_begins_as_in_most_recordings(first, held):
    action = world_model().spec.action
    idle = idle_action(action, np.array([[0.4, grip] for grip in first]))
    assert idle.tolist() == [0.0, held]
    above = replace(action, low=(0.1, -2.0))  # where standing still is not allowed, the nearest to it
    assert idle_action(above, np.array([[0.4, -2.0]]))[0] == pytest.approx(0.1)


def test_every_key_is_one_control_step_of_the_action_it_stands_for(run, hands):
    """The same actions by hand from the same initial state: equal pictures, probabilities and uncertainty."""
    presses = [
        ("d", (0.5, OPEN)),
        ("shift+ArrowLeft", (-0.125, OPEN)),
        (" ", (0.0, CLOSED)),
        ("A", (-0.5, CLOSED)),
        (" ", (0.0, OPEN)),
    ]
    env = one_env(run, horizon=8)
    env.reset(np.zeros(1, int), [0])
    np.testing.assert_array_equal(hands.view.pictures[0], run.held_out.images["front"][0])
    assert (
        hands.view.instruction == run.calibrated.model.spec.tasks[run.held_out.task[0]]
        and hands.view.uncertainty is None
    )
    for i, (key, action) in enumerate(presses):
        view = hands.press(key)
        obs = env.step(np.array(action, np.float32)[None, None]).obs
        np.testing.assert_array_equal(view.pictures, obs.images["front"])
        assert (view.done, view.success_probability, view.uncertainty) == (
            *env.outcome[0, [0, 2]].tolist(),
            float(env.uncertainty[0]),
        )
        assert (view.step, view.steps, view.cause) == (i + 1, 8, "")
        assert view.limit == (1e9 if i < 3 else 2e9)  # of the call that the step belongs to; three steps are one
        assert view.grip == action[1]


def test_each_direction_has_its_own_bound_and_shift_a_share_of_it(tmp_path):
    run = SavedRun.load(run_folder(tmp_path / "run", names=("yaw", "x"), policy=False))
    hands = steering_of(changed(run, limits=FAR), 8)[0]
    env = one_env(run)
    env.reset(np.zeros(1, int), [0])
    for key, action in (("a", -2.0), ("d", 1.0), ("shift+a", -0.5), ("shift+d", 0.25)):
        view = hands.press(key)
        picture = env.step(np.array([[[0.0, action]]], np.float32)).obs.images["front"]
        np.testing.assert_array_equal(view.pictures, picture)
        assert view.grip is None
    assert hands.press(" ").remark == "That key does nothing: no action is called grip."


# -- back, next, the policy --------------------------------------------------------------------------------------------


def test_back_takes_steps_back_so_that_the_same_keys_give_the_same_again(hands):
    """Bit for bit, from the middle of a call too, with the gripper as it was."""
    keys = ["d", " ", "a", "p", "d"]  # a call is three steps
    views = [hands.view, *(hands.press(key) for key in keys)]
    for view in views[-2::-1]:
        assert same(hands.press("b"), view)
    assert hands.press("b").remark.startswith("There is nothing to take back")
    other = [hands.press(key) for key in ("a", " ", "d", "p", "a")]
    assert not any(same(one, two) for one, two in zip(views[1:], other, strict=True))
    for _ in keys:
        hands.press("b")
    assert all(same(hands.press(key), view) for key, view in zip(keys, views[1:], strict=True))


def test_the_next_imagined_rollout_begins_like_the_next_episode_and_after_the_last_the_first(run, hands):
    hands.press(" ")
    for i in [*range(1, 10), 0]:
        view = hands.press("r")
        begin = run.held_out.spans()[i][0]
        assert (view.episode, view.step, view.uncertainty, view.grip) == (i, 0, None, OPEN)
        np.testing.assert_array_equal(view.pictures[0], run.held_out.images["front"][begin])
        assert view.instruction == run.calibrated.model.spec.tasks[run.held_out.task[begin]]
        assert hands.press("b").remark.startswith("There is nothing to take back")  # nor the imagined rollout before


def test_the_policy_decides_once_and_is_shown_step_by_step(run, hands):
    """On what the imagined rollout shows; the gripper stays as the policy left it."""
    env = one_env(run, horizon=8)
    obs = env.reset(np.zeros(1, int), [0])
    for _ in range(2):
        view = hands.press("p")
        step = env.step(push(obs), observe="all")
        np.testing.assert_array_equal(view.pictures, [frame.images["front"][0] for frame in step.frames])
        obs = step.obs
    assert view.step == 4 and view.grip == CLOSED
    assert hands.press("b").grip == CLOSED and hands.press("b").grip == OPEN


class Dicing(FunctionPolicy):
    """A decision is a throw of its generator, and counts those before it in its imagined rollout."""

    def initial_state(self, num_envs: int) -> dict[str, Any]:
        return {"count": torch.zeros(num_envs)}

    def act(self, features: Any, state: Any, mode: Any, generator: Any) -> tuple[ActionOut, Any]:
        assert mode == "eval"
        action = torch.full((1, 2, 2), 0.1 * float(state["count"][0]))
        action[..., 0] = 0.2 * torch.rand(1, 2, generator=generator)
        return ActionOut(action, action, torch.zeros(1)), {"count": state["count"] + 1}


def test_a_decision_that_was_taken_back_is_made_again(run):
    """The policy's state goes back as well, and its noise is that of the time step: new in every one."""
    made = steering_of(changed(run, limits=FAR), 12)[0]
    hands = Steering(made.env, 10, np.array([0.0, OPEN], np.float32), Dicing(run.calibrated.model.spec, push))
    made.env.step, chunks = _overheard(made.env.step)
    views = [hands.press("p") for _ in range(3)]
    assert (
        hands.press("b") and hands.press("b") and same(hands.press("p"), views[1]) and same(hands.press("p"), views[2])
    )
    hands.press("r")
    hands.press("p")
    counts, dice = [float(chunk[0, 0, 1]) for chunk in chunks], [float(chunk[0, 0, 0]) for chunk in chunks]
    np.testing.assert_allclose(counts, [0, 0.1, 0.2, 0.1, 0.2, 0], atol=1e-6)
    assert dice[3:5] == dice[1:3] and len({*dice}) == 4


def _overheard(step: Any) -> tuple[Any, list[np.ndarray]]:
    chunks: list[np.ndarray] = []

    def heard(chunk: np.ndarray, observe: Any) -> Any:
        chunks.append(np.array(chunk))
        return step(chunk, observe)

    return heard, chunks


# -- ends --------------------------------------------------------------------------------------------------------------


def test_an_imagined_rollout_that_is_too_uncertain_ends_at_its_call_and_back_goes_on(run):
    hands = steering_of(changed(run, limits=limits(1e9, 1e-6)), 8)[0]
    views = [hands.press("d") for _ in range(6)]
    assert [view.cause for view in views] == [""] * 5 + ["uncertainty"]
    assert views[3].uncertainty > views[3].limit == 1e-6 and "too uncertain" in views[5].end
    for key in ("d", "p", " "):
        idle = hands.press(key)
        assert idle.step == 6 and idle.remark.startswith("This rollout has ended") and idle.end == views[5].end
    assert same(hands.press("b"), views[4]) and hands.press("r").end == ""


@pytest.mark.parametrize(
    ("numbers", "cause", "says"),
    [
        ({"success_threshold": 0.0}, "success", "is done"),
        ({"failure_threshold": 0.0}, "failed", "has failed"),
        ({}, "time_limit", "Time is up"),
    ],
)
def test_an_end_is_reported_in_words(run, numbers, cause, says):
    hands = steering_of(changed(run, imagination=replace(CALM, **numbers, deadline=2), limits=FAR), 4)[0]
    views = [hands.press("d") for _ in range(4)]
    last = next(view for view in views if view.cause)
    # The deadline that a learner has is not for people: at the end of the first call, or of the time.
    assert (last.cause, last.step) == (cause, 4 if cause == "time_limit" else 3) and says in last.end
