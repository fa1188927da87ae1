"""What ``vla-rl inspect`` prints about the memory of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import nn

from vla_rl.algorithms.chunks import ImitationPolicy
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.context import Trainable
from vla_rl.recipes.demo import Demo
from vla_rl.recipes.imitate_dataset import NewPolicyConfig
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.memory import MemoryEstimate, estimate
from vla_rl.recipes.policies import names_class, new_policy
from vla_rl.recipes.tables import sizes, table

_WHAT = {
    "build": "the networks are made",
    "collect": "the policy acts in num_envs environments",
    "learn": "advantages, micro-batches with their graphs, optimizer steps",
    "validate": "the policy acts in evaluation.num_envs environments",
}


def memory_tables(found: MemoryEstimate) -> Iterator[Table]:
    """What lasts, what each phase takes on top, what a decision takes, and what is kept of an observation."""
    weights = sum(found.weights.values())
    rows = [(f"weights in {dtype}", megabytes(size)) for dtype, size in sorted(found.weights.items())]
    rows += [
        ("of them trained by RL", f"{megabytes(found.trained)} ({found.trained / max(1, weights):.1%})"),
        ("gradients", megabytes(found.gradients)),
        ("state of the optimizers", megabytes(found.optimizer)),
        ("replay buffer, when it is full", megabytes(found.replay)),
    ]
    rows += [("replay buffer on the disk", megabytes(found.on_disk))] if found.on_disk else []
    yield table("memory that lasts", ("", "MB"), rows)
    phases = [
        (name, megabytes(phase.before), megabytes(phase.peak - phase.before), megabytes(phase.peak), _WHAT[name])
        for name, phase in found.phases.items()
    ]
    phases.append(("peak", "", "", megabytes(found.peak), "the largest of them"))
    yield table("memory of a run, estimated", ("phase", "before it", "on top", "MB in all", ""), phases)
    each = [(f"observation: {name}", f"{size:,}") for name, size in found.observation.items()]
    each += [(f"decision: {name}", f"{size:,}") for name, size in found.decision.items()]
    yield table(f"bytes in a rollout, {megabytes(found.rollout)} MB", ("of each", "bytes"), each)
    yield from _kept(found.policy)


def memory_note(found: MemoryEstimate) -> str:
    """What the estimate leaves out."""
    unseen = "" if found.learnt else "The policy did not learn in the iterations that were tried, so more is possible. "
    return (
        f"{unseen}Not counted: simulators, Python and torch (about 300 MB), what single operations take while they "
        "compute, the allocator's gaps, and other processes (loop.collectors, evaluation.processes), each of which "
        "has a policy of its own."
    )


def megabytes(size: int) -> str:
    """``size`` bytes in MB of 1,000,000 bytes."""
    return f"{size / 1e6:,.1f}"


def _kept(policy: object) -> Iterator[Table]:
    """For each vision-language-action model inside ``policy``, both that it could keep of an observation."""
    from vla_rl.policies.vla.features import PREFIX_LIMIT, KeepPrefix, picture_bytes

    module: Any
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        if not hasattr(module, "kept"):
            continue
        prefix = module.network.prefix_bytes(module.cameras, module.tokens.shape[1])
        options = module.config
        if options.kept != "auto":
            why = f'because kept is "{options.kept}"'
        elif options.trains.reaches_prefix:
            why = f"because {type(options.trains).__name__} changes the prefix"
        else:
            smaller = "at most" if prefix <= PREFIX_LIMIT else "more than"
            why = f"because a prefix is {smaller} {PREFIX_LIMIT:,} bytes"
        chosen = ("prefix", "pictures")[not isinstance(module.kept, KeepPrefix)]
        rows = [("prefix", f"{prefix:,}"), ("pictures", f"{picture_bytes(module.spec, module.cameras):,}")]
        yield table(
            "what could be kept of an observation",
            ("", "bytes", ""),
            [(*row, f"chosen, {why}" if row[0] == chosen else "") for row in rows],
        )


def show_memory(show: Console, config: object) -> None:
    """Print what a run of ``config`` takes, or in one sentence why that is not known."""
    try:
        found = memory_of(config)
    except UserError as error:
        show.print(f"No estimate of the memory: {error}", soft_wrap=True)
        return
    show.print(sizes(found.policy))
    for item in memory_tables(found):
        show.print(item)
    show.print(memory_note(found), soft_wrap=True)


def memory_of(config: object) -> MemoryEstimate:
    """The memory of the reinforcement learning of ``config``, an ``Improve`` or ``Demo``.

    Raises UserError for another config, and when a part of the run cannot be built without values.
    """
    if not isinstance(config, Improve | Demo):
        raise UserError(
            f"a {type(config).__name__} does more than improve a policy, so its memory is not known beforehand; "
            "inspect a config of Improve with the same numbers."
        )
    improve = config if isinstance(config, Improve) else Improve(config.rl, "", env=config.env)

    def start(spec: EnvSpec) -> Trainable | None:
        return cast(Trainable, untrained(config.new, spec)) if isinstance(config, Demo) else _start(improve, spec)

    try:
        return estimate(
            config.rl, config.env, config.evaluation, start, improve.demonstrations, config.seed, config.device
        )
    except (RuntimeError, TypeError) as error:  # what torch raises where a tensor has no memory
        raise UserError(
            f"a part of the run needs values where only shapes are there ({str(error).splitlines()[0]}), so its memory "
            "is not known beforehand; watch a short run instead (--rl.loop.iterations 3)."
        ) from error


def _start(config: Improve, spec: EnvSpec) -> Trainable | None:
    """The starting policy, of whose weights the headers are read."""
    if not config.policy:
        return None
    if names_class(config.policy):
        return new_policy(config.policy, spec, {}, config.seed)
    return cast(Trainable, load_policy(config.policy, spec))


def untrained(new: NewPolicyConfig, spec: EnvSpec) -> ImitationPolicy:
    """The policy that ``new`` makes, for its sizes."""
    state, action = (np.zeros((2, size), np.float32) for size in (spec.state.shape[0], spec.action_dim))
    none = np.zeros(2, np.int64)
    images = {name: np.zeros((2, *item.shape), np.uint8) for name, item in spec.images.items()}
    return new.build(spec, Demonstrations(images, state, none, none, action, none, none, spec.tasks, 1.0), 0)
