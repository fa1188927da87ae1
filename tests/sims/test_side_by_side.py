"""Simulators of one environment each behind the contract, shown on a small one whose rules are known."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sims.base import CameraRig, SideBySide, TaskPool, require_positive
from sims.mujoco.canvas import Canvas
from vla_rl.contract.check import check_env
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError, UserError

LIMIT = 12
SPEC = EnvSpec(
    name="counter",
    images={"front": ArraySpec((4, 4, 3), "uint8", 0, 255)},
    state=ArraySpec((1,), "float32", -100.0, 100.0),
    action=ArraySpec((1,), "float32", -1.0, 1.0),
    tasks=("go up", "go down"),
    control_dt=0.1,
    time_limit=LIMIT,
    max_chunk=5,
    extras={"privileged/seed": ArraySpec((1,), "int64", 0, 1 << 40)},
    can_snapshot=True,
)


class Counter:
    """Sums its actions; ``goal`` or more is success, and the position ``broken`` is not a number."""

    def __init__(self, goal: float = 100.0, broken: float = 100.0) -> None:
        self.goal, self.broken = goal, broken
        self.pictures, self.closed = 0, False

    def reset(self, seed):
        self.seed, self.position = seed, np.float64(seed % 7) / 10
        return seed % 2

    def act(self, action):
        self.position += float(action[0])
        return self.position, self.position >= self.goal

    def state(self):
        value = np.nan if self.position >= self.broken else self.position
        return np.array([value], np.float32)

    def extras(self):
        return {"privileged/seed": np.array([self.seed])}

    def images(self):
        self.pictures += 1
        return {"front": np.full((4, 4, 3), int(abs(self.position) * 9) % 256, np.uint8)}

    def close(self):
        self.closed = True


@pytest.fixture
def simulators():
    return [Counter(), Counter(goal=2.5), Counter(broken=2.5)]


@pytest.fixture
def env(simulators):
    return SideBySide(SPEC, simulators)


def test_it_keeps_the_contract():
    simulators = [Counter(goal=3.0) for _ in range(3)]
    env = SideBySide(SPEC, simulators)
    assert len(check_env(env, seed=5)) == 7
    env.close()
    env.close()
    assert all(one.closed for one in simulators)
    with pytest.raises(UserError, match="time_limit=0 is less than 1, so no episode can be played"):
        require_positive(image_size=64, time_limit=0)


def test_success_terminates_the_limit_truncates_nan_diverges(env):
    env.reset([0, 1, 2], [0, 7, 14])
    first = step = env.step(np.ones((3, 4, 1)))
    assert first.reward.tolist() == [[1, 2, 3, 4], [1, 2, 3, 0], [1, 2, 0, 0]]
    assert first.valid.sum(1).tolist() == [4, 3, 3]
    for _ in range(LIMIT // 4 - 1):
        step = env.step(np.ones((3, 4, 1)))
    assert step.cause == ("time_limit", "success", "diverged")
    assert step.terminated.tolist() == [False, True, False] and step.truncated.tolist() == [True, False, True]
    assert step.success.tolist() == [False, True, False]
    assert step.obs.time.tolist() == [LIMIT, 3, 3]
    assert step.obs.state[:, 0].tolist() == [12.0, 3.0, 2.0]  # the last finite one
    assert step.obs.task.tolist() == [0, 1, 0]


def test_pictures_are_taken_of_what_is_handed_out_only(env, simulators):
    env.reset([0, 1, 2], [0, 0, 0])
    env.step(np.full((3, 5, 1), 0.1))
    assert [one.pictures for one in simulators] == [2, 2, 2]
    env.step(np.full((3, 5, 1), 0.1), observe="all")
    assert [one.pictures for one in simulators] == [7, 7, 7]
    env.reset([1], [1])
    assert [one.pictures for one in simulators] == [7, 8, 7]


def test_a_snapshot_of_one_goes_on_in_another_place(env):
    env.reset([0, 1, 2], [3, 4, 5])
    env.step(np.full((3, 3, 1), 0.1))
    saved = env.snapshot([0])
    first = env.step(np.full((3, 2, 1), 0.1)).obs.select(np.array([0]))
    env.restore([1], saved)
    later = env.step(np.full((3, 2, 1), 0.1)).obs.select(np.array([1]))
    assert later.state == first.state and later.time == first.time and later.task == first.task
    assert later.extras["privileged/seed"] == 3 and (later.images["front"] == first.images["front"]).all()
    with pytest.raises(ContractError, match="nothing was restored"):
        env.restore([0, 1], saved)


def test_a_pool_makes_what_is_missing_and_closes_the_oldest():
    made = []

    def make(task):
        made.append(Counter())
        return made[-1]

    pool = TaskPool(make, most_idle=2)
    first, second, third = (pool.take(task) for task in "aba")
    pool.give_back("a", first)
    pool.give_back("b", second)
    assert pool.take("b") is second and pool.take("b") is made[3]
    pool.give_back("b", second)
    pool.give_back("a", third)
    assert first.closed and not second.closed and pool.take("a") is third and len(made) == 4
    pool.close()
    assert second.closed and not third.closed


SCENE = """<mujoco><worldbody><light pos="0 0 2"/><camera name="top" pos="0 0 1"/>
<geom type="box" size="0.3 0.3 0.1" rgba="{} 1"/></worldbody></mujoco>"""
COLOURS = {"red": "1 0 0", "green": "0 1 0", "blue": "0 0 1"}


@pytest.fixture
def scenes():
    models = {name: mujoco.MjModel.from_xml_string(SCENE.format(colour)) for name, colour in COLOURS.items()}
    scenes = {name: (model, mujoco.MjData(model)) for name, model in models.items()}
    for model, data in scenes.values():
        mujoco.mj_forward(model, data)
    return scenes


def test_every_task_has_its_picture_and_few_renderers_stay_open(scenes, monkeypatch):
    closed = []
    real = Canvas.close
    monkeypatch.setattr(Canvas, "close", lambda one: closed.append(one) or real(one))
    assert CameraRig([], 16, most=1).images("red", *scenes["red"]) == {}
    rig = CameraRig(["top"], 16, most=2)
    for name in ("red", "green", "red", "blue", "red", "green"):
        picture = rig.images(name, *scenes[name])["top"]
        assert picture.shape == (16, 16, 3) and np.argmax(picture[8, 8]) == list(COLOURS).index(name)
    assert len(closed) == 2  # green's for blue, blue's for green
    rig.close()
    rig.close()
    assert len(closed) == 4
