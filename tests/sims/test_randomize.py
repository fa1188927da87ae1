"""Randomised environments: every parameter by hand, one seed one episode, nominal values change nothing, records."""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from sims import catalog
from sims.catalog import make
from sims.mujoco.env import LOOKS, PARAMETERS
from sims.mujoco.render import recolour
from sims.mujoco.scene import CUBES_QPOS, WORKSPACE_HIGH
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from sims.randomize import ACTION_PARAMETERS, parameters_of, randomized_spec
from sims.toy import point_mass
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.task import RANDOMIZATION, Randomization
from vla_rl.experience.collect import collect_demonstrations
from vla_rl.recipes.env_config import EnvConfig

ALL = {p.name: {"values": list(p.grid(5))} for p in (*PARAMETERS, *ACTION_PARAMETERS)}
FOCAL = 32 / math.tan(math.radians(38) / 2)  # pixels, of the cameras at the front and at the side
LATE_AND_NOISY = {"latency": {"low": 0, "high": 3}, "action_noise": {"low": 0, "high": 0.3}}


@pytest.fixture(scope="module")
def table():
    """Lift by all cameras; :func:`scene` gives it parameters."""
    with closing(make("lift", num_envs=1, cameras=("front", "side", "top"))) as made:
        yield made


def scene(table, **parameters):
    """The first observation of an episode with these parameters."""
    return table.reset([0], [5], {name: np.array([value]) for name, value in parameters.items()})


# -- the contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "parameters"),
    [("lift", ALL), pytest.param("mixed", ALL, marks=pytest.mark.full), ("counting", LATE_AND_NOISY)],
)
def test_every_parameter_at_once_keeps_the_contract(build, env, parameters):
    made = build("randomize", num_envs=3, env=env, parameters=parameters)
    assert len(check_env(made, seed=11)) == 7
    assert made.spec == catalog.spec_of("randomize", env=env, parameters=parameters)


@pytest.mark.parametrize("varied", [False, True], ids=["nothing is described", "all, after an episode that differed"])
def test_nominal_values_change_nothing_bit_for_bit(build, varied):
    """With contacts: the expert lifts."""
    nominal = {p.name: p.nominal for p in (*PARAMETERS, *ACTION_PARAMETERS)} if varied else {}
    plain, wrapped = build("lift", num_envs=2), build("randomize", num_envs=2, parameters=nominal)
    if varied:
        others = {"friction": 0.1, "object_mass": 5.0, "camera_x": 0.05, "light_brightness": 0.5}
        wrapped.env.reset([0, 1], [3, 4], {name: [value] * 2 for name, value in others.items()})
        wrapped.env.step(np.zeros((2, 3, 4)))
    after, before = (env.reset([0, 1], [1, 2]) for env in (wrapped, plain))
    for _ in range(7):
        assert np.array_equal(before.images["front"], after.images["front"])
        assert np.array_equal(before.state, after.state)
        assert all(np.array_equal(before.extras[name], after.extras[name]) for name in before.extras)
        chunk = LiftExpert(3).act(before)
        mine, theirs = wrapped.step(chunk), plain.step(chunk)
        assert np.array_equal(mine.executed, theirs.executed)
        after, before = mine.obs, theirs.obs


def test_what_was_drawn_is_observed_and_recorded_by_name(build):
    description = {"friction": {"low": 0.8, "high": 1.5}, "action_noise": 0.05}
    env = build("randomize", num_envs=3, options={"render": False}, parameters=description)
    obs = env.reset([0, 1, 2], [7, 8, 9])
    declared, names = parameters_of("lift"), env.spec.extras[RANDOMIZATION].names
    expected = Randomization.from_json(description).draw(declared, [7, 8, 9]).astype(np.float32)
    assert names == tuple(parameter.name for parameter in declared)
    assert np.array_equal(obs.extras[RANDOMIZATION], expected)
    assert len(set(expected[:, names.index("friction")])) == 3 and expected[0, names.index("camera_x")] == 0.0
    step = env.step(np.zeros((3, 2, 4)), observe="all")
    assert all(np.array_equal(frame.extras[RANDOMIZATION], expected) for frame in (step.obs, *step.frames))
    assert RANDOMIZATION not in obs.public().extras
    episodes = collect_demonstrations(env, catalog.expert("randomize", 1).act, [1, 2])
    drawn = Randomization.from_json(description).draw(declared, episodes.seed).astype(np.float32)
    for name in ("friction", "action_noise", "camera_yaw"):
        assert np.array_equal(episodes.extras[f"randomization.{name}"], drawn[:, names.index(name)])


