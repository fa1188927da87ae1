"""Stages that are alone compute on every core, all others with one thread; whoever sets OMP_NUM_THREADS decides."""

from __future__ import annotations

import os

import pytest
import torch

from vla_rl.cli import choose_threads
from vla_rl.policies.tiny import TinyVLA
from vla_rl.recipes import imitate
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.training.device import ALONE, alone, shared
from vla_rl.training.fit import GroundingConfig, ImitationConfig


@pytest.fixture
def environment(monkeypatch):
    for name in ("OMP_NUM_THREADS", ALONE):
        monkeypatch.delenv(name, raising=False)
    yield os.environ
    for name in ("OMP_NUM_THREADS", ALONE):
        os.environ.pop(name, None)


def test_the_command_line_takes_one_thread_and_every_core_where_a_stage_is_alone(environment, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 5})
    choose_threads()
    assert environment["OMP_NUM_THREADS"] == "1" and environment[ALONE] == "3"


def test_a_given_number_of_threads_is_kept_everywhere(environment):
    environment["OMP_NUM_THREADS"] = "4"
    choose_threads()
    assert environment["OMP_NUM_THREADS"] == "4" and ALONE not in environment
    before = torch.get_num_threads()
    with alone():
        assert torch.get_num_threads() == before


def test_threads_are_given_back_whatever_happens(environment):
    environment[ALONE], before = "3", torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), alone():
        assert torch.get_num_threads() == 3
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_a_stage_that_other_processes_run_beside_has_one_thread(environment):
    environment[ALONE], before = "3", torch.get_num_threads()
    with shared(), alone():
        assert torch.get_num_threads() == 1
    with alone():
        assert torch.get_num_threads() == 3
    del environment[ALONE]
    with shared():
        pass
    assert ALONE not in environment and torch.get_num_threads() == before


@pytest.mark.parametrize("stage", ["ground", "imitate"])
def test_supervised_stages_are_alone(stage, environment, monkeypatch, untrained):
    env, threads = EnvConfig("lift"), []
    episodes = imitate.collect(env, 2, seed=1)
    environment[ALONE] = "2"
    monkeypatch.setattr(imitate, stage, lambda *arguments: threads.append(torch.get_num_threads()))
    if stage == "ground":
        imitate.grounded_policy(env, episodes, imitate.NewTiny(width=32, blocks=1), GroundingConfig(scenes=4), 1)
    else:
        imitate.imitate_policy(TinyVLA.from_pretrained(untrained()), episodes, ImitationConfig(2), 1)
    assert threads == [2]
