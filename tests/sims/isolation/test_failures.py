"""Workers that are killed, hang, fail or return nonsense: their episodes are truncated, and nobody else notices."""

from __future__ import annotations

import copy
import itertools
import os
import select
import signal
import time
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sims.catalog import make
from sims.isolation import supervised
from sims.isolation.supervised import LocalWorker
from sims.toy.counting import episode_length
from tests.patience import PATIENCE
from tests.sims.isolation.test_isolated import same_observation, same_step
from vla_rl.contract.check import check_env
from vla_rl.contract.errors import ContractError, UserError

TROUBLED = "tests.sims.isolation.troubled:{}"
LONG = [seed for seed in range(100) if episode_length(np.array(seed)) > 20]  # seeds of long episodes
UNTIL = {"killed": 60.0, "failing": 60.0, "nan": 60.0, "hung": 6.0}  # seconds to wait for an answer
SAYS = {
    "killed": "was killed by SIGKILL",
    "hung": "did not answer in time",
    "failing": "RuntimeError: the joint came off",
    "nan": "that is not finite",
}
pytestmark = pytest.mark.filterwarnings("ignore:worker process:UserWarning")


@pytest.fixture
def impatient(monkeypatch, tmp_path):
    """A worker that hangs is out of time as soon as it does; everybody else has the usual time."""
    receive = LocalWorker.receive

    def receive_or_give_up(worker, deadline):
        while not select.select([worker], [], [], 0.01)[0]:
            if hangs(worker.pid, tmp_path):
                return receive(worker, time.monotonic())
        return receive(worker, deadline)

    monkeypatch.setattr(LocalWorker, "receive", receive_or_give_up)
    monkeypatch.setitem(UNTIL, "hung", 60.0)


def hangs(pid, folder):
    said, state = folder / str(pid), Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T" and said.exists() and said.read_text() == "hung"


def troubled(folder, method, trouble, num_envs=4, workers=2, **options):
    options = {"method": method, "trouble": trouble, "folder": str(folder), **options}
    given = {"env": TROUBLED.format("make"), "options": options, "deadline_s": UNTIL[trouble]}
    return closing(make("isolated", num_envs=num_envs, workers=workers, **given))


def chunk(env, horizon=1):
    return np.ones((env.num_envs, horizon, 2), np.float32)