def test_a_snapshot_holds_parameters_noise_and_late_commands(build):
    env = build("randomize", num_envs=3, parameters=ALL)
    env.reset([0, 1, 2], [11, 12, 13])
    chunks = np.random.default_rng(2).uniform(-1, 1, (4, 3, 3, 4)).astype(np.float32)
    env.step(chunks[0])
    saved = env.snapshot([0])
    physics = [env.env._batch.get_model(0).body_mass, env.env._batch.get_model(0).geom_friction]
    first = [env.step(chunk) for chunk in chunks[1:]]
    env.reset([0, 1, 2], [21, 22, 23])
    obs = env.restore([2], saved)
    model = env.env._batch.get_model(2)
    assert np.array_equal(model.body_mass, physics[0]) and np.array_equal(model.geom_friction, physics[1])
    moved = chunks.copy()
    moved[:, 2] = chunks[:, 0]
    again = [env.step(chunk) for chunk in moved[1:]]
    assert obs.extras[RANDOMIZATION][2, -1] == Randomization.from_json(ALL).draw(env.parameters, [11])[0, -1]
    for before, after in zip(first, again, strict=True):
        assert np.array_equal(before.obs.images["front"][0], after.obs.images["front"][2])
        assert np.array_equal(before.obs.state[0], after.obs.state[2])
        assert np.array_equal(before.executed[0], after.executed[2])
    with pytest.raises(ContractError, match=r"randomize/values.*nothing was restored"):
        env.restore([2], {name: item for name, item in saved.items() if name != "randomize/values"})


# -- what cannot be varied ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "parameters", "sentence"),
    [
        ("point_mass", {"camera_x": 0.01}, r"'point_mass' cannot vary 'camera_x', so it was not made; known: action_n"),
        ("lift", {"camera_pich": 0.01}, r"'lift' cannot vary 'camera_pich'.*did you mean 'camera_pitch'"),
        ("lift", {"friction": 9.0}, r"'friction' cannot be 9; give a number from 0.02 to 2"),
        ("lift", {"table_texture": 0.5}, r"'table_texture' cannot be 0.5; give a whole number from 0 to 3"),
    ],
)
def test_what_cannot_be_varied_is_said_before_anything_is_built(monkeypatch, env, parameters, sentence):
    monkeypatch.setattr(catalog, "make", lambda *given, **options: pytest.fail("built"))
    with pytest.raises(UserError, match=sentence):
        make("randomize", num_envs=1, env=env, parameters=parameters)


def test_noise_on_discrete_actions_is_refused():
    spec = point_mass.spec()
    discrete, given = replace(spec.action, dtype="int64", low=0, high=3), Randomization.from_json({"action_noise": 0.1})
    with pytest.raises(UserError, match=r"actions of 'point_mass' are int64, to which no noise can be added"):
        randomized_spec(replace(spec, action=discrete), (), given)
    with pytest.raises(UserError, match=r"'point_mass' computes on 'cuda', but only environments in numpy"):
        randomized_spec(replace(spec, device="cuda"), (), given)


# -- latency and noise -------------------------------------------------------------------------------------------------


