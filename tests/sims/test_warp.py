"""The tabletop on MuJoCo-Warp.  Its kernels are compiled once per machine, so all that runs them is in this file."""

from __future__ import annotations

import copy
import sys
from functools import lru_cache

import mujoco
import mujoco_warp
import numpy as np
import pytest
import torch
import warp

from sims import catalog
from sims.catalog import make, spec_of
from sims.mujoco.scene import CUBES_QPOS
from sims.mujoco.tabletop import HOLD_STEPS
from sims.mujoco.tasks.lift import LiftExpert
from sims.warp_env import compile_kernels
from tests.elsewhere import ELSEWHERE, _Away, elsewhere
from tests.sims.test_conformance import CHECKS
from tests.simulators.warp_experts import HORIZONS, compare
from tests.waiting import counted_waits
from vla_rl.contract.env import on_host
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.tracker import read_step
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies import normalization
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy

ENVS = np.arange(3)


@pytest.fixture(scope="module")
def pair():
    """Three environments of the task of three kinds, on Warp and on MuJoCo."""
    options = {"image_size": 24, "cameras": ("front", "top")}
    pair = make("warp", num_envs=3, env="mixed", **options), make("mixed", num_envs=3, **options)
    yield pair
    for env in pair:
        env.close()


@pytest.fixture(scope="module")
def lift():
    return make("warp", num_envs=3, render=False, deadline=25)


@pytest.fixture
def env(lift):
    """As if it were new; a new one would be recorded anew."""
    lift._book.seed[:] = -1
    return lift


@pytest.mark.timeout(240)  # the kernels are compiled here
@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_the_contract(env, check):
    check(env)


def test_the_spec_is_that_of_the_task_and_needs_no_environment(lift):
    options = {"render": False, "deadline": 25}
    ours, theirs = spec_of("warp", **options), spec_of("lift", **options)
    assert ours == lift.spec == theirs
    assert spec_of("warp", device="cuda").device == "cuda" and spec_of("warp", device="cuda").profile == "tolerant"
    assert isinstance(catalog.expert("warp", 1), LiftExpert)
    assert catalog.swapped_options("warp", device="cuda", **options) == {"instruct": "distractor"}


def test_an_untouched_episode_is_that_of_mujoco_within_1e_4(pair):
    ours, theirs = pair
    seeds = np.array([4, 5, 1])
    a, b = ours.reset(ENVS, seeds), theirs.reset(ENVS, seeds)
    assert np.array_equal(a.task, b.task) and len({ours.spec.family(task) for task in a.task}) > 1
    assert np.allclose(a.state, b.state, atol=1e-6)
    rng = np.random.default_rng(0)
    for horizon in (10,) * 5:
        chunk = rng.uniform(-0.03, 0.03, (3, horizon, 4)).astype(np.float32)
        chunk[..., 2] = np.abs(chunk[..., 2])  # up, where nothing is
        one, other = ours.step(chunk), theirs.step(chunk)
        assert one.valid.all() and np.array_equal(one.executed, other.executed)
        assert np.allclose(one.obs.state, other.obs.state, atol=1e-4, rtol=0)
        for name, extra in other.obs.extras.items():
            assert np.allclose(one.obs.extras[name], extra, atol=1e-4, rtol=0), name


def test_pictures_show_what_mujoco_shows(pair):
    ours, theirs = pair
    for seeds in (ENVS, ENVS + 3):
        a, b = ours.reset(ENVS, seeds), theirs.reset(ENVS, seeds)
        for camera in ("front", "top"):
            apart = np.abs(a.images[camera].astype(int) - b.images[camera].astype(int))
            assert apart.mean() < 2 and (apart.max(-1) > 40).mean() < 0.02, camera
    assert ours.render_rows([2, 0], 32, "side").shape == (2, 32, 32, 3)


def test_the_expert_lifts_the_same_cubes_at_the_same_time(lift):
    theirs = make("lift", num_envs=3, render=False, deadline=25)
    ends = []
    for env in (lift, theirs):
        obs, expert = env.reset(ENVS, np.array([11, 12, 14])), LiftExpert()
        for _ in range(5):
            step = env.step(expert.act(obs))
            obs = step.obs
        assert step.success.all() and step.cause == ("success",) * 3 and np.array_equal(step.success, step.terminated)
        ends.append(step)
    assert np.abs(ends[0].obs.time - ends[1].obs.time).max() <= 1
    assert np.allclose(ends[0].obs.extras["privileged/target"], ends[1].obs.extras["privileged/target"], atol=5e-3)
    still = lift.step(np.full((3, 1, 4), 0.03, np.float32))
    assert np.array_equal(still.obs.state, ends[0].obs.state) and not still.valid.any() and not still.reward.any()
    lift.reset([1], [15])
    beside = lift.step(np.full((3, 2, 4), 0.03, np.float32))  # the others stay while one moves
    assert np.array_equal(beside.obs.state[[0, 2]], ends[0].obs.state[[0, 2]])
    assert beside.valid.sum(1).tolist() == [0, 2, 0]


