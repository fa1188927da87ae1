"""What ``vla-rl inspect CONFIG --hardware 8xH100 [--measured RUN]`` prints: memory of each rank, and expected speed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

from rich.console import Console

from vla_rl.contract.errors import UserError
from vla_rl.recipes.hardware import Hardware, hardware_of
from vla_rl.recipes.memory import MemoryEstimate
from vla_rl.recipes.memory_of import memory_of
from vla_rl.recipes.memory_tables import memory_note, memory_tables
from vla_rl.recipes.tables import table
from vla_rl.recipes.throughput import (
    LAUNCH,
    UTILISATION,
    Collecting,
    Improving,
    Measured,
    Plan,
    Prediction,
    Traffic,
    config_of,
    measured_run,
    predict,
)

_COLLECTORS = (1, 4, 16)  # of each rank, that are compared where they can share the environments
_HEADER = ("ranks x collectors", "collect", "learn", "weights", "other", "all", "steps/s", "longest")


@dataclass(frozen=True)
class Target:
    """What is asked for: a config, the hardware, and the folder of a measured run ("": none)."""

    config: Improving
    hardware: Hardware
    measured: str

    @classmethod
    def of(cls, config: object, hardware: str, measured: str) -> Target:
        """Raises UserError for a config that does not improve a policy, and for unknown hardware."""
        if not hasattr(config, "rl"):
            raise UserError(
                f"a {type(config).__name__} has no reinforcement learning, so its speed is not predicted; inspect a "
                "config of Improve or leave --hardware out."
            )
        return cls(cast(Improving, config), hardware_of(hardware), measured)


def show_hardware(show: Console, target: Target) -> None:
    """Print both; raises UserError where the environments cannot be shared by the ranks, or nothing was measured."""
    config: Any = target.config  # a dataclass
    ranks = target.hardware.count
    share = replace(config.rl, experience=config.rl.experience.split(ranks))
    found = memory_of(replace(config, rl=share))
    show.print(f"Memory of each of {ranks} learner ranks, one on each GPU of {target.hardware}:")
    for item in memory_tables(found):
        show.print(item)
    show.print(memory_note(found), soft_wrap=True)
    show.print(fits(found, target.hardware), soft_wrap=True)
    if not target.measured:
        show.print(
            "The speed is predicted from a measured run: add --measured RUN, a folder of vla-rl train.", soft_wrap=True
        )
        return
    flops = float(found.flops * ranks)
    measured = measured_run(target.measured) * (rollout_size(config.rl) / measured_size(target.measured))
    faster = compute_factor(measured, flops, found.operations, target.hardware)
    traffic = Traffic(float(found.trained), optimizer_steps(config.rl))
    rows = [_row("as measured", predict(measured, Plan(), traffic))]
    for collectors in filter(lambda count: _can_split(config.rl, count * ranks), _COLLECTORS):
        for ahead in (0, 1):
            plan = Plan(collectors, ahead, ranks, shared_gpu=True, link=target.hardware.one_way)
            name = f"{ranks} x {collectors}{', ahead' if ahead else ''}"
            rows.append(_row(name, predict(measured.computing(faster), plan, traffic)))
    show.print(table(f"predicted on {target.hardware}, seconds per iteration", _HEADER, rows))
    show.print(_note(measured, flops, faster, traffic), soft_wrap=True)


def fits(found: MemoryEstimate, hardware: Hardware) -> str:
    """One sentence: whether a rank's peak is less than the memory of its GPU."""
    peak, there = found.peak / 1e9, hardware.gpu.memory
    verdict = "fits into" if peak < there else "does not fit into"
    return f"The estimated peak of a rank, {peak:.2f} GB, {verdict} the {there:.0f} GB of one {hardware.gpu.name}."


def compute_factor(measured: Measured, flops: float, operations: int, hardware: Hardware) -> float:
    """``k`` of the formula: seconds of the policy on ``hardware`` to those that were measured.

    ``flops`` are those of collecting one rollout, ``operations`` those that each rank launches for its share of it; 1
    where the policy has none to count.
    """
    if not (flops and measured.infer):
        return 1.0
    computing = flops / (UTILISATION * hardware.gpu.tflops * 1e12)
    return max(computing, operations * LAUNCH * hardware.count) / measured.infer


def rollout_size(rl: Collecting) -> float:
    """Decisions of a window, or episodes of the groups, in one rollout."""
    experience: Any = rl.experience  # windows have decisions, groups a size
    if hasattr(experience, "decisions"):
        return float(experience.num_envs * experience.decisions)
    return float(experience.groups * experience.size)


def optimizer_steps(rl: Collecting) -> float:
    """Steps of the policy's optimizer in an iteration: one for each minibatch of every epoch, at least one."""
    epochs, minibatch = getattr(rl.algorithm, "epochs", 1), getattr(rl.algorithm, "minibatch", 0)
    return float(epochs * math.ceil(rollout_size(rl) / minibatch)) if minibatch else float(epochs)


def measured_size(folder: str) -> float:
    """:func:`rollout_size` of the run in ``folder``."""
    return rollout_size(config_of(folder).rl)


def _can_split(rl: Collecting, parts: int) -> bool:
    """Whether so many processes can share the environments."""
    try:
        rl.experience.split(parts)
    except UserError:
        return False
    return True


def _row(name: str, found: Prediction) -> tuple[str, ...]:
    parts = (found.collect, found.learn, found.weights, found.other, found.iteration)
    return name, *(f"{part:.2g}" for part in parts), f"{found.steps_per_second:,.0f}", found.dominant


def _note(measured: Measured, flops: float, faster: float, traffic: Traffic) -> str:
    return (
        f"Measured, scaled to this config's rollout: simulating {measured.simulate:.3g} s, inferring "
        f"{measured.infer:.3g} s, learning {measured.learn:.3g} s, other {measured.other:.3g} s. The policy computes "
        f"{flops / 1e9:,.3g} GFLOP to collect a rollout, which gives k = {faster:.2g}, assuming {UTILISATION:.0%} of "
        f"the published bf16 FLOP/s and {1e6 * LAUNCH:.0f} us to launch an operation: rough, within a factor of three. "
        f"{traffic.optimizer_steps:.0f} optimizer steps sum {traffic.trained / 1e6:,.1f} MB of gradients each. Every "
        "collector needs a core of its own and one thread for its environments; validation is not counted."
    )
