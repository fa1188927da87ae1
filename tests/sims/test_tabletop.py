"""Place, push and their mixture: rules by hand, on numpy and torch alike, experts, and what the pictures show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.mujoco.generators import Generators
from sims.mujoco.scene import CUBE_EDGE, CUBES_QPOS, FINGER_OPEN, FINGER_QPOS, MARK_RADIUS
from sims.mujoco.tabletop import COLOURS, HOLD_STEPS, LIFT_HEIGHT, SPACING, UNSEEN, Gantry
from sims.mujoco.task import Constant, cases_of, count, first_case, pick
from sims.mujoco.tasks import scenes
from sims.mujoco.tasks.lift import LiftTask
from sims.mujoco.tasks.mixed import MixedExpert, MixedTask
from sims.mujoco.tasks.place import NEAR, PlaceExpert, PlaceTask
from sims.mujoco.tasks.push import DISTANCE, PushExpert, PushTask
from vla_rl.contract.errors import UserError

REST, COLOURED = CUBE_EDGE / 2, ("colour", "mark_colour")


def numpys(seed):
    """The generator of numpy whose numbers the episode of ``seed`` is made of."""
    return np.random.Generator(np.random.PCG64(seed))


class Table:
    """One environment of a task with cubes at given positions; no physics."""

    def __init__(self, task, seed=0, **options):
        self.task = task(**options)
        drawn = self.task.sample_episodes(Generators([numpys(seed)]))
        self.qpos, self.task_state = drawn.qpos, drawn.task_state
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


def test_placed_is_resting_on_the_plate_let_go_of_for_five_steps(place):
    place.put(place.named, place.goal + np.array([NEAR - 1e-6, 0]))
    assert place.wait(HOLD_STEPS - 1) == "" and place.wait() == "success"


def test_what_is_not_placed(place):
    place.put(place.named, place.goal + np.array([0, NEAR + 1e-6]))  # beside
    assert place.wait(20) == ""
    place.put(place.named, place.goal, REST + 0.005)  # in the air
    assert place.wait(20) == ""
    place.put(place.named, place.goal)
    place.opening(CUBE_EDGE)  # held
    assert place.wait(20) == ""
    place.opening(2 * FINGER_OPEN)
    place.wait(HOLD_STEPS - 1)
    place.opening(CUBE_EDGE)  # only now and then
    place.wait()
    place.opening(2 * FINGER_OPEN)
    assert place.wait(HOLD_STEPS - 1) == ""


def test_another_plate_or_another_cube_is_a_failure(place):
    place.put(place.named, place.wrong)
    assert place.wait(HOLD_STEPS - 1) == "" and place.wait() == "wrong_plate"


def test_only_lifting_the_other_cube_is_a_failure(place):
    place.put(place.other, place.goal)  # on the plate: that is nothing
    assert place.wait(20) == ""
    place.put(place.named, place.goal + np.array([0.1, 0]), LIFT_HEIGHT)
    assert place.wait(10) == ""
    place.put(place.other, place.goal, LIFT_HEIGHT)
    assert place.wait(HOLD_STEPS) == "wrong_object"


@pytest.mark.parametrize("task", [PlaceTask, PushTask])
def test_with_a_deadline_later_is_too_late(task):
    table = Table(task, deadline=12)
    assert table.wait(11) == "" and table.wait() == "too_late"


def test_pushing_takes_a_cube_that_rests_at_the_target_unlifted():
    table = Table(PushTask, seed=1)
    target = table.task_state["mark_xy"][0, 0]
    table.put(0, target + np.array([0, NEAR + 1e-6]))
    assert table.wait(20) == ""
    table.put(0, target, REST + 0.005)  # above it
    assert table.wait(20) == ""
    table.put(0, target + np.array([0, NEAR - 1e-6]))
    assert table.wait(HOLD_STEPS - 1) == "" and table.wait() == "success"
    lifted = Table(PushTask)
    lifted.put(0, (0.1, 0.1), LIFT_HEIGHT)
    assert lifted.wait() == "lifted"


def test_scenes_are_as_the_rules_say():
    place, push, seeds = PlaceTask(), PushTask(), np.arange(100)
    episodes = place.sample_episodes(Generators.of_seeds(seeds))
    cubes, plates = place.cubes(episodes.qpos)[..., :2], episodes.task_state["mark_xy"]
    pairs = ((cubes[:, 0], cubes[:, 1]), *((cubes[:, c], plates[:, p]) for c in (0, 1) for p in (0, 1)))
    assert min(np.linalg.norm(a - b, axis=1).min() for a, b in pairs) >= SPACING - 1e-6
    assert np.linalg.norm(plates[:, 0] - plates[:, 1], axis=1).min() > 2 * MARK_RADIUS
    assert all((episodes.task_state[kind][:, 0] != episodes.task_state[kind][:, 1]).all() for kind in COLOURED)
    episodes = push.sample_episodes(Generators.of_seeds(seeds))
    distance = np.linalg.norm(push.cubes(episodes.qpos)[:, 0, :2] - episodes.task_state["mark_xy"][:, 0], axis=1)
    assert DISTANCE[0] - 1e-6 <= distance.min() and distance.max() <= DISTANCE[1] + 1e-6


def test_an_instruction_names_what_is_to_be_done():
    for seed in range(50):
        table = Table(PlaceTask, seed)
        names, task_state = list(COLOURS), {name: value[0] for name, value in table.task_state.items()}
        text = table.task.texts[int(table.task.instruction(table.task_state)[0])]
        cube = names[task_state["colour"][task_state["named"]]]
        plate = names[task_state["mark_colour"][task_state["plate"]]]
        assert text == f"put the {cube} cube on the {plate} plate"
    plain, swapped = Table(PlaceTask, 5), Table(PlaceTask, 5, instruct="distractor")
    assert np.array_equal(plain.qpos, swapped.qpos)
    assert plain.task_state["named"][0] == 1 - swapped.task_state["named"][0]


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
    env = make(name, num_envs=24, render=False)
    obs, acting = env.reset(np.arange(24), np.arange(24)), expert(horizon)
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
        episode, alone = mixed.sample_episodes(Generators([numpys(seed)])), numpys(seed)
        task = mixed.tasks[int(alone.integers(3))]
        expected = task.sample_episodes(Generators([alone]))
        task_state, own = episode.task_state, expected.task_state
        assert np.array_equal(episode.qpos, expected.qpos) and mixed.tasks[int(task_state["which"][0])] is task
        assert (own["colour"] == UNSEEN).sum() == {"lift": 0, "place": 1, "push": 2}[task.name]
        text = mixed.texts[int(mixed.instruction(task_state)[0])]
        assert text == task.texts[int(task.instruction(own)[0])]
        for _ in range(10):
            result, other = mixed.evaluate(episode.qpos, task_state), task.evaluate(episode.qpos, own)
            cause = mixed.failures[result.failure[0]] if result.failure[0] >= 0 else ""
            assert cause == (task.failures[other.failure[0]] if other.failure[0] >= 0 else "")
            task_state, own = result.task_state, other.task_state
        assert (cause == "too_late") == (task.name != "lift")


def test_labelled_scenes_point_at_the_named_cube_and_its_goal():
    made = scenes.place(150, seed=4)
    assert made.uv.shape == (150, 2, 2) and np.abs(made.uv).max() < 1.2
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
    seed = next(s for s in range(50) if int(numpys(s).integers(3)) == 2)
    env, alone = make("mixed", num_envs=1), make("push", num_envs=1)
    crowd = env.reset([0], [seed]).images["front"][0]
    rng = numpys(seed)
    rng.integers(3)
    episode = mixed.tasks[2].sample_episodes(Generators([rng]))
    alone.reset([0], [0])
    alone._qpos[:] = episode.qpos[:, : push.model.nq]
    for name, value in episode.task_state.items():
        alone._task_state[name][:] = value[:, :1] if name in ("colour", "mark_colour", "mark_xy") else value
    assert np.array_equal(crowd, alone.render_rows([0], 64)[0])
    env.close()
    alone.close()


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("place", {"cubes": 1}, "no variant"),
        ("place", {"colours": 9}, "no variant"),
        ("push", {"cubes": 0}, "has nothing to push"),
        ("mixed", {"deadlines": {"lft": 3}}, "lft"),
        ("push", {"instruct": "distractor"}, "instruct"),
        ("lift", {"cubes": 5}, "no variant"),
        ("lift", {"cameras": ("frnt",)}, "did you mean 'front'"),
        ("lift", {"image_size": 0}, "image_size=0 leaves nothing to render"),
        ("lift", {"cameras": ("front", "side"), "image_size": {"front": 40}}, "gives the camera 'side' no size"),
    ],
)
def test_impossible_variants_are_refused(name, options, what):
    with pytest.raises(UserError, match=what):
        make(name, num_envs=1, **options)


def test_positions_are_at_least_the_given_distance_apart():
    spacing = np.array([[0, 0.05, 0.1], [0.05, 0, 0.02], [0.1, 0.02, 0]])
    xy = Gantry().scatter(3, spacing, Generators.of_seeds(np.arange(50)))
    gaps = np.linalg.norm(xy[:, :, None] - xy[:, None], axis=-1)
    assert (gaps >= spacing).all() and np.abs(xy).max() <= 0.13


# -- the rules on numpy arrays and on torch tensors --------------------------------------------------------------------

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
    rng, episodes, states = np.random.default_rng(0), task.sample_episodes(Generators.of_seeds(np.arange(ENVS))), []
    for step in range(STEPS):
        qpos = episodes.qpos.copy()
        qpos[:, CUBES_QPOS:] += rng.normal(0, 1e-3, qpos[:, CUBES_QPOS:].shape)
        qpos[:, FINGER_QPOS] = rng.uniform(0.024, 0.03, (ENVS, 1))
        if step > 2:
            qpos[::3, CUBES_QPOS + 2] = 0.07
            if "mark_xy" in episodes.task_state:
                qpos[1::3, CUBES_QPOS : CUBES_QPOS + 2] = episodes.task_state["mark_xy"][1::3, 0]
        states.append(qpos)
    return states, episodes.ctrl, episodes.task_state


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
            if key in task.extras:
                assert array.dtype == task.extras[key].dtype and array.shape[1:] == task.extras[key].shape, key
            assert found[key].numpy().dtype == array.dtype and np.array_equal(found[key].numpy(), array), key
    assert failures >= {-2, -1, 0}  # success, running and the first failure


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