def test_late_commands_follow_zeros_however_they_are_cut(build):
    commands = np.random.default_rng(1).uniform(-0.1, 0.1, (1, 9, 2)).astype(np.float32)
    start = np.random.Generator(np.random.PCG64(4)).uniform(-1, 1, 2)  # of point_mass with this seed
    for delay, cuts in itertools.product((0, 1, 3), ([9], [1] * 9, [2, 5, 2])):
        env = build("randomize", num_envs=1, env="point_mass", parameters={"latency": delay})
        env.reset([0], [4])
        at, states = 0, []
        for size in cuts:
            step = env.step(commands[:, at : at + size], observe="all")
            assert np.array_equal(step.executed, commands[:, at : at + size])  # what was commanded
            states += [frame.state[0] for frame in step.frames]
            at += size
        arrived = np.concatenate([np.zeros((delay, 2)), commands[0, : 9 - delay]])
        assert np.allclose(states, start + np.cumsum(arrived, axis=0), atol=1e-6) and abs(states[-1]).max() < 1


def test_noise_has_its_deviation_and_follows_from_seed_and_time(build):
    env = build("randomize", num_envs=400, env="point_mass", parameters={"action_noise": 0.1})
    before = env.reset(np.arange(400), np.arange(400)).state
    zeros = np.zeros((400, 1, 2), np.float32)
    first = env.step(zeros)
    inside = (abs(before) < 0.9).all(1)
    moved = (first.obs.state - before)[inside]
    assert abs(moved.std() - 0.1 * 0.2) < 0.001 and abs(moved.mean()) < 0.003  # half the range is 0.2 m
    assert not first.executed.any()  # nothing was commanded
    second = env.step(zeros).obs.state - first.obs.state
    assert abs(np.corrcoef(moved[:, 0], second[inside][:, 0])[0, 1]) < 0.2
    lone = build("randomize", num_envs=1, env="point_mass", parameters={"action_noise": 0.1})
    lone.reset([0], [17])
    assert np.array_equal(lone.step(np.zeros((1, 2, 2))).obs.state[0], (first.obs.state + second)[17])


def test_a_nan_is_refused_when_commanded_not_on_arrival(build):
    env = build("randomize", num_envs=2, env="point_mass", parameters={"latency": 3})
    before = env.reset([0, 1], [1, 2])
    with pytest.raises(NonFiniteError, match=r"action\[1,0,0\] is nan"):
        env.step(np.array([[[0.1, 0.1]], [[np.nan, 0.0]]]))
    assert np.array_equal(env.reset([], []).time, before.time)


# -- the tabletop, parameter by parameter ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "axis"), [("object_x", 0), ("object_y", 1)])
def test_objects_are_shifted(table, name, axis):
    plain, shifted = scene(table), scene(table, **{name: 0.02})
    cubes = [obs.extras["privileged/cubes"].reshape(-1, 3) for obs in (plain, shifted)]
    assert np.allclose(cubes[1] - cubes[0], 0.02 * np.eye(3)[axis], atol=1e-6)
    assert np.array_equal(plain.state, shifted.state)


def test_marks_shift_with_the_cubes_and_absent_cubes_stay_away(build):
    for name, options in (("place", {"cubes": 3, "render": False}), ("push", {"render": False})):
        env = build(name, num_envs=1, **options)
        plain, shifted = (env.reset([0], [3], given).extras for given in ({}, {"object_x": np.array([0.02])}))
        assert np.allclose(shifted["privileged/goal"] - plain["privileged/goal"], [[0.02, 0, 0]], atol=1e-6)
        moved = (shifted["privileged/cubes"] != plain["privileged/cubes"]).reshape(-1, 3).any(1)
        assert moved.tolist() == {"place": [True, True, False], "push": [True]}[name]


def test_cubes_are_turned(build):
    env = build("lift", num_envs=2, render=False)
    env.reset([0, 1], [5, 5], {"object_yaw": [0.0, 0.3]})
    for cube in range(3):
        start = CUBES_QPOS + 7 * cube + 3
        w, z = env._qpos[:, start], env._qpos[:, start + 3]
        assert 2 * math.atan2(z[1], w[1]) - 2 * math.atan2(z[0], w[0]) == pytest.approx(0.3)