@pytest.mark.full
@pytest.mark.parametrize("task", HORIZONS)
def test_experts_succeed_as_often_as_on_mujoco(task):
    on_mujoco, on_warp = compare(task, 300)
    assert abs(on_mujoco.mean() - on_warp.mean()) <= 0.03


def test_a_world_that_diverges_or_lacks_room_ends_alone(lift, monkeypatch):
    before = lift.reset(ENVS, ENVS)
    saved = lift.snapshot([0])
    saved["physics/qvel"][0, 0] = np.inf
    saved["task_state/held"][0] = HOLD_STEPS  # else a success
    saved["physics/qpos"][0, CUBES_QPOS + 7 * np.arange(3) + 2] = 0.1
    lift.restore([0], saved)
    step = lift.step(np.zeros((3, 2, 4), np.float32))
    assert step.cause == ("diverged", "", "") and step.truncated.tolist() == [True, False, False]
    assert step.valid.sum(1).tolist() == [1, 2, 2] and not step.reward.any() and not step.success.any()
    assert np.array_equal(step.obs.state[0], before.state[0])
    worlds, simulate = lift._worlds, lift._worlds.step

    def without_room():
        simulate()
        worlds._overflow[1] = 1

    monkeypatch.setattr(worlds, "step", without_room)
    assert lift.step(np.zeros((3, 1, 4), np.float32)).cause == ("diverged", "diverged", "")


def test_all_kernels_of_a_step_are_compiled_before_it_and_nothing_is_launched_for_that(lift, monkeypatch, caplog):
    worlds, compiled, launched = lift._worlds, [], []
    monkeypatch.setattr(warp, "force_load", lambda device, modules, block: compiled.append((modules[0], block)))
    for name in ("launch", "launch_tiled"):
        launch = getattr(warp, name)

        def recorded(kernel, dim, launch=launch, **options):
            if np.prod(dim):
                launched.append((kernel.module, options.get("block_dim")))
            launch(kernel, dim=dim, **options)

        monkeypatch.setattr(warp, name, recorded)
    before = worlds.qpos.clone()
    with caplog.at_level("INFO", "sims"):
        compile_kernels("physics", lambda: mujoco_warp.step(worlds.model, worlds.data))
    assert torch.equal(worlds.qpos, before) and not launched
    assert caplog.messages[-1] == f"{len(compiled)} of {len(compiled)} kernels for physics"
    mujoco_warp.step(worlds.model, worlds.data)
    assert len(set(launched)) > 30 and set(launched) <= set(compiled)


# -- what differs between episodes -------------------------------------------------------------------------------------

VARIED = {"object_yaw": [0.3, 0.0, -0.5], "gripper_x": [0.05, 0.0, -0.02], "object_hue": [0.3, 0.0, -0.2]}
VARIED |= {"object_saturation": [0.5, 1.0, 1.2], "object_mass": [4.0, 1.0, 0.5], "friction": [0.7, 1.0, 1.5]}


def test_masses_and_friction_are_those_of_mujoco_in_every_world(pair):
    ours, theirs = pair
    parameters = {name: np.array(values) for name, values in VARIED.items()}
    ours.reset(ENVS, ENVS, parameters)
    for row in ENVS:
        model = copy.copy(theirs.task.model)
        cubes = list(theirs.task.movable)
        model.body_mass[cubes] *= parameters["object_mass"][row]
        model.body_inertia[cubes] *= parameters["object_mass"][row]
        model.geom_friction *= parameters["friction"][row]
        mujoco.mj_setConst(model, mujoco.MjData(model))
        for name in ("body_mass", "body_inertia", "body_invweight0", "dof_invweight0", "geom_friction"):
            field = getattr(ours._worlds.model, name).numpy()[row]
            assert np.allclose(field, getattr(model, name), rtol=1e-5), name
        subtree = ours._worlds.model.body_subtreemass.numpy()[row]
        assert np.allclose(subtree[cubes], model.body_subtreemass[cubes], rtol=1e-5)


def test_varied_episodes_are_mujocos_and_go_on_after_a_restore(pair):
    ours, theirs = pair
    parameters = {name: np.array(values) for name, values in VARIED.items()}
    a, b = ours.reset(ENVS, ENVS, parameters), theirs.reset(ENVS, ENVS, parameters)
    assert np.allclose(a.state, b.state, atol=1e-6)
    assert np.abs(a.images["front"].astype(int) - b.images["front"].astype(int)).mean() < 2
    saved, chunk = ours.snapshot(ENVS), np.tile(np.array([0.004, 0.0, 0.01, 1.0], np.float32), (3, 10, 1))
    one, other = ours.step(chunk), theirs.step(chunk)
    assert np.allclose(one.obs.state, other.obs.state, atol=1e-4)
    nominal = ours.reset(ENVS, ENVS)
    assert not np.array_equal(nominal.images["front"][0], a.images["front"][0])
    restored = ours.restore(ENVS, saved)
    assert np.array_equal(restored.images["front"], a.images["front"])
    again = ours.step(chunk)
    assert np.array_equal(again.obs.state, one.obs.state)
    assert all(np.array_equal(again.obs.extras[name], extra) for name, extra in one.obs.extras.items())


