"""Lift in ManiSkill over an ideal arm, without ManiSkill; ``make test-sims`` runs the real one.

The ideal arm is always where its joints were sent: forward kinematics of Franka's own table, in ManiSkill's frame.
"""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sims import catalog
from sims.catalog import make, spec_of
from sims.maniskill.build import env_of
from sims.maniskill.lift import LiftWorld, spec
from sims.maniskill.world import Outcome
from sims.mujoco.scene import CUBE_EDGE, FINGER_OPEN, WORKSPACE_HIGH, WORKSPACE_LOW
from sims.mujoco.tabletop import HOLD_STEPS, LIFT_HEIGHT
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from tests.franka_hand import hand_at
from tests.sims.test_conformance import CHECKS
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.collect import ExpertPolicy

HALF = CUBE_EDGE / 2
START = (0.1, -0.05, 0.2)  # of the pinch point, in ManiSkill's frame: higher than the workspace


class IdealPick:
    """The interface of ``World`` over PickCube: a cube between closing fingers comes along, nothing falls."""

    num_envs = 1

    def __init__(self):
        self.closed, self.sent, self.pictures = False, None, 0
        self._pinch, self._cube = torch.tensor([START]), torch.zeros(1, 3)
        self.env = SimpleNamespace(device=torch.device("cpu"), agent=SimpleNamespace())
        self.env.agent.robot = SimpleNamespace(get_qpos=lambda: self._qpos)
        self.env.agent.is_grasping = lambda cube: self._qpos[:, -1] < FINGER_OPEN
        self._show()

    def reset(self, rows, seeds):
        assert list(rows) == [0]
        rng = np.random.default_rng(seeds[0])
        self._pinch, self._cube = torch.tensor([START]), torch.tensor([[*rng.uniform(-0.1, 0.1, 2), HALF]]).float()
        self._qpos = torch.full((1, 9), 0.04)
        self._show()

    def step(self, action):
        self.sent = action
        hand = hand_at(action[0, :7].astype(float), (-0.615, 0.0, 0.0), 0.0)
        np.testing.assert_allclose(hand[:3, 2], [0, 0, -1], atol=1e-6)  # it points down
        np.testing.assert_allclose(np.abs(hand[0, :2]), [1, 0], atol=1e-6)  # the fingers open across the picture
        pinch = torch.from_numpy(hand @ [0, 0, 0.1034, 1]).float()[None, :3]
        if action[0, 7] == 0 and (self._cube - self._pinch).abs().max() < 0.015:
            self._cube = self._cube + pinch - self._pinch
        self._pinch, self._qpos = pinch, torch.from_numpy(action[:, [*range(8), 7]])
        self._show()
        nothing = torch.zeros(1, dtype=torch.bool)
        return Outcome(torch.zeros(1), nothing, nothing)

    def images(self):
        self.pictures += 1
        shade = ((self._pinch.sum(1) * 1000).long() % 256).to(torch.uint8)
        return {"front": shade[:, None, None, None].expand(-1, 64, 64, 3)}

    def close(self):
        self.closed = True

    _qpos = torch.full((1, 9), 0.04)

    def _show(self):
        places = (SimpleNamespace(pose=SimpleNamespace(p=place)) for place in (self._pinch, self._cube))
        self.env.agent.tcp, self.env.cube = places


def ideal(num_envs=3):
    return env_of(spec(), [LiftWorld(IdealPick(), LiftTask()) for _ in range(num_envs)], ends_at_success=True)


@pytest.fixture
def env():
    with closing(ideal()) as made:
        yield made


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_the_contract(env, check):
    check(env)


# -- what a policy of MuJoCo's lift meets ------------------------------------------------------------------------------