@pytest.mark.parametrize("trouble", ["killed", "hung", pytest.param("failing", marks=pytest.mark.full), "nan"])
def test_a_failed_step_truncates_its_workers_episodes_alone(trouble, tmp_path):
    with troubled(tmp_path, "step", trouble, seed=LONG[2], times=1) as env:
        env.reset(range(4), LONG[:4])
        with pytest.warns(UserWarning, match=SAYS[trouble]) as caught:
            step = env.step(chunk(env, 2), observe="all")
        (said,) = (str(one.message) for one in caught)
        assert all(text in said for text in ("the last words step", "environments 2 to 3", "'step'"))
        assert step.truncated.tolist() == [False, False, True, True] and not step.terminated.any()
        assert step.cause == ("", "", "worker", "worker")
        assert step.valid.tolist() == [[True, True], [True, True], [False, False], [False, False]]
        assert step.obs.time.tolist() == [2, 2, 0, 0] and step.obs.state[:, 0].tolist() == LONG[:4]
        assert not step.reward[2:].any() and not step.executed[2:].any() and not step.success.any()
        assert [frame.time.tolist() for frame in step.frames] == [[1, 1, 0, 0], [2, 2, 0, 0]]
        assert (env.restarts, env.truncated_by_worker) == (1, 2)

        idle = env.step(chunk(env))  # the new worker has no episode: it is not asked
        assert idle.obs.time.tolist() == [3, 3, 0, 0] and idle.cause == step.cause
        obs = env.reset([3], [LONG[5]])
        assert obs.state[:, 0].tolist() == [*LONG[:3], LONG[5]] and obs.time.tolist() == [3, 3, 0, 0]
        with_nan = chunk(env)
        with_nan[2] = np.nan  # an environment that idles
        later = env.step(with_nan)
        assert later.valid[:, 0].tolist() == [True, True, False, True] and later.obs.time.tolist() == [4, 4, 0, 1]
        assert later.cause == ("", "", "worker", "") and later.truncated.tolist() == [False, False, True, False]
        assert later.executed[2].tolist() == [[0, 0]] and later.reward[2].tolist() == [0]
        assert env.reset([2], [LONG[2]]).time.tolist() == [4, 4, 0, 1]
        assert env.step(chunk(env)).obs.time.tolist() == [5, 5, 1, 2]
        assert env.restarts == 1


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("trouble", ["killed", pytest.param("nan", marks=pytest.mark.full)])
def test_a_failed_reset_is_tried_again_and_neighbours_truncated(trouble, tmp_path):
    with troubled(tmp_path, "reset", trouble, seed=LONG[6], times=1) as env:
        env.reset(range(4), LONG[:4])
        env.step(chunk(env))
        with pytest.warns(UserWarning, match=SAYS[trouble]):
            obs = env.reset([2], [LONG[6]])
        assert obs.state[:, 0].tolist() == [*LONG[:2], LONG[6], LONG[3]] and obs.time.tolist() == [1, 1, 0, 1]
        step = env.step(chunk(env))
        assert step.cause == ("", "", "", "worker") and step.valid[:, 0].tolist() == [True, True, True, False]
        assert step.obs.time.tolist() == [2, 2, 1, 1]
        assert (env.restarts, env.truncated_by_worker) == (1, 1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("trouble", ["killed", pytest.param("hung", marks=pytest.mark.full)])
def test_a_snapshot_that_fails_is_taken_of_the_new_worker(trouble, tmp_path):
    """The episodes that were lost are in it as truncated ones, and come back as such."""
    with troubled(tmp_path, "snapshot", trouble, seed=LONG[2], times=1) as env:
        env.reset(range(4), LONG[:4])
        env.step(chunk(env, 3))
        with pytest.warns(UserWarning, match=SAYS[trouble]):
            saved = env.snapshot(range(4))
        first = env.step(chunk(env, 2))
        assert first.cause == ("", "", "worker", "worker") and first.obs.time.tolist() == [5, 5, 3, 3]
        env.reset(range(4), LONG[4:8])
        obs = env.restore(range(4), saved)
        assert obs.time.tolist() == [3, 3, 3, 3] and obs.state[:, 0].tolist() == LONG[:4]
        again = env.step(chunk(env, 2))
        assert same_observation(first.obs, again.obs) and again.cause == first.cause
        assert np.array_equal(first.valid, again.valid) and np.array_equal(first.reward, again.reward)
        assert np.array_equal(first.truncated, again.truncated)


def test_a_saved_lost_episode_shows_what_was_seen_last_of_it():
    def lost(env):
        os.kill(env.workers[1].link.pid, signal.SIGKILL)
        with pytest.warns(UserWarning, match="another one is started"):
            return env.step(chunk(env)).obs

    with closing(make("isolated", num_envs=2, env="counting", workers=2)) as env:
        env.reset([0, 1], LONG[:2])
        env.step(chunk(env))
        first = lost(env)
        saved = env.snapshot([0, 1])
        env.reset([0, 1], LONG[2:4])
        assert lost(env).state[1, 0] == LONG[3]
        assert same_observation(env.restore([0, 1], saved), first)
        assert first.state[:, 0].tolist() == LONG[:2] and first.time.tolist() == [2, 1]


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_a_restore_that_fails_is_tried_again(tmp_path):
    with troubled(tmp_path, "restore", "killed", times=1) as env:
        env.reset(range(4), LONG[:4])
        env.step(chunk(env, 3))
        saved = env.snapshot([0, 1])
        with pytest.warns(UserWarning, match=SAYS["killed"]):
            obs = env.restore([2, 1], saved)
        assert env.restarts >= 1 and obs.time.tolist()[1:3] == [3, 3] and obs.state[[2, 1], 0].tolist() == LONG[:2]
        assert env.step(chunk(env)).valid[[1, 2]].all()


@pytest.mark.parametrize("trouble", ["killed", pytest.param("hung", marks=pytest.mark.full)])
def test_a_worker_that_dies_while_it_makes_its_env_is_replaced(trouble, tmp_path):
    options = {"method": "make", "trouble": trouble, "folder": str(tmp_path), "times": 1}
    limit = 60.0 if trouble == "killed" else 8.0
    with pytest.warns(UserWarning, match=rf"{SAYS[trouble]} during 'make'(.|\n)*the last words make"):
        env = make("isolated", num_envs=2, env=TROUBLED.format("make"), options=options, start_deadline_s=limit)
    with closing(env):
        assert env.restarts >= 1 and env.reset([0, 1], LONG[:2]).time.tolist() == [0, 0]


FULL = (pytest.param(what, marks=pytest.mark.full) for what in ("task", "cameras"))


@pytest.mark.parametrize("what", ["dtype", "ends", *FULL])
def test_a_step_that_breaks_its_own_spec_is_no_step(what):
    env = make("isolated", num_envs=2, env=TROUBLED.format("lying"), options={"what": what})
    with closing(env):
        env.reset([0, 1], LONG[:2])
        with pytest.warns(UserWarning, match=r"broke its own spec|so experience from it would be wrong"):
            step = env.step(chunk(env))
        assert step.cause == ("worker", "worker") and step.obs.time.tolist() == [0, 0] and not step.valid.any()


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(supervised, "LIMIT", 2)
    return 2


def test_a_worker_that_fails_again_and_again_ends_the_run(tmp_path, limit):
    with troubled(tmp_path, "step", "failing", num_envs=1, times=99) as env:
        for _ in range(limit - 1):
            env.reset([0], [LONG[0]])
            assert env.step(chunk(env)).cause == ("worker",)
        env.reset([0], [LONG[0]])
        with pytest.raises(UserError, match=rf"the {limit}th failure in a row(.|\n)*the last words step"):
            env.step(chunk(env))


@pytest.mark.full
def test_failures_with_completed_steps_in_between_do_not_add_up(tmp_path, limit):
    with troubled(tmp_path, "step", "killed", num_envs=1, seed=LONG[0], times=99) as env:
        for _ in range(limit + 1):
            env.reset([0], [LONG[1]])
            assert env.step(chunk(env)).valid.all()
            env.reset([0], [LONG[0]])
            assert env.step(chunk(env)).cause == ("worker",)
        assert env.restarts == env.truncated_by_worker == limit + 1


def test_an_end_before_the_failure_stays_what_it_was(tmp_path):
    even = next(seed for seed in range(0, 100, 2) if episode_length(np.array(seed)) == 3)
    with troubled(tmp_path, "step", "killed", num_envs=2, workers=1) as env:
        (tmp_path / "not yet").touch()
        env.reset([0, 1], [even, LONG[0]])
        ended = env.step(chunk(env, 4))
        assert ended.cause == ("success", "")
        (tmp_path / "not yet").unlink()
        step = env.step(chunk(env))
        assert step.cause == ("success", "worker") and step.terminated.tolist() == [True, False]
        assert step.success.tolist() == [True, False] and env.truncated_by_worker == 1
        assert step.obs.time.tolist() == [3, 4]


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.full), 1])
def test_an_interrupted_environment_goes_on_with_a_new_worker(number, monkeypatch):
    """The answer to the request that was interrupted is never taken for the answer to the next one.

    Not even if it has arrived and the worker, which is busy or stuck, does not die at once.
    """
    monkeypatch.setattr(LocalWorker, "kill", lambda worker: None)

    def interrupt(*args):
        assert answered(env.workers[number:])
        raise KeyboardInterrupt

    env = make("isolated", num_envs=2, env="counting", workers=2)
    with closing(env):
        env.reset([0, 1], LONG[:2])
        receive, env.workers[number].receive = env.workers[number].receive, interrupt
        with pytest.raises(KeyboardInterrupt):
            env.step(chunk(env))
        env.workers[number].receive = receive
        step = env.step(chunk(env))
        assert step.cause == ("worker", "worker") and not step.valid.any()
        assert step.obs.time.tolist() == [number, 0], "the last observations that arrived"
        env.reset([0, 1], LONG[:2])
        assert env.step(chunk(env)).obs.time.tolist() == [1, 1]


