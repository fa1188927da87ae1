"""What imitation alone is worth is the same, found in this process or in one that works in the background."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.commands import save_untrained
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitation_study import BackgroundStudy, LocalStudy, StudyConfig, imitation_study
from vla_rl.recipes.stages import EvaluationConfig, collect
from vla_rl.recipes.workers import BackgroundJob, worker_processes, workers
from vla_rl.training.fit import FitConfig
from vla_rl.training.imitation import ImitationConfig
from vla_rl.training.tracking import RunFolder


@pytest.fixture
def study(tmp_path, monkeypatch):
    """``study(processes)``: the findings about an untrained policy that imitates two demonstrations for 25 steps."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def findings(processes: int):
        env = EnvConfig("lift", {"deadline": 20})
        evaluation = EvaluationConfig(validation=3, test=1, ablation=4, num_envs=4, processes=processes)
        folder = RunFolder(str(tmp_path / f"run{processes}"), {})
        episodes = collect(EnvConfig("lift"), 2, seed=1)
        save_demonstrations(episodes, folder.path / "demonstrations", video="never")
        for name in ("grounded", "imitation"):
            save_untrained(folder.checkpoint(name), deadline=20)
        config = StudyConfig(env, ImitationConfig(2, fit=FitConfig(25, batch=8)), evaluation, seed=1)
        started = imitation_study(config, folder)
        assert isinstance(started, LocalStudy if processes == 1 else BackgroundStudy)
        with worker_processes(str(folder.path)):
            policy = TinyVLA.from_pretrained(folder.checkpoint("grounded"))
            started.grounded(policy, episodes)
            started.imitated(policy)
            found = started.findings()
            if processes > 1:
                background = workers(1)._background
                assert background is not None and os.getpriority(os.PRIO_PROCESS, background.pid) == 10
                assert len({worker.pid for worker in (*workers(1).all, background)}) == processes + 1
        folder.close()
        return found

    return findings


@pytest.mark.full
def test_the_background_finds_what_this_process_finds(study):
    here, beside = study(1), study(2)
    assert here == beside
    assert list(here.plateau) == ["25", "50"] and here.plateau["25"]["episodes"] == 6
    assert here.perception.normal.episodes == here.perception.swapped_original.episodes == 4


def test_a_background_job_that_has_not_begun_is_done_at_once_when_needed():
    """One that has begun stays where it is."""
    first, second, again = Future(), Future(), []
    first.set_running_or_notify_cancel()
    done = Future()
    done.set_result("done elsewhere")

    def submit() -> Future:
        again.append(True)
        return done

    begun, waiting = BackgroundJob(first, submit), BackgroundJob(second, submit)
    begun.hurry()
    waiting.hurry()
    first.set_result("done in the background")
    assert (begun.result(), waiting.result(), again) == ("done in the background", "done elsewhere", [True])