def test_the_gripper_starts_elsewhere_but_within_its_workspace(table):
    plain, moved = scene(table), scene(table, gripper_x=0.01, gripper_z=-0.02)
    assert np.allclose(moved.state - plain.state, [[0.01, 0, -0.02, 0, 0.01, 0, -0.02, 0]], atol=1e-6)
    assert scene(table, gripper_y=0.1, gripper_x=0.1).state[0, :2].max() <= WORKSPACE_HIGH[0] + 1e-6


@pytest.mark.parametrize("parameter", LOOKS, ids=lambda parameter: parameter.name)
def test_looks_change_the_picture_and_nothing_else(table, parameter):
    plain = scene(table)
    pictures = [scene(table, **{parameter.name: value}) for value in parameter.grid(3)]
    assert len({obs.images["front"].tobytes() for obs in pictures}) == len(pictures)
    for obs in pictures:
        assert np.array_equal(obs.state, plain.state)
        assert np.array_equal(obs.extras["privileged/cubes"], plain.extras["privileged/cubes"])


def centre(picture):
    """Mean column and row of what is strongly coloured, and how many pixels that is."""
    colourful = picture.astype(int).max(2) - picture.astype(int).min(2) > 80
    rows, columns = np.nonzero(colourful)
    return columns.mean(), rows.mean(), len(rows)


@pytest.mark.parametrize(
    ("name", "value", "right", "down"),
    [
        ("camera_x", 0.03, -1, 0),  # a camera that moves right sees everything further left
        ("camera_y", 0.03, 0, 1),
        ("camera_yaw", 0.05, 1, 0),  # one that turns left sees everything further right
        ("camera_pitch", 0.05, 0, 1),
    ],
)
@pytest.mark.parametrize("camera", ["side"])
def test_cameras_move_and_turn_in_their_own_frame(table, camera, name, value, right, down):
    before, after = (centre(scene(table, **given).images[camera][0]) for given in ({}, {name: value}))
    model = LiftTask().model
    distance = np.linalg.norm(model.cam_pos[model.camera(camera).id])
    pixels = FOCAL * (value / distance if name in ("camera_x", "camera_y") else math.tan(value))
    assert np.allclose(np.array(after[:2]) - before[:2], [pixels * right, pixels * down], atol=1.0)


def test_the_camera_above_by_hand(table):
    focal, height = 32 / math.tan(math.radians(36) / 2), 0.62 - 0.018
    before, after = (centre(scene(table, **given).images["top"][0]) for given in ({}, {"camera_x": 0.04}))
    assert before[0] - after[0] == pytest.approx(focal * 0.04 / height, abs=1.0)
    before, after = (centre(scene(table, **given).images["top"][0]) for given in ({}, {"camera_roll": 0.2}))
    angle = [math.atan2(row - 31.5, column - 31.5) for column, row, _ in (before, after)]
    turned = (angle[1] - angle[0]) % (2 * math.pi)  # the picture turns clockwise, the camera the other way
    assert turned == pytest.approx(0.2, abs=0.1)
    sizes = [centre(scene(table, camera_z=shift).images["top"][0])[2] for shift in (0.06, 0.0, -0.06)]
    assert sizes[0] < sizes[1] < sizes[2]
    wide, narrow = (centre(scene(table, camera_fovy=angle).images["top"][0])[2] for angle in (0.1, -0.1))
    assert wide < sizes[1] < narrow


def test_light_and_table_are_as_bright_as_they_say(table):
    given = ({}, {"light_brightness": 0.5})
    background = [scene(table, **values).images["front"][0, 2, 2].astype(float) for values in given]
    assert np.allclose(background[1], background[0] * 0.5, atol=1.5)
    darker = scene(table, table_brightness=0.5).images["front"][0]
    assert np.allclose(darker[2, 2], background[0] * 0.5, atol=1.5)
    assert centre(darker)[2] == pytest.approx(centre(scene(table).images["front"][0])[2], rel=0.1)  # cubes stay bright