def answered(workers):
    """Whether all ``workers`` have answered, after waiting for them."""
    return all(select.select([worker.link], [], [], PATIENCE)[0] for worker in workers)


def test_a_step_that_nobody_waits_for_ends_with_the_next_call():
    with closing(make("isolated", num_envs=2, env="counting", workers=2)) as env:
        env.reset([0, 1], LONG[:2])
        env.step_async(chunk(env))
        assert env.step_wait().obs.time.tolist() == [1, 1] and env.restarts == 0
        env.step_async(chunk(env, 2))
        assert answered(env.workers)
        with pytest.warns(UserWarning, match="was interrupted during 'reset'"):
            obs = env.reset([0], LONG[2:3])
        assert obs.state[:, 0].tolist() == [LONG[2], LONG[1]] and obs.time.tolist() == [0, 1]
        with pytest.raises(ContractError, match=r"no step was begun.*call step_async first"):
            env.step_wait()
        step = env.step(chunk(env))
        assert step.obs.time.tolist() == [1, 1] and step.cause == ("", "worker") and env.restarts == 2


@pytest.mark.full
def test_a_new_worker_draws_what_its_seeds_had_in_the_one_before():
    varied = {"latency": {"low": 0, "high": 6}, "action_noise": {"low": 0, "high": 0.5}}
    options = {"env": "point_mass", "parameters": varied}
    with closing(make("isolated", num_envs=2, env="randomize", options=options, workers=2)) as env:

        def episode():
            first = env.reset([0, 1], [5, 6])
            return [first, *(env.step(chunk(env, 2) / 50).obs for _ in range(3))]

        whole = episode()
        os.kill(env.workers[1].link.pid, signal.SIGKILL)
        lost = env.step(chunk(env))
        assert lost.cause == ("", "worker")
        assert all(np.array_equal(extra, whole[0].extras[name]) for name, extra in lost.obs.extras.items())
        assert all(map(same_observation, whole, episode())) and env.restarts == 1


