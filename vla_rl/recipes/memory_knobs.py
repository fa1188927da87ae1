"""What to change in a config when its run is out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.features import KeepPrefix
from vla_rl.policies.vla.options import TrainAll, VLAOptions
from vla_rl.training.out_of_memory import BUILD, COLLECT, LEARN, VALIDATE, OutOfMemoryError

_ALL = (BUILD, COLLECT, LEARN, VALIDATE)
_PLAYS = (COLLECT, LEARN)
Knob = tuple[tuple[str, ...], str, str]  # the phases in which it helps, what to set, and what that costs


@contextmanager
def naming_knobs(trainer: object, evaluation: object, policy: object = None) -> Iterator[None]:
    """Complete an OutOfMemoryError by the fields of this run that take less memory, those that cost least first.

    trainer     has ``algorithm`` and ``experience``, and perhaps ``replay``
    evaluation  has ``num_envs``, ``processes`` and ``share_env``
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
    if not evaluation.share_env and evaluation.processes == 1:
        yield (BUILD, VALIDATE), "evaluation.share_env", "one set of environments, the same episodes, a little slower"
    for options in vlas:
        if not getattr(options, "gradient_checkpointing", True):
            yield (LEARN,), "gradient_checkpointing of the policy's options", "the same gradient, slower"
    if replay is not None and not replay.folder:
        yield _ALL, "replay.folder", "keeps the replay buffer on the disk, slower"
    if any(isinstance(getattr(item, "kept", None), KeepPrefix) for item in _modules(policy)):
        yield _PLAYS, 'kept="pictures" of the policy\'s options', "prefixes are computed again, slower"
    if any(options.dtype == "float32" for options in vlas):
        yield _ALL, 'dtype="bfloat16" of the policy\'s options', "of what is not trained, a little less exact"
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
