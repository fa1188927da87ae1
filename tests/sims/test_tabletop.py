"""Place, push and their mixture: rules by hand, experts, one seed one episode, and what the pictures show."""

from __future__ import annotations

import numpy as np
import pytest

from sims.catalog import make
from sims.mujoco.scene import CUBE_EDGE, CUBES_QPOS, FINGER_OPEN, FINGER_QPOS, MARK_RADIUS
from sims.mujoco.tabletop import COLOURS, HOLD_STEPS, LIFT_HEIGHT, SPACING, UNSEEN, Gantry
from sims.mujoco.tasks import scenes
from sims.mujoco.tasks.mixed import MixedExpert, MixedTask
from sims.mujoco.tasks.place import NEAR, PlaceExpert, PlaceTask
from sims.mujoco.tasks.push import DISTANCE, PushExpert, PushTask
from vla_rl.contract.errors import UserError

REST = CUBE_EDGE / 2


class Table:
    """One environment of a task with cubes at given positions; no physics."""

    def __init__(self, task, seed=0, **options):
        self.task = task(**options)
        episode = self.task.sample_episode(np.random.Generator(np.random.PCG64(seed)))
        self.qpos, self.task_state = (
            episode.qpos[None].copy(),
            {n: np.asarray(v)[None] for n, v in episode.task_state.items()},
        )
        self.opening(2 * FINGER_OPEN)

    def put(self, cube, xy, z=REST):
        start = CUBES_QPOS + 7 * int(cube)
        self.qpos[0, start : start + 3] = [*xy, z]

    def opening(self, metres):
        self.qpos[0, FINGER_QPOS] = metres / 2

    def wait(self, steps=1):
        """The cause or "success" after so many control steps, "" while the episode runs."""
        for _ in range(steps):
            result = self.task.evaluate(self.qpos, self.task_state)
            self.task_state = result.task_state
            if result.success[0]:
                assert result.reward[0] == 1 and result.failure[0] == -1
                return "success"
            if result.failure[0] >= 0:
                assert result.reward[0] == 0
                return self.task.failures[result.failure[0]]
        return ""


@pytest.fixture
def place():
    table = Table(PlaceTask, seed=3)
    named, plate = int(table.task_state["named"][0]), int(table.task_state["plate"][0])
    table.goal, table.wrong = table.task_state["mark_xy"][0, plate], table.task_state["mark_xy"][0, 1 - plate]
    table.named, table.other = named, 1 - named
    return table


def test_placing_takes_a_resting_cube_near_the_middle_of_the_plate_let_go_of_for_five_steps(place):
    place.put(place.named, place.goal + np.array([NEAR - 1e-6, 0]))
    assert place.wait(HOLD_STEPS - 1) == "" and place.wait() == "success"


@pytest.mark.parametrize("fault", ["held", "in the air", "beside", "only now and then"])
def test_what_is_not_placed(place, fault):
    place.put(place.named, place.goal)
    if fault == "held":
        place.opening(CUBE_EDGE)
    elif fault == "in the air":
        place.put(place.named, place.goal, REST + 0.005)
    elif fault == "beside":
        place.put(place.named, place.goal + np.array([0, NEAR + 1e-6]))
    else:
        place.wait(HOLD_STEPS - 1)
        place.opening(CUBE_EDGE)
        place.wait()
        place.opening(2 * FINGER_OPEN)
        assert place.wait(HOLD_STEPS - 1) == ""
        return
    assert place.wait(20) == ""


def test_another_plate_or_another_cube_is_a_failure(place):
    place.put(place.named, place.wrong)
    assert place.wait(HOLD_STEPS - 1) == "" and place.wait() == "wrong_plate"


def test_lifting_the_other_cube_is_a_failure_and_the_named_one_is_not(place):
    place.put(place.named, place.goal + np.array([0.1, 0]), LIFT_HEIGHT)
    assert place.wait(10) == ""
    place.put(place.other, place.goal, LIFT_HEIGHT)
    assert place.wait(HOLD_STEPS) == "wrong_object"


def test_the_other_cube_on_the_plate_is_nothing(place):
    place.put(place.other, place.goal)
    assert place.wait(20) == ""


@pytest.mark.parametrize("task", [PlaceTask, PushTask])
def test_with_a_deadline_later_is_too_late(task):
    table = Table(task, deadline=12)
    assert table.wait(11) == "" and table.wait() == "too_late"


