"""An isolated environment is the environment itself, bit for bit, in other processes."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.auditing import AuditingPolicy
from vla_rl.contract.check import check_env, random_actions
from vla_rl.contract.env import Observation, Step
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
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


def test_an_action_that_is_not_finite_is_named_with_its_step():
    with isolated("counting", num_envs=2, workers=2) as env:
        env.reset([0, 1], [1, 2])
        chunk = random_actions(env, 1, np.random.default_rng(0))
        env.step(chunk)
        chunk[1] = np.nan
        with pytest.raises(NonFiniteError, match="environment 1 at control step 1"):
            env.step(chunk)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, workers, marks=[pytest.mark.full] * (name != "counting"))
        for name in ENVS
        for workers in (1, 3)
    ],
)
def test_it_keeps_the_contract_and_equals_the_environment_here_bit_for_bit(name, workers):
    with (
        isolated(name, options=ENVS[name], workers=workers) as far,
        closing(make(name, num_envs=3, **ENVS[name])) as near,
    ):
        assert far.spec == near.spec and len(far.workers) == workers
        assert len(check_env(far, seed=11)) == 7
        assert same_observation(far.reset([0, 1, 2], [5, 6, 7]), near.reset([0, 1, 2], [5, 6, 7]))
        generator = np.random.default_rng(0)
        for i in range(40):
            chunk = random_actions(near, min(1 + i % 4, near.spec.max_chunk), generator)
            observe = "all" if i % 3 == 0 else "last"
            one, other = far.step(chunk, observe=observe), near.step(chunk, observe=observe)
            assert same_step(one, other)
            ended = np.flatnonzero(other.done)[:2]
            assert same_observation(far.reset(ended, 100 * i + ended), near.reset(ended, 100 * i + ended))
            if i == 30:
                saved = near.snapshot([2, 0]), far.snapshot([2, 0])
        assert same_observation(near.restore([1, 2], saved[0]), far.restore([1, 2], saved[1]))
        assert same_step(far.step(chunk), near.step(chunk))
        assert far.restarts == far.truncated_by_worker == 0


def test_nothing_is_lost_doubled_or_reordered():
    """The counting environment behind isolation, with the policy that knows its rules."""
    with isolated(num_envs=5, workers=2) as env:
        source = RolloutSource(env, AuditingPolicy(4), 40, SeedStream(0, 500), torch.Generator())
        rollouts = [source.next() for _ in range(3)]
    near = RolloutSource(make("counting", num_envs=5), AuditingPolicy(4), 40, SeedStream(0, 500), torch.Generator())
    for rollout in rollouts:
        other = near.next()
        assert torch.equal(rollout.reward, other.reward) and torch.equal(rollout.seeds, other.seeds)
        assert torch.equal(rollout.truncated, other.truncated) and torch.equal(rollout.executed, other.executed)


def test_what_was_handed_out_stays_as_it_was():
    with isolated(workers=2) as env:
        kept = [env.reset([0, 1, 2], [1, 2, 3])]
        kept += [env.step(np.ones((3, 1, 2))).obs for _ in range(4)]
        assert [obs.time.tolist() for obs in kept] == [[i] * 3 for i in range(5)]
        assert [int(obs.images["audit"][0, 0, 0, 0]) for obs in kept] == list(range(5))


def test_a_chunk_longer_than_any_before_and_all_its_frames_fit():
    with isolated("lift", num_envs=2, options={"image_size": 32, "threads": 1}) as env:
        env.reset([0, 1], [1, 2])
        longest = env.spec.max_chunk
        short = env.step(np.zeros((2, 1, 4)))
        step = env.step(np.zeros((2, min(longest, 20), 4)), observe="all")
        assert len(step.frames) == min(longest, 20) and short.obs.time.tolist() == [1, 1]


def test_the_worker_imports_the_contract_and_the_simulator_only():
    with isolated(TROUBLED.format("torch_free")) as env:
        assert env.num_envs == 3


def test_python_and_environment_variables_of_the_worker_can_be_chosen(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nOF_THE_WORKER="$SEVEN" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with isolated(TROUBLED.format("variable"), python=str(python), variables={"SEVEN": "7"}) as env:
        assert env.spec.name == "counting"
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


def test_there_is_at_most_one_worker_for_each_environment():
    with isolated(num_envs=2, workers=8) as env:
        assert [worker.size for worker in env.workers] == [1, 1]


def test_workers_compute_at_the_same_time(tmp_path):
    """No step ends before all have begun."""
    with isolated(TROUBLED.format("meeting"), 3, options={"folder": str(tmp_path), "count": 3}, workers=3) as env:
        env.reset([0, 1, 2], [1, 2, 3])
        assert env.step(np.ones((3, 1, 2))).valid.all() and env.restarts == 0


def test_wrong_arguments_reach_no_worker():
    with isolated(workers=3) as env:
        env.reset([0, 1, 2], [1, 2, 3])
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


def test_memory_and_open_files_stay_flat():
    """Over many steps and three replaced workers."""
    with isolated("point_mass", num_envs=4, workers=2) as env:
        env.reset(np.arange(4), np.arange(4))
        chunk = np.zeros((4, 1, env.spec.action_dim), np.float32)
        held = []
        for _ in range(3):
            for _ in range(40):
                step = env.step(chunk)
                env.reset(np.flatnonzero(step.done), np.flatnonzero(step.done))
            env.workers[0].link.kill()
            with pytest.warns(UserWarning, match="SIGKILL"):
                step = env.step(chunk)
            env.reset(np.flatnonzero(step.done), np.flatnonzero(step.done))
            maps = Path("/proc/self/maps").read_text().count("memfd:vla-rl")
            held.append((len(os.listdir("/proc/self/fd")), maps))
        assert env.restarts == 3 and held[-1] == held[0] and held[0][1] > 0, held