def test_the_last_observation_survives_snapshots():
    """They are answers as well, and an answer takes the memory of the one before the last."""
    env = make("isolated", num_envs=16, env="counting")
    with closing(env):
        env.reset(range(16), LONG[:16])
        seen = copy.deepcopy(env.step(chunk(env)).obs)
        for _ in range(3):
            env.snapshot(range(16))
        assert env.reset([], []).state[:, 0].tolist() == LONG[:16]
        os.kill(env.workers[0].link.pid, signal.SIGKILL)
        assert same_observation(env.step(chunk(env)).obs, seen) and seen.time.tolist() == [1] * 16
        assert len(check_env(env, seed=11)) == 7 and env.restarts == 1


# -- workers that are replaced before what they leak ends them ---------------------------------------------------------


ONES = np.ones((2, 1, 2), np.float32)


def recycled():
    return make("isolated", num_envs=2, env="counting", recycle_steps=8)


def test_a_worker_is_replaced_between_episodes():
    pids = []
    with closing(recycled()) as far, closing(make("counting", num_envs=2)) as near, warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in range(5):
            seeds = LONG[start : start + 2]
            assert same_observation(far.reset([0, 1], seeds), near.reset([0, 1], seeds))
            pids.append(far.workers[0].link.pid)
            for _ in range(3):
                assert same_step(far.step(ONES), near.step(ONES))
        assert far.restarts == far.truncated_by_worker == 0
    assert [one == other for one, other in itertools.pairwise(pids)] == [True, False, True, False]


@pytest.mark.full
def test_it_waits_for_a_running_episode_but_not_for_ever():
    with closing(recycled()) as env:
        env.reset([0, 1], LONG[:2])
        first = env.workers[0].link.pid
        for _ in range(4):
            env.step(ONES)
        env.reset([0], LONG[2:3])
        assert env.workers[0].link.pid == first
        before = env.step(ONES)
        assert before.cause == ("", "")
        obs = env.reset([0], LONG[3:4])
        assert env.workers[0].link.pid != first and obs.state[0, 0] == LONG[3]
        assert obs.time.tolist() == [0, 5] and obs.state[1].tolist() == before.obs.state[1].tolist()
        step = env.step(ONES)
        assert step.cause == ("", "worker") and step.valid[:, 0].tolist() == [True, False]
        assert env.truncated_by_worker == 1