# -- what cannot be made -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"env": "counting"}, r"'counting' has no MuJoCo model.*give lift, place"),
        ({"num_envs": 0}, "num_envs=0 is less than 1"),
        ({"device": "cuda"}, r"no NVIDIA driver.*nvidia-smi"),
        ({"device": "meta"}, "meta.*give 'cpu' or 'cuda'"),
        ({"device": "gpu"}, "gpu.*give 'cpu' or 'cuda'"),
        ({"num_envs": 8}, r"^8 environments of 0\.\d+ MB each do not fit the 0\.0 GB.*; [1-7] fit\.$"),
    ],
)
def test_what_cannot_be_made_is_refused(options, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sims.base.free_bytes", lambda device: 3 * 10**5)
    with pytest.raises(UserError, match=sentence):
        make("warp", **{"num_envs": 1, **({} if "env" in options else {"render": False}), **options})


def test_without_the_package_the_error_names_the_command(monkeypatch):
    monkeypatch.delitem(sys.modules, "sims.warp_env")
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(UserError, match=r"mujoco_warp is not installed.*pip install 'vla-rl\[warp\]'"):
        make("warp", num_envs=1, render=False)


# -- what the host waits for, on a device that is not the host ---------------------------------------------------------


@pytest.fixture
def there(monkeypatch):
    """Three environments on the device, and what the host waits for."""
    from sims.warp_env import Worlds  # compiles at once, which only this file's process needs

    class WorldsThere:
        """The worlds of MuJoCo-Warp, whose tensors pretend to be on the device."""

        def __init__(self, model, num_envs, device, substeps, pixels=0):
            self._worlds, self.num_envs, self.device = (
                Worlds(model, num_envs, "cpu", substeps, pixels),
                num_envs,
                ELSEWHERE,
            )
            for name in ("qpos", "qvel", "qacc_warmstart", "ctrl", "_overflow"):
                setattr(self, name, _Away(getattr(self._worlds, name)))
            self._start = tuple(item.clone() for item in self.state())
            self.step = self._worlds.step

        state, put_back, begin, sound = Worlds.state, Worlds.put_back, Worlds.begin, Worlds.sound

    monkeypatch.setattr("sims.warp_env.Worlds", WorldsThere)
    monkeypatch.setattr(normalization, "_constants", lru_cache(normalization._make_constants))  # as on a real device
    with elsewhere(), counted_waits() as waits:
        yield make("warp", num_envs=3, device="meta", render=False, deadline=25), waits


def test_a_decision_waits_once_and_launches_a_graph_an_action(there, monkeypatch):
    (env, waits), launch, launched = there, warp.capture_launch, []
    monkeypatch.setattr(warp, "capture_launch", lambda graph: (launched.append(graph), launch(graph)))
    torch.manual_seed(0)
    policy = GaussianPolicy(env.spec, config=GaussianConfig(horizon=5, width=8)).to(ELSEWHERE)
    source = RolloutSource(env, policy, 9, SeedStream(0, 99), torch.Generator().manual_seed(0))
    source.start()
    source._keep(source.driver.step(), source._window)  # constants come to the device once
    ended = 0
    for _ in range(6):
        waits.clear(), launched.clear()
        decision = source.driver.step()
        source._keep(decision, source._window)  # begins the next episodes
        ended += int(decision.host.done.sum())
        assert waits == {"read": 1} and len(launched) == 5
    assert ended == 3


@pytest.mark.full
def test_on_the_device_an_episode_is_that_on_the_host(there, lift):
    env, _ = there
    rng, seeds = np.random.default_rng(0), np.array([4, 5, 6])
    ours, theirs = env.reset(ENVS, seeds), lift.reset(ENVS, seeds)
    for horizon in (1, 4, 12, 9):  # the episodes end within the last
        assert np.array_equal(on_host(ours.state), theirs.state) and np.array_equal(on_host(ours.time), theirs.time)
        chunk = rng.uniform(-0.03, 0.03, (3, horizon, 4)).astype(np.float32)
        one, other = env.step(torch.from_numpy(chunk).to(ELSEWHERE)), lift.step(chunk)
        for name in ("reward", "valid", "terminated", "truncated", "success", "executed", "intervened"):
            assert getattr(one, name).device == ELSEWHERE
            assert np.array_equal(on_host(getattr(one, name)), getattr(other, name)), name
        told = read_step(one)
        assert np.array_equal(told.valid, other.valid) and np.array_equal(told.done, other.done)
        assert one.cause == other.cause
        ours, theirs = one.obs, other.obs
    assert other.terminated.all() and one.cause == ("too_late",) * 3
    env.reset(ENVS, ENVS)  # an action that is not finite moves nothing
    chunk = torch.full((3, 3, 4), 0.02).to(ELSEWHERE)
    env.step(chunk)
    before = {name: on_host(item).copy() for name, item in env.snapshot(ENVS).items()}
    chunk[1, 2, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"action\[1,2,0\] is nan \(environment 1 at control step 5\)"):
        env.step(chunk)
    assert all(np.array_equal(before[name], on_host(item)) for name, item in env.snapshot(ENVS).items())
