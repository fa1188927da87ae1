"""Out of memory is one sentence that names the phase, what was asked for, and what to change in this run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.benchmarks.memory import ENV, cases
from tests.training.test_loop import Fake
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes import improve
from vla_rl.recipes.trainers import RunContext
from vla_rl.training.loop import Loop, LoopConfig, PolicyStore
from vla_rl.training.out_of_memory import COLLECT, LEARN, VALIDATE, OutOfMemoryError, naming_knobs, phase_of_memory
from vla_rl.training.tracking import RunFolder

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.6 GiB"
ALL = 2**55  # bytes, more than any process can address


def raising(error):
    def fail(*given):
        raise error

    return fail


@pytest.mark.parametrize(("phase", "method"), [(COLLECT, "next"), (LEARN, "update"), (VALIDATE, "validate")])
def test_the_loop_says_in_which_phase(phase, method):
    fake = Fake([0.5] * 9)
    setattr(fake, method, raising(torch.OutOfMemoryError(CUDA)))
    loop = Loop(fake, fake, PolicyStore(fake), lambda: fake.validate(), LoopConfig(iterations=1))
    with pytest.raises(OutOfMemoryError, match=rf"the device ran out of memory .* '{phase}' \(2.50 GiB more"):
        loop.run()


@pytest.mark.parametrize(
    ("allocate", "asked"),
    [
        (lambda: torch.empty(ALL, dtype=torch.uint8), "36,028,797,019.0 MB"),
        (lambda: np.ones(ALL, np.uint8), "32.0 PiB"),
        (lambda: bytearray(ALL), "more was asked for"),
    ],
)
def test_what_the_host_refuses_is_recognized(allocate, asked):
    with pytest.raises(OutOfMemoryError) as caught, phase_of_memory(LEARN):
        allocate()
    assert str(caught.value).startswith("this process ran out of memory in the phase 'learn' (")
    assert asked in str(caught.value)


def test_what_another_process_says_is_recognized():
    said = f"the acting process failed: torch.OutOfMemoryError: {CUDA}; the whole traceback is above."
    with pytest.raises(OutOfMemoryError, match="another process of the run"), phase_of_memory(COLLECT):
        raise UserError(said)
    for error in (RuntimeError("shapes differ"), UserError("no seeds"), NonFiniteError("a NaN"), KeyError("x")):
        with pytest.raises(type(error)) as caught, phase_of_memory(LEARN):
            raise error
        assert caught.value is error


def knobs(case, phase, policy=None, trainer=None):
    with pytest.raises(UserError) as caught, naming_knobs(trainer or case.trainer, case.evaluation, policy):
        raise OutOfMemoryError(phase, "1.0 MB", "this process")
    assert not isinstance(caught.value, OutOfMemoryError)
    said = str(caught.value)
    assert said.startswith(
        f"this process ran out of memory in the phase '{phase}' (1.0 MB more were asked for), so the"
    )
    return said


def in_order(said, *names):
    places = [said.index(name) for name in names]
    return places == sorted(places)


def test_the_knobs_are_those_of_the_run_and_of_the_phase():
    ppo, td3 = cases(True)["tiny_ppo"], cases(True)["residual_td3"]
    said = knobs(ppo, LEARN)
    assert in_order(said, "micro_batch (now whole minibatches of 4; the", "minibatch (now 4", "num_envs (now 4; less")
    assert "replay" not in said and "evaluation" not in said and "kept" not in said
    assert in_order(knobs(td3, LEARN), "replay.folder", "algorithm.batch", "experience.num_envs", "replay.capacity")
    assert "micro_batch" not in knobs(td3, LEARN) and "micro_batch" not in knobs(ppo, COLLECT)
    said = knobs(td3, VALIDATE)
    names = (
        "evaluation.num_envs (now 4; the same episodes",
        "replay.capacity (now 2,000",
    )
    assert in_order(said, *names)
    assert "experience" not in said
    on_disk = replace(td3.trainer, replay=replace(td3.trainer.replay, folder="somewhere"))
    assert "replay.folder" not in knobs(td3, LEARN, trainer=on_disk)
    single = replace(ppo.trainer, algorithm=replace(ppo.trainer.algorithm, micro_batch=1))
    assert "micro_batch" not in knobs(ppo, LEARN, trainer=single)


def test_a_vla_has_knobs_of_its_own():
    case = cases(True)["smolvla_prefix"]
    policy = case.start(ENV.spec())
    said = knobs(case, LEARN, policy)
    assert in_order(said, "micro_batch", 'kept="pictures"', 'dtype="bfloat16"', 'moments="8bit"', "algorithm.minibatch")
    assert "trains" not in said
    policy.config = VLAOptions(dtype="bfloat16", horizon=5)
    policy.kept = SimpleNamespace()
    assert "kept" not in knobs(case, LEARN, policy) and "dtype" not in knobs(case, LEARN, policy)


def test_an_allocation_that_fails_in_a_run_is_one_sentence(tmp_path, monkeypatch):
    case, build = cases(True)["tiny_ppo"], improve.build

    def limited(trainer, context):
        setup = build(trainer, context)
        setup.learner.update = raising(MemoryError())
        return setup

    monkeypatch.setattr(improve, "build", limited)
    context = RunContext(ENV, case.start(ENV.spec()), 1, OneProcess())
    with pytest.raises(
        UserError, match=r"^this process ran out of memory in the phase 'learn' \(.*algorithm.micro_batch"
    ):
        improve.improve(case.trainer, context, replace(case.evaluation, validation=4), RunFolder(tmp_path / "run", {}))