def test_colours_by_hand():
    red, grey = np.array([[[1, 0, 0, 1]]], np.float32), np.array([[[0.5, 0.5, 0.5, 0.3]]], np.float32)
    one, zero = np.ones(1), np.zeros(1)
    assert np.allclose(recolour(red, zero, one), red)
    assert np.allclose(recolour(red, np.array([2 * math.pi / 3]), one), [[[0, 1, 0, 1]]], atol=1e-6)  # a third: green
    assert np.allclose(recolour(red, zero, zero), [[[1 / 3, 1 / 3, 1 / 3, 1]]])
    assert np.allclose(recolour(red, zero, one * 1.5), [[[1, 0, 0, 1]]])  # clipped
    assert np.allclose(recolour(grey, np.array([0.4]), one * 1.5), grey)


def test_masses_and_friction_belong_to_their_environment(build):
    env = build("lift", num_envs=3, render=False)
    env.reset([0, 1, 2], [5, 5, 5], {"object_mass": [1.0, 4.0, 1.0], "friction": [1.0, 1.0, 0.1]})
    models = [env._batch.get_model(i) for i in range(3)]
    cube, hand = (models[0].body(name).id for name in ("cube0", "hand"))
    assert [m.body_mass[cube] for m in models] == pytest.approx([0.05, 0.2, 0.05])
    assert [m.body_inertia[cube, 0] / models[0].body_inertia[cube, 0] for m in models] == pytest.approx([1, 4, 1])
    assert [m.body_mass[hand] for m in models] == pytest.approx([0.3] * 3)
    assert [m.geom_friction[:, 0].tolist() for m in models[:2]] == [models[0].geom_friction[:, 0].tolist()] * 2
    assert np.allclose(models[2].geom_friction, models[0].geom_friction * 0.1)
    assert models[1].dof_invweight0[5] == pytest.approx(models[0].dof_invweight0[5] / 4)  # derived constants follow
    env.reset([0], [6], {"object_mass": [2.0], "friction": [0.5]})
    assert all(np.array_equal(env._batch.get_model(i).body_mass, models[i].body_mass) for i in (1, 2))


def test_slippery_cubes_cannot_be_lifted_and_nobody_else_notices(build):
    friction = np.where(np.arange(16) % 2, 0.05, 1.0)
    env = build("lift", num_envs=16, render=False)
    obs, expert = env.reset(np.arange(16), np.arange(16), {"friction": friction}), LiftExpert()
    while not (step := env.step(expert.act(obs)[:, :1])).done.all():
        obs = step.obs
    assert step.success[::2].all() and not step.success[1::2].any()


# -- what belongs to the wrapped task ----------------------------------------------------------------------------------


def test_expert_scenes_and_claims_are_the_wrapped_environments():
    wrapped = EnvConfig("randomize", {"env": "place", "options": {"render": False}, "parameters": {"friction": 2.0}})
    plain = EnvConfig("place", {"render": False})
    assert type(wrapped.make_expert(2)) is type(plain.make_expert(2))
    assert EnvConfig("randomize", {"env": "lift"}).claims() is EnvConfig("lift").claims()
    assert EnvConfig("randomize", {"env": "lift"}).draw_scenes(2, 1).images.shape[0] == 2
    with closing(wrapped.make_swapped(3)) as env, closing(plain.make_swapped(3)) as other:
        assert env.spec.images == other.spec.images == {}  # the other options stay
        swapped, expected = (one.reset([0, 1, 2], [1, 2, 3]) for one in (env, other))
        assert np.array_equal(swapped.task, expected.task) and np.array_equal(swapped.state, expected.state)
        assert (swapped.extras[RANDOMIZATION][:, env.spec.extras[RANDOMIZATION].names.index("friction")] == 2.0).all()
