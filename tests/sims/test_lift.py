"""The lift task: rules, determinism, snapshots, expert, pictures."""

from __future__ import annotations

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from sims.catalog import make
from sims.mujoco.canvas import open_context
from sims.mujoco.generators import Generators
from sims.mujoco.render import Renderer, project
from sims.mujoco.scene import CUBES_QPOS
from sims.mujoco.tabletop import HOLD_STEPS, LIFT_HEIGHT, SPACING
from sims.mujoco.tasks import scenes
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from vla_rl.contract.errors import UserError

STAY = np.zeros((1, 1, 4), np.float32)


@pytest.fixture
def lift(build):
    return lambda num_envs, **options: build("lift", num_envs=num_envs, **{"render": False, **options})


def play(env, seeds, until=60, horizon=5):
    """Let the expert act; the last Step and the actions it took [E,n,4]."""
    obs, expert, taken = env.reset(np.arange(len(seeds)), seeds), LiftExpert(horizon), []
    for _ in range(until // horizon):
        taken.append(expert.act(obs))
        step = env.step(taken[-1])
        obs = step.obs
        if step.done.all():
            break
    return step, np.concatenate(taken, 1)


def levitate(env, row, cube, height=0.1):
    """Hold a cube of an environment still in the air; in the next control step it falls less than 2 cm."""
    saved = env.snapshot([row])
    saved["physics"][0, _qpos_start(env) + CUBES_QPOS + 7 * cube + 2] = height
    qvel = _qpos_start(env) + env.task.model.nq
    saved["physics"][0, qvel : qvel + env.task.model.nv] = 0
    env.restore([row], saved)


def _qpos_start(env):
    return env._batch._component(mujoco.mjtState.mjSTATE_QPOS)[0]


def same(a, b):
    parts = [(a.state, b.state), (a.task, b.task), (a.time, b.time)]
    parts += [(a.images[name], b.images[name]) for name in a.images]
    parts += [(a.extras[name], b.extras[name]) for name in a.extras]
    return all(np.array_equal(x, y) for x, y in parts)


# -- scenes ------------------------------------------------------------------------------------------------------------


def test_scenes_spread_and_keep_their_distance(lift):
    obs = lift(256).reset(np.arange(256), np.arange(256))
    cubes = obs.extras["privileged/cubes"].reshape(256, 3, 3)
    xy = cubes[..., :2]
    assert (np.ptp(xy.reshape(-1, 2), axis=0) > 0.25).all() and (np.abs(xy) <= 0.13).all()
    gaps = np.linalg.norm(xy[:, :, None] - xy[:, None], axis=-1) + np.eye(3)
    assert gaps.min() >= SPACING - 1e-6
    assert np.bincount(obs.task, minlength=4).min() > 40
    assert np.allclose(cubes[..., 2], 0.018)
    colours = LiftTask().sample_episodes(Generators.of_seeds(np.arange(20))).task_state["colour"]
    assert all(len(set(one)) == 3 for one in colours.tolist())


# -- determinism -------------------------------------------------------------------------------------------------------


def test_an_episode_depends_on_seed_and_actions_alone(lift):
    seeds = np.array([5, 6, 7, 8, 9])
    first, actions = play(lift(5, threads=1), seeds, until=20)
    wide = lift(8, threads=2)
    order = np.array([3, 7, 0, 5, 2])
    wide.reset(np.arange(8), np.arange(100, 108))
    wide.step(np.full((8, 3, 4), 0.02, np.float32))
    wide.reset(order, seeds)
    chunk = np.full((8, 20, 4), -0.01, np.float32)
    chunk[order] = actions
    repeated = wide.step(chunk)
    assert first.obs.extras["privileged/target"][:, 2].max() > 0.02  # contacts took part
    assert same(first.obs, repeated.obs.select(order)) and np.array_equal(first.success, repeated.success[order])


def test_restore_continues_bit_for_bit_with_a_held_cube(lift):
    env = lift(3, render=True, image_size=16)
    play(env, np.array([1, 2, 3]), until=15)
    saved = env.snapshot([1])
    assert np.abs(saved["physics"]).max() > 0
    chunk = np.tile(np.array([0.004, 0.002, 0.009, 1.0], np.float32), (3, 8, 1))
    straight = env.step(chunk)
    assert straight.obs.extras["privileged/target"][1, 2] > 0.05
    for row in (1, 2):
        env.restore([row], saved)
        branch = env.step(chunk)
        assert same(branch.obs.select([row]), straight.obs.select([1]))
        assert np.array_equal(branch.valid[row], straight.valid[1])


def test_the_warm_start_belongs_to_a_snapshot_and_matters(lift):
    env, lifting = lift(1), np.tile([0, 0, 0.009, 1], (1, 4, 1))
    play(env, np.array([4]), until=15)
    saved = env.snapshot([0])
    cold = {name: array.copy() for name, array in saved.items()}
    start, size = env._batch._component(mujoco.mjtState.mjSTATE_WARMSTART)
    cold["physics"][0, start : start + size] = 0
    ends = []
    for snapshot in (saved, saved, cold):
        env.restore([0], snapshot)
        env.step(lifting)
        ends.append(env.snapshot([0])["physics"])
    assert np.array_equal(ends[0], ends[1]) and not np.array_equal(ends[0], ends[2])


# -- the end of episodes -----------------------------------------------------------------------------------------------


def test_rows_end_inside_a_chunk_and_then_idle(lift):
    env = lift(6, render=True, image_size=16)
    seeds = np.arange(20, 26)
    short, actions = play(env, seeds, horizon=1)
    length = short.obs.time
    env.reset(np.arange(6), seeds)
    step = env.step(np.concatenate([actions, np.full((6, 9, 4), 0.03, np.float32)], 1))
    assert len(set(length)) > 1 and np.array_equal(step.valid.sum(1), length)
    assert same(step.obs, short.obs)  # actions after the end have no effect
    assert np.array_equal(step.reward.sum(1), np.ones(6)) and step.reward[np.arange(6), length - 1].all()
    assert not step.executed[~step.valid].any()
    idle = env.step(np.full((6, 2, 4), 0.03, np.float32), observe="all")
    assert same(idle.obs, step.obs) and not idle.valid.any() and idle.success.all()
    assert idle.cause == ("success",) * 6 and same(idle.frames[0], step.obs)
    fresh = env.reset([2], [99])
    others = np.array([0, 1, 3, 4, 5])
    assert same(fresh.select(others), step.obs.select(others)) and fresh.time[2] == 0


def held_up(env, which, steps):
    """Keep the cube ``which`` (0: the named one) of environment 0 in the air for some control steps; the last Step."""
    saved = env.snapshot([0])
    cube = (int(saved["task_state/named"][0]) + which) % 3
    for _ in range(steps):
        levitate(env, 0, cube)
        step = env.step(STAY)
    return step


def test_success_takes_five_held_steps_in_a_row(lift):
    env = lift(1)
    env.reset([0], [3])
    assert not held_up(env, 0, HOLD_STEPS - 1).done[0]
    env.step(np.zeros((1, 3, 4)))  # the cube falls
    step = held_up(env, 0, HOLD_STEPS - 1)
    assert not step.done[0] and step.reward[0, 0] == 0
    step = held_up(env, 0, 1)
    assert step.terminated[0] and step.success[0] and step.cause == ("success",) and step.reward[0, 0] == 1
    assert step.obs.extras["privileged/lifted"][0] == step.obs.task[0]


def test_a_resting_cube_is_not_up():
    task = LiftTask()
    start = task.sample_episodes(Generators.of_seeds(np.array([0])))
    qpos, task_state = start.qpos, start.task_state
    for height, up in [(0.018, 0), (LIFT_HEIGHT - 1e-6, 0), (LIFT_HEIGHT, 3)]:
        qpos[:, CUBES_QPOS + 7 * np.arange(3) + 2] = height
        assert (task.evaluate(qpos, task_state).task_state["held"] > 0).sum() == up


def test_lifting_another_cube_first_is_a_failure(lift):
    env = lift(1)
    obs = env.reset([0], [3])
    assert obs.extras["privileged/lifted"][0] == -1
    step = held_up(env, 1, HOLD_STEPS)
    assert step.terminated[0] and not step.success[0] and not step.truncated[0] and step.reward[0, 0] == 0
    assert step.cause == ("wrong_object",) and step.obs.extras["privileged/lifted"][0] not in (-1, obs.task[0])


def test_success_at_the_time_limit_terminates_and_later_is_late(lift):
    for idle, success in [(60 - HOLD_STEPS, True), (61 - HOLD_STEPS, False)]:
        env = lift(1)
        env.reset([0], [3])
        env.step(np.zeros((1, idle, 4)))
        step = held_up(env, 0, 60 - idle)
        assert step.obs.time[0] == 60 and step.terminated[0] == success and step.truncated[0] == (not success)
        assert step.cause == ("success" if success else "time_limit",)


def test_a_diverged_row_is_truncated_and_its_neighbour_lives(lift, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warning to MUJOCO_LOG.TXT here
    env = lift(2)
    before = env.reset([0, 1], [1, 2])
    saved = env.snapshot([0])
    saved["physics"][0, _qpos_start(env) + env.task.model.nq] = 1e300
    saved["task_state/held"][0] = HOLD_STEPS  # else a success
    env.restore([0], saved)
    step = env.step(np.zeros((2, 2, 4)))
    assert step.cause == ("diverged", "") and step.truncated[0] and step.valid.sum(1).tolist() == [1, 2]
    assert not step.success.any() and not step.reward.any()
    assert np.isfinite(step.obs.state).all() and np.array_equal(step.obs.state[0], before.state[0])


# -- actions and instructions ------------------------------------------------------------------------------------------


def test_actions_are_clipped_and_the_gripper_goes_where_sent(lift):
    env = lift(1)
    before = env.reset([0], [1])
    step = env.step(np.array([[[1.0, -0.01, 0.0, -5.0]] + [[0, 0, 0, -1.0]] * 4]))
    assert np.allclose(step.executed[0, 0], [0.03, -0.01, 0, -1])
    assert np.allclose(step.obs.state[0, :3] - before.state[0, :3], [0.03, -0.01, 0], atol=1e-3)
    far = env.step(np.tile(np.array([0.03, 0.03, 0.03, 1.0]), (1, 20, 1)))
    assert np.allclose(far.obs.state[0, :7], [0.13, 0.13, 0.16, 0, 0.13, 0.13, 0.16], atol=2e-3)


def test_a_swapped_instruction_names_another_cube_of_the_scene(lift):
    plain, swapped = lift(16, render=True), lift(16, render=True, instruct="distractor")
    env_ids = np.arange(16)
    a, b = plain.reset(env_ids, env_ids), swapped.reset(env_ids, env_ids)
    assert np.array_equal(a.images["front"], b.images["front"]) and np.array_equal(a.state, b.state)
    assert (a.task != b.task).all() and np.array_equal(b.extras["privileged/seeded"], a.task)
    former = LiftExpert().act(a)
    for _ in range(8):
        step = swapped.step(former)
        former = LiftExpert().act(replace(step.obs, extras={"privileged/target": _seeded(step.obs, swapped)}))
    assert step.cause == ("wrong_object",) * 16
    assert np.array_equal(step.obs.extras["privileged/lifted"], a.task)


def _seeded(obs, env):
    cubes = obs.extras["privileged/cubes"].reshape(env.num_envs, -1, 3)
    return cubes[np.arange(env.num_envs), env._task_state["seeded"]]


def test_the_expert_succeeds_and_needs_no_state(lift):
    env = lift(32)
    for horizon in (5, 1):
        step, _ = play(env, np.arange(1000, 1032), horizon=horizon)
        assert step.success.sum() >= 31 and 12 < np.median(step.obs.time) < 45
    obs = env.reset(np.arange(32), np.arange(32))
    assert np.array_equal(LiftExpert().act(obs), LiftExpert().act(obs))


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_cameras_sizes_and_videos(lift):
    env = lift(2, render=True, cameras=("front", "top"), image_size=32)
    obs = env.reset([0, 1], [1, 2])
    assert {name: image.shape for name, image in obs.images.items()} == dict.fromkeys(("front", "top"), (2, 32, 32, 3))
    assert not np.array_equal(obs.images["front"], obs.images["top"])
    assert env.render_rows([1], 96, "side").shape == (1, 96, 96, 3)
    assert np.array_equal(env.render_rows([1, 0], 32), obs.images["front"][[1, 0]])


def test_pictures_equal_those_of_mujocos_own_renderer(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    task = LiftTask()
    start = task.sample_episodes(Generators.of_seeds(np.array([1])))
    rgba = task.colours(start.task_state)
    ours = Renderer(task, 64)
    mine = ours.render(start.qpos, rgba, np.empty((1, 0, 3)), "front", np.empty((1, 64, 64, 3), np.uint8))[0]
    ours.close()
    model, data = task.model, mujoco.MjData(task.model)
    data.qpos[:], model.geom_rgba[list(task.painted)] = start.qpos[0], rgba[0]
    mujoco.mj_forward(model, data)
    monkeypatch.setattr(mujoco.rendering.classic.renderer.gl_context, "GLContext", _context_class())
    with mujoco.Renderer(model, 64, 64) as theirs:
        theirs.update_scene(data, "front")
        assert np.array_equal(theirs.render(), mine)


def _context_class():
    context = open_context()
    kind = type(context)
    context.free()
    return kind


def test_state_only_environments_need_no_opengl(lift, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "off")
    for options in ({"render": False}, {"render": True, "cameras": ()}):
        env = lift(2, **options)
        assert env.reset([0, 1], [1, 2]).images == {} == env.spec.images
    with pytest.raises(UserError, match="MUJOCO_GL='off'"):
        lift(2, render=True).reset([0], [1])


def test_labelled_scenes_point_at_the_named_cube():
    made = scenes.lift(200, seed=4)
    assert [len(part) for part in made] == [200] * 4 and len(set(made.tasks.tolist())) == 4
    repeated = scenes.lift(200, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(made, repeated, strict=True))
    colour = np.array([[0.86, 0.10, 0.10], [0.10, 0.62, 0.18], [0.10, 0.28, 0.90], [0.95, 0.78, 0.08]])
    column, line = np.clip(((made.uv[:, 0] + 1) * 32).astype(int), 0, 63).T
    colours = made.images[np.arange(200), line, column].astype(float)
    wanted = colour[made.tasks]
    cosine = (colours * wanted).sum(1) / np.linalg.norm(colours, axis=1).clip(1) / np.linalg.norm(wanted, axis=1)
    assert (cosine > 0.97).mean() > 0.85  # the rest is hidden behind the gripper or another cube


def test_projection_of_the_camera_axis_is_the_middle():
    model = LiftTask().model
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    ahead = data.cam("front").xpos - 0.5 * data.cam("front").xmat.reshape(3, 3)[:, 2]
    assert np.allclose(project(model, "front", ahead), 0, atol=1e-6)
    right = project(model, "front", ahead + np.array([0.05, 0, 0]))
    assert right[0] > 0.1 and abs(right[1]) < 1e-6
    assert project(model, "front", ahead + np.array([0, 0, 0.05]))[1] < -0.1


def test_a_camera_of_its_own_size_sees_what_it_sees_alone():
    both = make("lift", num_envs=1, cameras=("front", "side"), image_size={"front": 40, "side": 24})
    alone = make("lift", num_envs=1, cameras=("side",), image_size=24)
    seen, other = (env.reset(np.zeros(1, int), np.array([5])) for env in (both, alone))
    assert {name: item.shape for name, item in both.spec.images.items()} == {"front": (40, 40, 3), "side": (24, 24, 3)}
    assert seen.images["front"].shape == (1, 40, 40, 3) and seen.images["side"].std() > 10
    assert np.array_equal(seen.images["side"], other.images["side"])


WHOLE = mujoco.mjtState.mjSTATE_INTEGRATION.value


def fresh(task, seed):
    """The whole integration state of a new ``MjData`` at the beginning of the episode of ``seed``."""
    episode, data = task.sample_episodes(Generators.of_seeds(np.array([seed]))), mujoco.MjData(task.model)
    data.qpos[:], data.ctrl[:] = episode.qpos[0], episode.ctrl[0]
    state = np.empty(mujoco.mj_stateSize(task.model, WHOLE))
    mujoco.mj_getState(task.model, data, state, WHOLE)
    assert data.eq_active.all(), "the fingers are coupled by an equality, which is part of the state"
    return state


def test_a_reset_leaves_nothing_of_the_last_episode():
    """The first begins as MuJoCo does, too."""
    env = make("lift", num_envs=2, render=False)
    env.reset([1, 0], [2, 1])
    assert np.array_equal(env.snapshot([0, 1])["physics"], np.stack([fresh(env.task, 1), fresh(env.task, 2)]))
    env.step(np.full((2, 20, 4), (0.01, 0.0, -0.01, 1.0), np.float32))
    env.reset([1], [7])
    assert np.array_equal(env.snapshot([1])["physics"][0], fresh(env.task, 7))
    assert not np.array_equal(env.snapshot([0])["physics"][0], fresh(env.task, 1))