def test_pushing_takes_a_cube_that_rests_at_the_target():
    table = Table(PushTask, seed=1)
    target = table.task_state["mark_xy"][0, 0]
    table.put(0, target + np.array([0, NEAR + 1e-6]))
    assert table.wait(20) == ""
    table.put(0, target + np.array([0, NEAR - 1e-6]))
    assert table.wait(HOLD_STEPS - 1) == "" and table.wait() == "success"


def test_a_cube_above_the_target_has_not_been_pushed_there():
    table = Table(PushTask, seed=1)
    table.put(0, table.task_state["mark_xy"][0, 0], REST + 0.005)
    assert table.wait(20) == ""


def test_pushing_is_not_lifting():
    table = Table(PushTask)
    table.put(0, (0.1, 0.1), LIFT_HEIGHT)
    assert table.wait() == "lifted"


def test_scenes_are_as_the_rules_say():
    place, push = PlaceTask(), PushTask()
    for seed in range(100):
        rng = np.random.Generator(np.random.PCG64(seed))
        episode = place.sample_episode(rng)
        cubes, plates = place.cubes(episode.qpos[None])[0, :, :2], episode.task_state["mark_xy"]
        for i, (a, b) in enumerate(((cubes[0], cubes[1]), *((c, p) for c in cubes for p in plates))):
            assert np.linalg.norm(a - b) >= SPACING - 1e-6, i
        assert np.linalg.norm(plates[0] - plates[1]) > 2 * MARK_RADIUS
        assert len(set(episode.task_state["colour"])) == len(set(episode.task_state["mark_colour"])) == 2
        episode = push.sample_episode(rng)
        distance = np.linalg.norm(push.cubes(episode.qpos[None])[0, 0, :2] - episode.task_state["mark_xy"][0])
        assert DISTANCE[0] - 1e-6 <= distance <= DISTANCE[1] + 1e-6


def test_an_instruction_names_what_is_to_be_done():
    for seed in range(50):
        table = Table(PlaceTask, seed)
        names, task_state = list(COLOURS), {name: value[0] for name, value in table.task_state.items()}
        text = table.task.texts[int(table.task.instruction(table.task_state)[0])]
        cube, plate = (
            names[task_state["colour"][task_state["named"]]],
            names[task_state["mark_colour"][task_state["plate"]]],
        )
        assert text == f"put the {cube} cube on the {plate} plate"


def test_a_distractor_is_named_in_the_same_scene():
    plain, swapped = Table(PlaceTask, 5), Table(PlaceTask, 5, instruct="distractor")
    assert (
        np.array_equal(plain.qpos, swapped.qpos) and plain.task_state["named"][0] == 1 - swapped.task_state["named"][0]
    )
    assert plain.task.instruction(plain.task_state)[0] != swapped.task.instruction(swapped.task_state)[0]


@pytest.mark.parametrize(
    ("name", "expert", "horizon", "share"),
    [
        ("place", PlaceExpert, 1, 1),
        ("place", PlaceExpert, 5, 0.8),
        ("push", PushExpert, 1, 1),
        ("mixed", MixedExpert, 1, 1),
    ],
)
def test_the_expert_succeeds(name, expert, horizon, share):
    env = make(name, num_envs=48, render=False)
    obs, acting = env.reset(np.arange(48), np.arange(48)), expert(horizon)
    while not (step := env.step(acting.act(obs))).done.all():
        obs = step.obs
    assert step.success.mean() >= share
    env.close()


def test_a_mixture_plays_every_task_by_its_own_rules():
    env, task = make("mixed", num_envs=40, render=False), MixedTask()
    obs = env.reset(np.arange(40), np.arange(40))
    families = [env.spec.family(int(i)) for i in obs.task]
    assert env.spec.families == task.families and set(families) == {"lift", "place", "push"}
    assert env.spec.time_limit == 80 and task.families.count("lift") == 4
    idle, ends = np.zeros((40, 1, 4), np.float32), {}
    for _ in range(80):
        step = env.step(idle)
        ends |= {row: (step.cause[row], int(step.obs.time[row])) for row in np.flatnonzero(step.done)}
    for row, family in enumerate(families):
        assert ends[row] == ("too_late", 60 if family == "lift" else 80)
    env.close()


