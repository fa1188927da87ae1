"""How long an iteration takes with other numbers of processes or on GPUs, from the seconds of a measured run.

Of the measured run, per iteration and without validation: ``S`` and ``I``, the seconds of simulating and inferring of
all its collectors in sum; ``L``, of learning in sum over its ranks; ``O``, whatever else the learner does.  With ``r``
learner ranks, ``c`` collectors of each, ``B`` bytes of trained weights and ``n`` optimizer steps per iteration:

    collect   = S / (r c) + k I / (r c)        k I / r on GPUs, which the collectors of a rank share
    learn     = k L / r + n B 2 (r - 1) / r / link
    weights   = c B / host                     0 where c = 1 and rollouts_ahead = 0: the source acts with the learner's
    iteration = collect + learn + weights + O                      rollouts_ahead 0
              = max(collect + weights, learn) + O                  rollouts_ahead 1, or a staleness
              >= (S + k I + k L) / cores + O                       where the policy computes on those cores too, k = 1

``2 (r - 1) / r`` is the traffic of a ring (Patarasuk and Yuan 2009), ``link`` the one-way bandwidth between GPUs and
``host`` that of a pipe between two processes.  ``k`` is 1 on the hardware of the measured run.  On other hardware it
is (FLOP/s that the policy reached while inferring in the measured run) / (``UTILISATION`` of the published FLOP/s),
but no less than what launching its operations takes, ``LAUNCH`` each: a rank launches as many for a smaller share.

What the model assumes: a core for every collector, or ``cores`` that nobody else uses; environments that step on one
thread, in the measured run as well, at a cost proportional to their number; a policy whose cost is, too, although small
batches leave a GPU idle.  ``k`` is rough, within a factor of three either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

from vla_rl.contract.errors import UserError
from vla_rl.recipes.config_files import read_config
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.trainers import SourceConfig
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import read_metrics

UTILISATION = 0.3  # of the published FLOP/s: an assumption; large transformers reach more, small batches less
LAUNCH = 1e-5  # seconds that the host takes for an operation of torch on a GPU, without torch.compile; an assumption
HOST = 1e9  # bytes per second that a collector takes over its pipe
_WARM = 2  # iterations at the beginning that are not counted: processes start, libraries load


@dataclass(frozen=True)
class Measured:
    """Seconds per iteration, in sum over all processes, and control steps.

    simulate, infer, learn, other  ``S``, ``I``, ``L`` and ``O`` of the formula
    steps                          control steps
    """

    simulate: float
    infer: float
    learn: float
    other: float
    steps: float

    def __mul__(self, factor: float) -> Measured:
        """A rollout ``factor`` times as large."""
        return Measured(*(factor * getattr(self, name) for name in ("simulate", "infer", "learn", "other", "steps")))

    def computing(self, factor: float) -> Measured:
        """The same where the policy takes ``factor`` times as long."""
        return replace(self, infer=factor * self.infer, learn=factor * self.learn)

    @classmethod
    def of(cls, lines: Sequence[JsonObject], collectors: int, ranks: int = 1) -> Measured:
        """Means over the iterations in ``lines`` of ``metrics.jsonl``; raises UserError when too few have a clock.

        ``collectors`` are those of each of the run's ``ranks``.
        """
        counted = [line for line in lines if "time/iteration_s" in line and "env/steps" in line][_WARM:]
        if not counted:
            raise UserError(
                f"the measured run has no more than {_WARM} iterations with a clock, so no speed can be predicted from "
                "it; let it run longer."
            )

        def mean(*names: str) -> float:
            return sum(line.get(name) or 0.0 for line in counted for name in names) / len(counted)

        beside = any("collector/env_s" in line for line in counted)
        who, processes = ("collector", collectors * ranks) if beside else ("time", ranks)
        simulate, infer = (
            mean(f"{who}/env_s", f"{who}/wait_s"),
            mean(f"{who}/encode_s", f"{who}/act_s", f"{who}/sync_s"),
        )
        learn = mean("time/learn_s")
        whole = mean("time/iteration_s") - mean("time/validate_s")
        used = mean("time/wait_s") if beside else simulate + infer
        return cls(
            processes * simulate, processes * infer, ranks * learn, max(0.0, whole - used - learn), mean("env/steps")
        )


class Collecting(Protocol):
    """What is read of a trainer's config."""

    @property
    def loop(self) -> LoopConfig: ...

    @property
    def experience(self) -> SourceConfig: ...

    @property
    def algorithm(self) -> object: ...


class Improving(Protocol):
    """A config that improves a policy, such as ``Improve``."""

    @property
    def rl(self) -> Collecting: ...


def config_of(folder: str) -> Improving:
    """The config of the run in ``folder``; raises UserError where there is none, or none of reinforcement learning."""
    path = Path(folder)
    if not (path / "config.json").exists():
        raise UserError(
            f"{folder!r} has no config.json, so it is no run that was measured; name a folder of vla-rl train."
        )
    config = read_config(path)
    if not hasattr(config, "rl"):
        raise UserError(
            f"the run in {folder!r} is a {type(config).__name__} without reinforcement learning, so no speed can be "
            "predicted from it; name a run of Improve or Demo."
        )
    return cast(Improving, config)


def measured_run(folder: str) -> Measured:
    """What the run in ``folder`` took; raises the UserErrors of :func:`config_of` and :meth:`Measured.of`."""
    collectors = config_of(folder).rl.loop.collectors
    return Measured.of([line for line in read_metrics(Path(folder)) if line["stage"] == "rl"], collectors)


@dataclass(frozen=True)
class Plan:
    """Who does what: learner ``ranks``, ``collectors`` of each, ``rollouts_ahead``.

    shared_gpu  whether the collectors of a rank infer on one GPU
    link        bytes per second from one rank to another
    cores       of the host, where all of them compute; inf: each has its own
    """

    collectors: int = 1
    rollouts_ahead: int = 0
    ranks: int = 1
    shared_gpu: bool = False
    link: float = HOST
    cores: float = math.inf


@dataclass(frozen=True)
class Traffic:
    """Bytes of the trained weights, and optimizer steps per iteration, each of which sums gradients of that size."""

    trained: float = 0.0
    optimizer_steps: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Seconds of an iteration and of its parts, without validation."""

    collect: float
    learn: float
    weights: float
    other: float
    iteration: float
    steps: float  # control steps

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.iteration

    @property
    def dominant(self) -> str:
        """The part that takes longest."""
        return max(("collect", "learn", "weights", "other"), key=lambda name: float(getattr(self, name)))


def predict(measured: Measured, plan: Plan, traffic: Traffic = Traffic()) -> Prediction:
    """The iteration of ``plan``, by the formula above."""
    processes = plan.ranks * plan.collectors
    collect = measured.simulate / processes + measured.infer / (plan.ranks if plan.shared_gpu else processes)
    ring = 2 * (plan.ranks - 1) / plan.ranks * traffic.trained / plan.link
    learn = measured.learn / plan.ranks + traffic.optimizer_steps * ring
    apart = plan.collectors > 1 or plan.rollouts_ahead > 0
    weights = plan.collectors * traffic.trained / HOST if apart else 0.0
    both = max(collect + weights, learn) if plan.rollouts_ahead else collect + learn + weights
    least = (measured.simulate + measured.infer + measured.learn) / plan.cores
    return Prediction(collect, learn, weights, measured.other, max(both, least) + measured.other, measured.steps)
