"""An isolated environment is the environment itself, bit for bit, in other processes; memory, and experts there."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from sims import catalog
from sims import isolated as isolated_module
from sims.base import free_bytes, process_bytes
from sims.catalog import make
from tests.auditing import AuditingPolicy
from tests.worker_pids import worker_pids
from vla_rl.contract.check import check_env, random_actions
from vla_rl.contract.env import Observation, Step
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.experience.collect import collect_demonstrations
from vla_rl.experience.rollout import RolloutSource, SeedStream

TROUBLED = "tests.sims.isolation.troubled:{}"
LIFT = {"image_size": 16, "threads": 1}
VARIED = {
    "friction": {"low": 0.3, "high": 2.0},
    "object_mass": {"values": [1, 3]},
    "camera_x": {"low": -0.05, "high": 0.05},
    "latency": {"low": 0, "high": 3},
    "action_noise": {"low": 0, "high": 0.3},
}
ENVS = {
    "counting": {},
    "point_mass": {},
    "lift": LIFT,
    "randomize": {"env": "lift", "options": LIFT, "parameters": VARIED},
    "isolated": {"env": "counting"},
}


def isolated(env="counting", num_envs=3, **options):
    return closing(make("isolated", num_envs=num_envs, env=env, **options))


def same_observation(one: Observation, other: Observation) -> bool:
    def parts(obs):
        return {**obs.images, **obs.extras, "state": obs.state, "task": obs.task, "time": obs.time}

    left, right = parts(one), parts(other)
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name]) for name in left
    )


def same_step(one: Step, other: Step) -> bool:
    names = ("reward", "valid", "terminated", "truncated", "success", "executed", "intervened")
    arrays = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    frames = len(one.frames) == len(other.frames) and all(map(same_observation, one.frames, other.frames))
    return arrays and frames and tuple(one.cause) == tuple(other.cause) and same_observation(one.obs, other.obs)


def require_equal(far, near, steps):
    """``far`` keeps the contract and equals ``near`` bit for bit, through episodes, frames and a snapshot."""
    assert far.spec == near.spec and len(check_env(far, seed=11)) == 7
    assert same_observation(far.reset([0, 1, 2], [5, 6, 7]), near.reset([0, 1, 2], [5, 6, 7]))
    generator = np.random.default_rng(0)
    for i in range(steps):
        chunk = random_actions(near, min(1 + i % 4, near.spec.max_chunk), generator)
        observe = "all" if i % 3 == 0 else "last"
        other = near.step(chunk, observe=observe)
        assert same_step(far.step(chunk, observe=observe), other)
        ended = np.flatnonzero(other.done)[:2]
        assert same_observation(far.reset(ended, 100 * i + ended), near.reset(ended, 100 * i + ended))
        if i == steps // 2:
            saved = near.snapshot([2, 0]), far.snapshot([2, 0])
    assert same_observation(near.restore([1, 2], saved[0]), far.restore([1, 2], saved[1]))
    assert same_step(far.step(chunk), near.step(chunk)) and far.restarts == far.truncated_by_worker == 0


def require_nothing_lost(env, rollouts=2):
    """The counting environment ``env`` with the policy that knows its rules gives what it gives here."""
    sources = [
        RolloutSource(one, AuditingPolicy(4), 30, SeedStream(0, 500), torch.Generator())
        for one in (env, make("counting", num_envs=5))
    ]
    for _ in range(rollouts):
        rollout, other = (source.next() for source in sources)
        for name in ("reward", "seeds", "truncated", "executed"):
            assert torch.equal(getattr(rollout, name), getattr(other, name)), name


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, workers, marks=[pytest.mark.full] * ((name, workers) != ("counting", 3)))
        for name in ENVS
        for workers in (1, 3)
    ],
)
def test_it_equals_the_environment_here_bit_for_bit(name, workers):
    with isolated(name, options=ENVS[name], workers=workers) as far:
        assert len(far.workers) == workers
        with closing(make(name, num_envs=3, **ENVS[name])) as near:
            require_equal(far, near, 40)


def test_nothing_is_lost_doubled_or_reordered():
    with isolated(num_envs=5, workers=2) as env:
        require_nothing_lost(env)


def test_python_and_variables_of_the_worker_can_be_chosen(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nOF_THE_WORKER="$SEVEN" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with isolated(TROUBLED.format("variable"), 2, python=str(python), variables={"SEVEN": "7"}, workers=8) as env:
        assert env.spec.name == "counting" and [worker.size for worker in env.workers] == [1, 1]
    with pytest.raises(UserError, match="'no/such/python' cannot be started"):
        make("isolated", num_envs=1, env="counting", python="no/such/python")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"env": ""}, "no environment was named to be isolated"),
        ({"env": "cuonting"}, r"no environment is called 'cuonting'.*did you mean 'counting'"),
        ({"env": "counting", "options": {"size": 2}}, "'counting' has no option 'size'"),
        ({"env": TROUBLED.format("unmade")}, "ModuleNotFoundError: no module named 'simulator' for 1"),
        ({"env": "counting", "workers": 0}, "0 workers leave nothing to simulate"),
        ({"env": "counting", "deadline_s": 0.0}, "Deadlines.answer is 0.0, which has no meaning"),
    ],
)
def test_what_cannot_be_made_is_said_at_once(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make("isolated", num_envs=1, **options)


def test_workers_compute_at_the_same_time(tmp_path):
    """No step ends before all have begun."""
    with isolated(TROUBLED.format("meeting"), 2, options={"folder": str(tmp_path), "count": 2}, workers=2) as env:
        env.reset([0, 1], [1, 2])
        assert env.step(np.ones((2, 1, 2))).valid.all() and env.restarts == 0


def test_wrong_arguments_reach_no_worker():
    with isolated() as env:
        env.reset([0, 1, 2], [1, 2, 3])
        with pytest.raises(NonFiniteError, match="environment 1 at control step 0"):
            env.step(np.array([0, np.nan, 0])[:, None, None].repeat(2, 2))
        saved = env.snapshot([0, 1])
        time = "worker/time"
        changed = {name: array[:, None] if name == time else array for name, array in saved.items()}
        for wrong in ({time: saved[time]}, changed):
            with pytest.raises(ContractError, match="nothing was restored"):
                env.restore([0, 1], wrong)
        assert env.step(np.ones((3, 1, 2))).obs.time.tolist() == [1, 1, 1] and env.restarts == 0


def test_workers_end_with_their_environment():
    env = make("isolated", num_envs=4, env="counting", workers=2)
    pids = [worker.link.pid for worker in env.workers]
    env.reset(np.arange(4), np.arange(4))
    env.close()
    env.close()
    with pytest.raises(UserError, match="'counting' was closed, so it has no 'step'"):
        env.step(np.zeros((4, 1, 2)))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.full
def test_memory_and_open_files_stay_flat():
    """Over many steps and replaced workers."""
    with isolated("point_mass", num_envs=4, workers=2) as env:
        env.reset(np.arange(4), np.arange(4))
        chunk = np.zeros((4, 1, env.spec.action_dim), np.float32)
        held = []
        for _ in range(2):
            for _ in range(40):
                step = env.step(chunk)
                env.reset(np.flatnonzero(step.done), np.flatnonzero(step.done))
            env.workers[0].link.kill()
            with pytest.warns(UserWarning, match="SIGKILL"):
                step = env.step(chunk)
            env.reset(np.flatnonzero(step.done), np.flatnonzero(step.done))
            maps = Path("/proc/self/maps").read_text().count("memfd:vla-rl")
            held.append((len(os.listdir("/proc/self/fd")), maps))
        assert env.restarts == 2 and held[-1] == held[0] and held[0][1] > 0, held


# -- memory ------------------------------------------------------------------------------------------------------------


def test_too_many_workers_are_refused_by_what_the_first_takes(monkeypatch):
    monkeypatch.setattr(isolated_module, "process_bytes", lambda pid: 10**8 if pid in worker_pids() else 0)
    monkeypatch.setattr(isolated_module, "free_bytes", lambda: 3 * 10**8)
    sentence = r"^5 worker processes of 100 MB each, for 2 environments each, do not fit the 0\.4 GB .*; 3 fit\.$"
    with pytest.raises(UserError, match=sentence):
        make("isolated", num_envs=10, env="counting", workers=5)
    assert not worker_pids()
    with closing(make("isolated", num_envs=2, env="counting", workers=2)) as env:
        assert env.num_envs == 2 and len(worker_pids()) == 2
    monkeypatch.setattr(isolated_module, "process_bytes", lambda pid: pytest.fail("measured"))
    monkeypatch.setattr(isolated_module, "free_bytes", lambda: 10**12)
    make("isolated", num_envs=1, env="counting").close()


def test_a_process_counts_what_is_its_own():
    before = process_bytes()
    with mmap.mmap(-1, 10**8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:  # no memory that was used before
        block.write(b"1" * 10**8)
        assert 5 * 10**7 < process_bytes() - before < 4 * 10**8
    assert process_bytes() == pytest.approx(process_bytes(os.getpid()), rel=0.1)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert process_bytes() < resident  # without the files that it has mapped
    assert 0 < free_bytes() < 10**14
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for its status
    assert process_bytes(ended.pid) == 0
    ended.wait()


# -- experts in the workers --------------------------------------------------------------------------------------------


BLIND, ACTION = {"render": False, "threads": 1}, "privileged/expert_action"


def test_the_expert_in_the_worker_does_what_it_does_here():
    near, expert = make("lift", num_envs=3, **BLIND), catalog.expert("lift", 1)
    with closing(make("isolated", num_envs=3, env="lift", options=BLIND, workers=2, expert=True)) as far:
        assert far.spec.extras[ACTION].low == near.spec.action.low
        here, there = near.reset([0, 1, 2], [5, 6, 7]), far.reset([0, 1, 2], [5, 6, 7])
        for i in range(20):
            action = expert.act(here)[:, :1]
            clipped = np.clip(action[:, 0], near.spec.action.low, near.spec.action.high)
            assert np.array_equal(there.extras[ACTION], clipped)
            here, step = near.step(action).obs, far.step(action, observe="all" if i % 2 else "last")
            there = step.obs
            assert all(ACTION in frame.extras for frame in step.frames)
        saved = far.snapshot([1])
        other = far.reset([1], [9])
        assert np.array_equal(far.restore([1], saved).extras[ACTION][1], there.extras[ACTION][1])
        assert not np.array_equal(other.extras[ACTION][1], there.extras[ACTION][1])


@pytest.mark.full
def test_demonstrations_are_those_of_the_expert_here():
    near, expert = make("lift", num_envs=2, **BLIND), catalog.expert("lift", 1)
    expected = collect_demonstrations(near, expert.act, [3, 4])
    with closing(make("isolated", num_envs=2, env="lift", options=BLIND, expert=True)) as far:
        found = collect_demonstrations(far, catalog.expert("isolated", 1, env="lift").act, [3, 4])
    assert np.array_equal(found.action, expected.action) and np.array_equal(found.state, expected.state)


def act_blindly():
    catalog.expert("isolated", 1, env="lift").act(make("counting", num_envs=1).reset([0], [0]))


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: make("isolated", num_envs=1, env="counting", expert=True), "'counting' declares no scripted expert"),
        (lambda: catalog.expert("isolated", 4, env="lift"), "knows its next action only, so it cannot plan 4"),
        (act_blindly, "make the isolated environment with expert=True"),
    ],
)
def test_what_no_expert_can_do_is_said(ask, sentence):
    with pytest.raises(UserError, match=sentence):
        ask()
