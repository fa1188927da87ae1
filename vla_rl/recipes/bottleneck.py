"""What a run waits for most, and the argument that would change it: one sentence from the shares of its timeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vla_rl.experience.spans import OWN
from vla_rl.training.loop import LoopConfig

Shares = Mapping[str, Mapping[str, float]]  # {lane: {kind: share of the wall time}}
_SMALL = 0.05  # a gain below this share of the time is not worth an argument


@dataclass(frozen=True)
class Arguments:
    """The arguments of a run that change where its time goes, and the cores that there are for it.

    ``loop`` is how the fields of its ``LoopConfig`` begin on the command line.
    """

    loop: str  # "--rl.loop." or "--loop."
    collectors: int  # 0: the recipe collects in the learner's process alone
    rollouts_ahead: int
    processes: int  # that evaluate
    cores: int

    @classmethod
    def of(cls, loop: LoopConfig, processes: int) -> Arguments:
        """Those of a recipe with the field ``rl``, on this machine."""
        return cls("--rl.loop.", loop.collectors, loop.rollouts_ahead or loop.staleness, processes, os.cpu_count() or 1)

    @classmethod
    def without_collectors(cls) -> Arguments:
        """Those of a recipe that collects and evaluates in the learner's process."""
        return cls("--loop.", 0, 0, 1, os.cpu_count() or 1)


def bottleneck(shares: Shares, arguments: Arguments) -> str:
    """One sentence, "" before anything was recorded."""
    own = shares.get(OWN, {})
    collecting = sum(own.get(kind, 0.0) for kind in ("waiting", "simulating", "inferring"))
    parts = {kind: own.get(kind, 0.0) for kind in ("learning", "validating", "saving", "syncing")}
    parts["collecting"] = collecting
    if not any(parts.values()):
        return ""
    most = max(parts, key=parts.__getitem__)
    cure = {
        "collecting": lambda: _collecting(shares, arguments),
        "learning": lambda: _learning(collecting, arguments),
        "validating": lambda: _validating(arguments),
        "saving": lambda: f"save its state less often (`{arguments.loop}save-every`)",
        "syncing": lambda: (
            "let the environment compute where the policy does (`--device`, or an environment on the GPU)"
        ),
    }[most]()
    waits = {"collecting": _what_collecting_is(shares), "syncing": "the policy's device and the publishing of weights"}
    named = {"learning": "the learner's updates", "validating": "validation", "saving": "checkpoints and saved states"}
    return f"The run waits most ({parts[most]:.0%} of its time) for {(waits | named)[most]}; to change that, {cure}."


def _beside(shares: Shares) -> dict[str, float]:
    """The mean shares of the processes that collect beside the learner."""
    lanes = [kinds for lane, kinds in shares.items() if lane != OWN]
    return {kind: sum(lane.get(kind, 0.0) for lane in lanes) / len(lanes) for lane in lanes for kind in lane}


def _what_collecting_is(shares: Shares) -> str:
    beside = _beside(shares)
    own = {**shares[OWN], **beside}
    if not beside and own.get("waiting", 0.0) > own.get("simulating", 0.0) + own.get("inferring", 0.0):
        return "simulators in other processes"
    larger = max(("simulating", "inferring"), key=lambda kind: own.get(kind, 0.0))
    what = {"simulating": "simulation", "inferring": "inference"}[larger]
    return f"its collectors, which spend most of theirs on {what}" if beside else what


def _collecting(shares: Shares, arguments: Arguments) -> str:
    own, more = shares[OWN], max(1, arguments.collectors) + 1
    ahead = f"collect while it learns (`{arguments.loop}rollouts-ahead 1`)"
    hidden = 0.0 if arguments.rollouts_ahead else own.get("learning", 0.0)
    if not arguments.collectors:
        return "share the environments among processes (`torchrun --nproc-per-node 2`)"
    if not _beside(shares) and own.get("waiting", 0.0) > own.get("simulating", 0.0) + own.get("inferring", 0.0):
        return "give the simulators more workers, or let half of them simulate while the policy computes for the other"
    if arguments.collectors < arguments.cores:
        count = f"collect with more processes (`{arguments.loop}collectors {more}`)"
        return f"{count} or {ahead}" if hidden >= 2 * _SMALL else count
    busy = f"{arguments.collectors} collectors use all {arguments.cores} cores"
    if hidden >= _SMALL:
        return f"{ahead}, since {busy} while they collect and idle while it learns"
    return f"take a machine with more cores and `{arguments.loop}collectors {more}`, since {busy}"


def _learning(collecting: float, arguments: Arguments) -> str:
    if arguments.collectors and not arguments.rollouts_ahead and collecting >= _SMALL:
        return f"collect while it learns (`{arguments.loop}rollouts-ahead 1`)"
    return "learn with several processes (`torchrun --nproc-per-node 2`) or on a GPU (`--device cuda`)"


def _validating(arguments: Arguments) -> str:
    rarely = (
        f"validate less often (`{arguments.loop}validate-every`) or with fewer episodes (`--evaluation.validation`)"
    )
    if arguments.collectors and arguments.processes < arguments.cores:
        return f"validate with more processes (`--evaluation.processes {arguments.processes + 1}`), or {rarely}"
    return rarely
