"""Lift in Genesis as far as it needs no Genesis; ``make test-sims`` runs the real one.

Rules and bookkeeping are tested over an ideal arm, which is always where it was sent.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sims import catalog, genesis
from sims.genesis import AWAY, CUBES, FINGERS, Cameras, GenesisEnv, Rows, engine, make, make_in_process, spec
from sims.mujoco.scene import CUBE_EDGE, FINGER_OPEN, WORKSPACE_HIGH, WORKSPACE_LOW
from sims.mujoco.tasks.lift import LiftExpert, LiftTask
from tests.elsewhere import elsewhere
from tests.franka_hand import hand_at
from tests.waiting import counted_waits
from vla_rl.contract.check import check_env
from vla_rl.contract.env import EnvSpec, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.tracker import read_step


class IdealScene:
    """The interface of ``sims.genesis.Scene``: a cube between closing fingers comes along, nothing falls."""

    def __init__(self, num_envs, colours=4, device="cpu"):
        self._num_envs, self._colours, self._device = num_envs, colours, device
        self.broken, self.renders, self.closed = set(), 0, False

    def rest(self):
        qpos = self._zeros(self._num_envs, CUBES + 7 * self._colours)
        cubes = qpos[:, CUBES:].view(self._num_envs, -1, 7)
        cubes[..., 1], cubes[..., 2], cubes[..., 3] = AWAY, CUBE_EDGE / 2, 1.0
        return Rows(qpos, self._zeros(self._num_envs, qpos.shape[1] - self._colours), self._zeros(self._num_envs, 3))

    def _zeros(self, *shape):
        return torch.zeros(shape, device=self._device)

    def advance(self, rows, pinch, opening, steps):
        assert steps == 6
        qpos = rows.qpos.clone()
        cubes = qpos[:, CUBES:].view(self._num_envs, -1, 7)
        near = (cubes[..., :3] - rows.pinch[:, None]).abs().amax(2) < 0.015
        moved = (pinch - rows.pinch)[:, None] * (near & (opening == 0)[:, None])[..., None]
        cubes[..., :3] += moved
        qpos[:, : genesis.FRANKA_JOINTS], qpos[:, FINGERS] = genesis.joints_at(pinch), opening[:, None]
        diverged = ~rows.qpos.isfinite().all(1)
        for env_id in self.broken:
            diverged[env_id] = True
        qpos = torch.where(diverged[:, None], float("nan"), qpos)
        return Rows(qpos, rows.vel + 1.0, pinch.clone()), diverged

    def nbytes(self):
        return 10**7 + self._num_envs * 10**6

    def render(self, rows):
        self.renders += 1
        shade = (rows.pinch.sum(1) * 1000).long() % 256
        return {"front": shade.to(torch.uint8)[:, None, None, None].expand(-1, 64, 64, 3).contiguous()}

    def close(self):
        self.closed = True


def ideal(num_envs=3, **options):
    return GenesisEnv(LiftTask(**options), spec(**options), IdealScene(num_envs))


# -- options -----------------------------------------------------------------------------------------------------------


def test_all_but_robot_and_physics_is_as_in_mujoco(monkeypatch):
    here, there = catalog.spec_of("genesis", workers=2), catalog.spec_of("lift")
    assert here == replace(there, name="genesis lift", profile="tolerant")
    assert EnvSpec.from_json(json.loads(json.dumps(here.to_json()))) == here
    for given, chosen in (
        ({"device": "cuda"}, "cuda"),
        ({"device": "auto"}, "cuda"),
        ({"device": "auto", "workers": 2}, "cpu"),
    ):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        assert catalog.spec_of("genesis", **given).device == chosen
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert catalog.spec_of("genesis", device="auto").device == "cpu"
    assert isinstance(catalog.expert("genesis", 5), LiftExpert)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "gpu"}, r"runs on 'cpu' or 'cuda', not on 'gpu'"),
        ({"cameras": ["frnt"]}, r"no camera 'frnt'.*did you mean 'front'\?"),
        ({"image_size": 0}, "image_size=0 leaves nothing"),
        ({"cubes": 9}, "no variant cubes=9"),
        ({"device": "cuda", "workers": 2}, "device='cuda' with workers=2 would send every observation"),
    ],
)
def test_a_wrong_option_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make(2, **options)
    with pytest.raises(UserError, match=sentence):
        catalog.spec_of("genesis", **options)


# -- Genesis itself ----------------------------------------------------------------------------------------------------


def test_without_genesis_both_ways_to_get_it_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "genesis", None)
    with pytest.raises(UserError, match=r"pip install 'vla-rl\[genesis\]'.*'vla-rl sims install genesis'.*workers=1"):
        make(2)


@pytest.fixture
def present(monkeypatch):
    """A package ``genesis`` as far as setting it up goes."""
    backends = {name: SimpleNamespace(name=name) for name in ("cpu", "cuda")}
    started = []
    package = SimpleNamespace(_initialized=False, backend=None, init=lambda **given: started.append(given), **backends)
    package.started = started
    monkeypatch.setitem(sys.modules, "genesis", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return package


def test_too_many_environments_are_refused_before_the_scene(present, monkeypatch):
    present._initialized, present.backend, made = True, present.cpu, []
    monkeypatch.setattr("sims.base.free_bytes", lambda device: 10**9)
    monkeypatch.setattr(genesis, "Scene", lambda package, count, *rest: made.append(IdealScene(count)) or made[-1])
    with pytest.raises(UserError, match=r"2000 environments of 1\.00 MB each .* 1\.0 GB that are free .*; 900 fit\."):
        make_in_process(2000, cameras=[])
    assert [one.rest().qpos.shape[0] for one in made] == [1, 2] and all(one.closed for one in made)
    assert make_in_process(300, cameras=[]).num_envs == 300


def test_genesis_is_set_up_once_for_one_device_that_is_there(present):
    with pytest.raises(UserError, match=r"torch finds no GPU.*install NVIDIA's driver.*or choose device 'cpu'\."):
        engine("cuda")
    assert engine("cpu") is present and present.started[0]["backend"] is present.cpu
    present._initialized, present.backend = True, present.cpu
    assert engine("cpu") is present and len(present.started) == 1
    present.backend = present.cuda
    with pytest.raises(UserError, match=r"Genesis runs on 'cuda' in this process.*choose the same device for all"):
        engine("cpu")


@pytest.mark.parametrize("num_envs", [1, 3])
def test_pictures_have_an_axis_for_the_environments(present, num_envs):
    """As the rasterizer makes them: a flipped view without that axis of one environment, a stack of several."""
    present.backend = present.cpu
    drawn = np.arange(num_envs * 4 * 4 * 3, dtype=np.uint8).reshape(num_envs, 4, 4, 3)
    made = drawn[0, ::-1].copy()[::-1] if num_envs == 1 else drawn
    cameras = Cameras(present, ["front"], 4)
    cameras._cameras["front"] = SimpleNamespace(render=lambda force_render: (made, None, None, None))
    assert np.array_equal(cameras.render()["front"].numpy(), drawn)


# -- the arm -----------------------------------------------------------------------------------------------------------

_LIMITS = [2.8973, 1.7628, 2.8973, (-3.0718, -0.0698), 2.8973, (-0.0175, 3.7525), 2.8973]


def test_the_joints_put_the_fingers_where_they_are_wanted():
    corners = np.stack(np.meshgrid(*zip(WORKSPACE_LOW, WORKSPACE_HIGH, strict=True)), -1).reshape(-1, 3)
    wanted = np.concatenate([corners, np.random.default_rng(0).uniform(WORKSPACE_LOW, WORKSPACE_HIGH, (20, 3))])
    for place, joints in zip(wanted, genesis.joints_at(torch.from_numpy(wanted)).numpy(), strict=True):
        hand = hand_at(joints, genesis.BASE, genesis.BASE_TURN)
        np.testing.assert_allclose((hand @ [*genesis.PINCH, 1])[:3], place, atol=1e-12)
        np.testing.assert_allclose(hand[:3, 2], [0, 0, -1], atol=1e-12)  # it points down
        np.testing.assert_allclose(np.abs(hand[:3, 1]), [1, 0, 0], atol=1e-12)  # the fingers open across the picture
        for joint, limit in zip(joints, _LIMITS, strict=True):
            low, high = limit if isinstance(limit, tuple) else (-limit, limit)
            assert low < joint < high


# -- the environment ---------------------------------------------------------------------------------------------------


def test_it_keeps_the_contract_and_takes_pictures_of_what_moved():
    env = ideal()
    assert len(check_env(env, seed=11)) == 7
    env.reset([0, 1, 2], [0, 1, 2])
    before = env._scene.renders
    env.step(np.zeros((3, 5, 4)))
    env.reset([], [])
    assert env._scene.renders == before + 1
    env.restore([0], env.snapshot([1]))
    assert env._scene.renders == before + 2
    env.close()
    assert env._scene.closed


def test_a_seed_means_the_same_scene_as_in_mujoco():
    env, seeds = ideal(6), np.arange(6)
    with closing(catalog.make("lift", num_envs=6, render=False)) as other:
        here, there = env.reset(seeds, seeds), other.reset(seeds, seeds)
    assert np.array_equal(here.task, there.task)
    np.testing.assert_allclose(here.state, there.state, atol=1e-6)
    for name, value in there.extras.items():
        np.testing.assert_allclose(here.extras[name], value, atol=1e-6)
    opened, closed = (env.step(np.full((6, 1, 4), (0, 0, 0, grip))).obs.state[0, 3] for grip in (-1, 1))
    assert opened == np.float32(2 * FINGER_OPEN) and closed == 0
    few = ideal(1, cubes=2)
    few.reset([0], [3])
    cubes = few.snapshot([0])["rows/qpos"][0, CUBES:].reshape(4, 7)
    assert (cubes[:, 1] == np.float32(AWAY)).sum() == 2  # behind the camera


def test_the_expert_of_mujocos_lift_lifts_the_named_cube():
    env, expert = ideal(4), LiftExpert(1)
    obs = env.reset(np.arange(4), np.arange(4))
    while not (step := env.step(expert.act(obs))).done.all():
        obs = step.obs
    assert step.cause == ("success",) * 4 and step.success.all() and step.terminated.all()
    assert np.array_equal(step.obs.extras["privileged/lifted"], step.obs.task)


def test_an_ended_environment_stays_as_it_is_while_others_move():
    env, expert = ideal(3), LiftExpert(1)
    obs = env.reset(np.arange(3), np.arange(3))
    while not (step := env.step(expert.act(obs) * np.array([1, 0, 0])[:, None, None])).done.any():
        obs = step.obs
    before = env.snapshot([0])
    later = env.step(np.full((3, 3, 4), 0.01))
    assert later.cause == ("success", "", "") and later.valid.tolist() == [[False] * 3, [True] * 3, [True] * 3]
    assert later.success.tolist() == [True, False, False] and not later.reward.any()
    after = env.snapshot([0])
    assert all(np.array_equal(before[name], after[name]) for name in before)


def played(broken_at=None):
    """States of three environments over ten steps, of which the second may diverge at a step; and the last step."""
    env, states = ideal(), []
    env.reset([0, 1, 2], [0, 1, 2])
    for number in range(10):
        if number == broken_at:
            env._scene.broken.add(1)
        step = env.step(np.full((3, 1, 4), 0.01))
        states.append(step.obs.state)
    return np.stack(states), step, env


def test_a_diverged_row_ends_alone_at_its_last_good_state():
    plain, _, _ = played()
    states, step, env = played(broken_at=4)
    assert step.cause == ("", "diverged", "") and step.truncated.tolist() == [False, True, False]
    assert not step.terminated.any() and not step.success.any() and step.obs.time.tolist() == [10, 5, 10]
    assert np.array_equal(states[:, [0, 2]], plain[:, [0, 2]])
    assert np.array_equal(states[4:, 1, :4], np.repeat(plain[3:4, 1, :4], 6, 0))
    assert np.isfinite(np.concatenate([value.ravel() for value in env.snapshot([1]).values()])).all()
    env._scene.broken.clear()
    obs = env.reset([1], [1])
    assert np.allclose(obs.state[1, :3], obs.state[1, 4:7]) and not env.snapshot([1])["rows/vel"].any()  # at rest
    assert env.step(np.zeros((3, 1, 4))).valid.all()
    saved = env.snapshot([1])
    saved["rows/qpos"][0, CUBES] = np.nan
    env.restore([1], saved)
    assert env.step(np.zeros((3, 1, 4))).cause == ("", "diverged", "")


def test_what_diverges_in_mid_chunk_is_not_valid_from_then_on():
    env = ideal()
    env.reset([0, 1, 2], [0, 1, 2])
    real, calls = env._scene.advance, []

    def advance(*given):
        calls.append(env._scene.broken.update({1} if len(calls) == 2 else set()))
        return real(*given)

    env._scene.advance = advance
    step = env.step(np.full((3, 5, 4), 0.01), "all")
    assert step.valid.tolist() == [[True] * 5, [True] * 3 + [False] * 2, [True] * 5]
    assert step.cause == ("", "diverged", "") and step.obs.time.tolist() == [5, 3, 5]
    shown = [frame.state[1, :3] for frame in step.frames]
    assert not np.array_equal(shown[0], shown[1]) and all(np.array_equal(one, shown[1]) for one in shown[1:])
    assert not step.executed[1, 3:].any() and step.executed[1, :3].all()


def test_a_decision_on_a_gpu_waits_once_and_is_the_processors():
    host, seeds = ideal(), np.arange(3)
    rng = np.random.default_rng(0)
    with elsewhere() as device, counted_waits() as waits:
        env = GenesisEnv(LiftTask(), replace(spec(), device="meta"), IdealScene(3, device=device))
        env.reset(seeds, seeds)
        host.reset(seeds, seeds)
        for number in range(4):
            chunk = rng.uniform(-0.03, 0.03, (3, 5, 4)).astype(np.float32)
            if number == 2:
                for one in (env, host):
                    one._scene.broken.add(2)
            given = torch.from_numpy(chunk).to(device)
            waits.clear()
            step = env.step(given)
            told = read_step(step)
            assert told.finite and (not number or waits == {"read": 1})  # constants come to the device once
            expected = host.step(chunk)
            assert step.cause == expected.cause and np.array_equal(told.valid, expected.valid)
            assert np.array_equal(on_host(step.obs.state), expected.obs.state)
            for name, extra in expected.obs.extras.items():
                assert np.array_equal(on_host(step.obs.extras[name]), extra)
    assert step.cause == ("", "", "diverged")