def test_a_policy_meets_what_mujocos_lift_shows_and_takes(monkeypatch):
    ours, theirs = (spec_of(name, cameras=["front", "top"], image_size=32) for name in ("maniskill_lift", "lift"))
    for part in ("images", "state", "action", "tasks", "families", "control_dt", "time_limit", "max_chunk", "success"):
        assert getattr(ours, part) == getattr(theirs, part), part
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for device in ("cuda", "auto"):
        on_gpu = spec_of("maniskill_lift", device=device)
        assert (on_gpu.device, on_gpu.profile, on_gpu.can_snapshot) == ("cuda", "tolerant", False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert spec_of("maniskill_lift", device="auto") == spec_of("maniskill_lift")


def test_places_are_the_tables_and_the_red_cube_is_named(env):
    obs = env.reset([0, 1, 2], [3, 4, 5])
    assert [env.spec.tasks[task] for task in obs.task] == ["pick up the red cube"] * 3
    x, y = np.random.default_rng(4).uniform(-0.1, 0.1, 2)  # of ManiSkill, whose x comes from the arm to the camera
    assert obs.extras["privileged/target"][1] == pytest.approx([y, -x, HALF], abs=1e-6)
    top = WORKSPACE_HIGH[2]
    assert obs.state[0] == pytest.approx([-0.05, -0.1, top + 0.02, 0.078, -0.05, -0.1, top, 2 * FINGER_OPEN], abs=1e-6)


def test_actions_move_the_commanded_point_and_close_the_fingers(env):
    env.reset([0, 1, 2], [3, 4, 5])
    step = env.step(np.tile(np.array([0.02, -0.01, -0.03, 1.0]), (3, 2, 1)))
    assert step.obs.state[0] == pytest.approx([-0.01, -0.12, 0.1, 0, -0.01, -0.12, 0.1, 0], abs=1e-6)
    assert step.obs.extras["privileged/grasped"].tolist() == [[1.0]] * 3
    step = env.step(np.tile(np.array([0.0, 0.0, 0.0, -1.0]), (3, 1, 1)))
    assert step.obs.state[0, 3] == pytest.approx(2 * FINGER_OPEN)
    far = env.step(np.tile(np.array([0.03, -0.03, -0.03, -1.0]), (3, 8, 1))).obs.state[0, 4:7]
    assert far == pytest.approx([WORKSPACE_HIGH[0], WORKSPACE_LOW[1], WORKSPACE_LOW[2]])


def test_the_expert_of_mujocos_lift_lifts_the_cube(env):
    found = evaluate(env, ExpertPolicy(catalog.expert("maniskill_lift", 5).act), list(range(6)))
    assert isinstance(catalog.expert("maniskill_lift", 5), LiftExpert) and found.rate.success == 1.0


def test_success_is_the_cube_up_for_five_control_steps_in_a_row(env):
    env.reset([0, 1, 2], [3, 4, 5])
    heights = [*[LIFT_HEIGHT + 0.001] * (HOLD_STEPS - 1), LIFT_HEIGHT - 0.001, *[LIFT_HEIGHT] * HOLD_STEPS]
    worlds = [world._world for world in env._worlds]
    ends = []
    for number, height in enumerate(heights):
        if number == 6:
            env.reset([1], [4])  # its count begins anew
        for world in worlds:
            world._cube = torch.tensor([[0.0, 0.0, height]])
        step = env.step(np.zeros((3, 1, 4)))
        ends.append(step.cause[0])
        assert step.reward[0, 0] == float(step.cause[0] == "success")
    assert ends == [*[""] * (len(heights) - 1), "success"] and step.cause[1] == ""
    assert env.step(np.zeros((3, 1, 4))).cause == ("success", "success", "success")


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"looks": "tablet"}, r"no looks 'tablet'.*did you mean 'tabletop'\?"),
        ({"cameras": ["frnt"]}, r"no camera 'frnt'.*did you mean 'front'\?"),
        ({"image_sise": 32}, r"no option 'image_sise'.*did you mean 'image_size'\?"),
        ({}, r"maniskill is not installed.*'vla-rl sims install maniskill'"),
        ({"device": "cuda"}, r"ManiSkill is not installed here.*pip install 'vla-rl\[maniskill\]'"),
        ({"device": "cuda", "num_envs": 0}, "num_envs=0 is less than 1"),
    ],
)
def test_what_cannot_be_made_is_refused(options, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv("VLA_RL_HOME", str(tmp_path))
    with pytest.raises(UserError, match=sentence):
        make("maniskill_lift", **{"num_envs": 1, **options})
