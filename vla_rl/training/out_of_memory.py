"""Out of memory, on a device or on the host, as an error that says in which phase of a run it happened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.features import KeepPrefix
from vla_rl.policies.vla.options import TrainAll, VLAOptions

BUILD, COLLECT, LEARN, VALIDATE = "build", "collect", "learn", "validate"  # the phases of a run
# What torch's allocator on the host and C++ say, as RuntimeError.
_ON_HOST = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried to allocate", "std::bad_alloc")
_ELSEWHERE = (*_ON_HOST, "OutOfMemoryError:", "MemoryError")  # in a worker process, whose error comes as its text
_ASKED = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+ (?:bytes|[KMGTPE]iB))")


class OutOfMemoryError(UserError):
    """Memory ran out in ``phase``; ``asked`` in words, "" where nobody said how much was asked for."""

    def __init__(self, phase: str, asked: str, where: str) -> None:
        super().__init__(phase, asked, where)
        self.phase, self.asked, self.where = phase, asked, where

    def __str__(self) -> str:
        asked = f"{self.asked} more were asked for" if self.asked else "more was asked for"
        return f"{self.where} ran out of memory in the phase {self.phase!r} ({asked})"


@contextmanager
def phase_of_memory(phase: str) -> Iterator[None]:
    """Raise OutOfMemoryError in place of what torch, numpy and Python raise when memory runs out within the block."""
    try:
        yield
    except OutOfMemoryError:
        raise  # of a phase within this one
    except UserError as error:
        if not any(text in str(error) for text in _ELSEWHERE):
            raise
        raise OutOfMemoryError(phase, _asked(error), "another process of the run") from error
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(phase, _asked(error), "the device") from error
    except MemoryError as error:
        raise OutOfMemoryError(phase, _asked(error), "this process") from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _ON_HOST):
            raise
        raise OutOfMemoryError(phase, _asked(error), "this process") from error


def _asked(error: Exception) -> str:
    found = _ASKED.search(str(error))
    if not found:
        return ""
    number, _, unit = found[1].partition(" ")
    return f"{int(number) / 1e6:,.1f} MB" if unit == "bytes" else found[1]


_ALL = (BUILD, COLLECT, LEARN, VALIDATE)
_PLAYS = (COLLECT, LEARN)
Knob = tuple[tuple[str, ...], str, str]  # the phases in which it helps, what to set, and what that costs


@contextmanager
def naming_knobs(trainer: object, evaluation: object, policy: object = None) -> Iterator[None]:
    """Complete an OutOfMemoryError by the fields of this run that take less memory, those that cost least first.

    trainer     has ``algorithm`` and ``experience``, and perhaps ``replay``
    evaluation  has ``num_envs``
    policy      the policy that the run starts from
    """
    try:
        yield
    except OutOfMemoryError as error:
        found = [
            f"{name} ({cost})" for phases, name, cost in _knobs(trainer, evaluation, policy) if error.phase in phases
        ]
        raise UserError(
            f"{error}, so the run ended; what helps, that which costs least first: {', '.join(found)}. "
            "vla-rl inspect estimates the memory of a config beforehand."
        ) from error


def _knobs(of_trainer: object, of_evaluation: object, policy: object) -> Iterator[Knob]:
    """All that this run has, from "the same result, slower" to "less is learnt"."""
    trainer: Any = of_trainer
    evaluation: Any = of_evaluation
    algorithm, experience, replay = trainer.algorithm, trainer.experience, getattr(trainer, "replay", None)
    configs = [getattr(item, "config", None) for item in _modules(policy)]
    vlas = [item for item in configs if isinstance(item, VLAOptions)]
    if getattr(algorithm, "micro_batch", 1) != 1:
        now = f"now {algorithm.micro_batch or f'whole minibatches of {algorithm.minibatch}'}"
        yield (LEARN,), "a smaller algorithm.micro_batch", f"{now}; the same gradient"
    yield (VALIDATE,), "fewer evaluation.num_envs", f"now {evaluation.num_envs}; the same episodes, slower"
    for options in vlas:
        if not getattr(options, "gradient_checkpointing", True):
            yield (LEARN,), "gradient_checkpointing of the policy's options", "the same gradient, slower"
    if replay is not None and not replay.folder:
        yield _ALL, "replay.folder", "keeps the replay buffer on the disk, slower"
    if any(isinstance(getattr(item, "kept", None), KeepPrefix) for item in _modules(policy)):
        yield _PLAYS, 'kept="pictures" of the policy\'s options', "prefixes are computed again, slower"
    if any(options.dtype == "float32" for options in vlas):
        yield _ALL, 'dtype="bfloat16" of the policy\'s options', "of what is not trained, a little less exact"
    if getattr(algorithm, "moments", "8bit") != "8bit":
        yield _ALL, 'algorithm.moments="8bit"', "a quarter of the optimizer's state, a little less exact"
    for name in ("minibatch", "batch"):
        if hasattr(algorithm, name):
            yield (LEARN,), f"a smaller algorithm.{name}", f"now {getattr(algorithm, name)}; noisier gradients"
    for name in ("num_envs", "decisions", "groups"):
        if hasattr(experience, name):
            yield _PLAYS, f"fewer experience.{name}", f"now {getattr(experience, name)}; less data in an iteration"
    if replay is not None:
        yield _ALL, "a smaller replay.capacity", f"now {replay.capacity:,}; older decisions are forgotten"
    if any(isinstance(options.trains, TrainAll) for options in vlas):
        yield _ALL, "trains=TrainExpert() or TrainLoRA() of the policy's options", "less of the model learns"


def _modules(policy: object) -> list[nn.Module]:
    return list(policy.modules()) if isinstance(policy, nn.Module) else []