def test_a_mixture_is_the_task_it_plays():
    """Same physics and same verdicts as that task alone, from the same draws."""
    mixed = MixedTask(deadlines={"push": 9, "place": 9})
    for seed in range(12):
        rng = np.random.Generator(np.random.PCG64(seed))
        episode = mixed.sample_episode(rng)
        alone = np.random.Generator(np.random.PCG64(seed))
        task = mixed.tasks[int(alone.integers(3))]
        expected = task.sample_episode(alone)
        assert np.array_equal(episode.qpos, expected.qpos) and mixed.tasks[int(episode.task_state["which"])] is task
        hidden = expected.task_state["colour"] == UNSEEN
        assert hidden.sum() == {"lift": 0, "place": 1, "push": 2}[task.name]
        task_state = {name: np.asarray(value)[None] for name, value in episode.task_state.items()}
        text = mixed.texts[int(mixed.instruction(task_state)[0])]
        own = {name: np.asarray(value)[None] for name, value in expected.task_state.items()}
        assert text == task.texts[int(task.instruction(own)[0])]
        for _ in range(10):
            result, other = mixed.evaluate(episode.qpos[None], task_state), task.evaluate(episode.qpos[None], own)
            cause = mixed.failures[result.failure[0]] if result.failure[0] >= 0 else ""
            assert cause == (task.failures[other.failure[0]] if other.failure[0] >= 0 else "")
            task_state, own = result.task_state, other.task_state
        assert (cause == "too_late") == (task.name != "lift")


def test_labelled_scenes_point_at_the_named_cube_and_its_goal():
    made = scenes.place(150, seed=4)
    assert made.uv.shape == (150, 2, 2) and np.abs(made.uv).max() < 1.2
    repeated = scenes.place(150, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(made, repeated, strict=True))
    palette = np.array(list(COLOURS.values()))[:4]
    wanted = np.stack([palette[made.tasks // 4], palette[made.tasks % 4]], axis=1)
    column, line = np.clip(((made.uv + 1) * 32).astype(int), 0, 63).transpose(2, 0, 1)
    colours = made.images[np.arange(150)[:, None], line, column].astype(float)
    cosine = (colours * wanted).sum(2) / np.linalg.norm(colours, axis=2).clip(1) / np.linalg.norm(wanted, axis=2)
    assert ((cosine > 0.97).mean(axis=0) > 0.75).all()  # the rest is hidden behind the gripper, the cube or its shade
    assert {int(task) for task in scenes.mixed(60, seed=1).tasks} > {20}
    assert set(scenes.push(5, seed=1).tasks.tolist()) == {0}


def test_what_is_not_in_an_episode_is_not_in_its_picture():
    """A push in the mixture's model renders like a push in its own."""
    mixed, push = MixedTask(), PushTask()
    seed = next(s for s in range(50) if int(np.random.Generator(np.random.PCG64(s)).integers(3)) == 2)
    env, alone = make("mixed", num_envs=1), make("push", num_envs=1)
    crowd = env.reset([0], [seed]).images["front"][0]
    rng = np.random.Generator(np.random.PCG64(seed))
    rng.integers(3)
    episode = mixed.tasks[2].sample_episode(rng)
    saved = alone.snapshot([0]) if alone.reset([0], [0]) is not None else {}
    alone._qpos[0, : push.model.nq] = episode.qpos[: push.model.nq]
    for name, value in episode.task_state.items():
        alone._task_state[name][0] = value[:1] if name in ("colour", "mark_colour", "mark_xy") else value
    single = alone.render_rows([0], 64)[0]
    assert saved and np.array_equal(crowd, single)
    env.close()
    alone.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("place", {"cubes": 1}),
        ("place", {"colours": 9}),
        ("push", {"cubes": 0}),
        ("mixed", {"deadlines": {"lft": 3}}),
        ("push", {"instruct": "distractor"}),
    ],
)
def test_impossible_variants_are_refused(name, options):
    with pytest.raises(UserError):
        make(name, num_envs=1, **options)


def test_positions_are_at_least_the_given_distance_apart():
    spacing = np.array([[0, 0.05, 0.1], [0.05, 0, 0.02], [0.1, 0.02, 0]])
    for seed in range(50):
        xy = Gantry().scatter(3, spacing, np.random.Generator(np.random.PCG64(seed)))
        gaps = np.linalg.norm(xy[:, None] - xy[None], axis=-1)
        assert (gaps >= spacing).all() and np.abs(xy).max() <= 0.13
