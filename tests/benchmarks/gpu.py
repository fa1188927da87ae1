"""``python -m tests.benchmarks.gpu``: vision-language-action models of public sizes on a GPU, unattended, in 9 minutes.

pi0 and SmolVLA with random weights, built on the device; nothing is downloaded.  Every row is written to ``gpu.json``
and ``gpu.md`` in ``--out`` when it is there; a part that fails, or takes longer than its share, is reported and the
others go on.  ``--small --device cpu`` tries all of it with tiny sizes.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.imagination import wan_frames
from tests.benchmarks.measure import OverBudget, at_most
from tests.benchmarks.vla_learning import learner_of
from tests.benchmarks.vla_sizes import TINY, Scene, parameters_of, policy_of, rollout_of
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.env import Observation
from vla_rl.policies.flow import AllSteps, FlowSampler
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.policies.pi0.network import Gemma, Pi0Shape, Siglip
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.inference import Compiled, CudaGraph, Eager, Inference
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.training.tracking import write_json

WHOLE = 540.0  # seconds for everything
SDE = FlowSampler(FlowSde(0.5), AllSteps(), 4)
WAYS: dict[str, Inference] = {
    "eager": Eager(),
    "compiled": Compiled(),
    "CUDA graph": CudaGraph(),
    "CUDA graph of compiled": CudaGraph(Compiled()),
}
TINY_PI0 = Pi0Shape(
    vision=Siglip(32, 64, 2, 2, 8, 16),
    language=Gemma(48, 96, 2, 4, 1, 16, 64),
    expert_hidden_size=32,
    expert_intermediate_size=64,
    chunk=10,
    action_size=8,
    state_size=8,
)


@dataclass(frozen=True)
class Line:
    """One measurement, or why there is none: ``aim`` is at most (ms) or at least (others)."""

    what: str
    value: float | None
    unit: str
    aim: str = ""
    note: str = ""


@dataclass(frozen=True)
class Family:
    """A model at the size that is measured, and its aim in milliseconds for a chunk."""

    name: str
    shape: Any
    aim: float


@dataclass(frozen=True)
class Plan:
    """How much is measured, and where."""

    device: str
    families: tuple[Family, ...]
    scene: Scene
    ways: dict[str, Inference]
    batches: tuple[int, ...] = (8, 32, 64)
    repeats: int = 20
    decisions: int = 4
    num_envs: int = 16

    @classmethod
    def of(cls, device: str, small: bool) -> Plan:
        """Public sizes, or tiny ones; CUDA graphs only where there is CUDA."""
        ways = {name: way for name, way in WAYS.items() if device != "cpu" or not isinstance(way, CudaGraph)}
        if small:
            ways = {name: Compiled("eager") if way == Compiled() else way for name, way in ways.items()}
            families = (Family("SmolVLA", TINY, 10.0), Family("pi0", TINY_PI0, 12.0))
            return cls(device, families, Scene(side=32, words=6), ways, (2, 3), 2, 2, 2)
        families = (Family("SmolVLA", SmolVLAShape(), 10.0), Family("pi0", Pi0Shape(), 12.0))
        return cls(device, families, Scene(), ways)


class Report:
    """The lines so far, on disk after each."""

    def __init__(self, out: Path, plan: Plan) -> None:
        cuda = plan.device != "cpu"
        self.about = {
            "device": torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()})",
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "sizes": {family.name: asdict(family.shape) for family in plan.families},
        }
        self.out, self.lines = out, list[Line]()

    def add(self, line: Line) -> None:
        """Print a line and write all of them."""
        self.lines.append(line)
        print(_text(line), flush=True)
        write_json(self.out / "gpu.json", {"about": self.about, "lines": [asdict(item) for item in self.lines]})
        head = f"{self.about['device']}, {self.about['date']}, torch {self.about['torch']}; random weights\n\n"
        table = ["| what | value | aim | note |", "|---|---|---|---|", *(_text(item) for item in self.lines)]
        (self.out / "gpu.md").write_text(head + "\n".join(table) + "\n", encoding="utf-8")


def _text(line: Line) -> str:
    value = "not measured" if line.value is None else f"{line.value:.4g} {line.unit}"
    return f"| {line.what} | {value} | {line.aim} | {line.note} |"


Part = Callable[[Plan, Report], None]


def parts_of(plan: Plan) -> list[tuple[str, float, Part]]:
    """Name, most seconds and function of every part, the shortest and most wanted first."""
    found: list[tuple[str, float, Part]] = []
    for family in plan.families:
        for name, way in plan.ways.items():
            limit = 80.0 if "compiled" in name else 30.0
            found.append((f"{family.name}, {name}", limit, _chunk(family, name, way)))
    for family in plan.families:
        found.append((f"{family.name}, log-probs", 30.0, _ratios(family)))
        for kept in ("prefix", "pictures"):
            found.append((f"{family.name}, one PPO iteration, {kept} kept", 40.0, _iteration(family, kept)))
        found.append((f"{family.name}, batches", 30.0, _batches(family)))
    found.append(("imagined frames", 60.0, _imagined))
    order = {"eager": 0, "CUDA graph": 0, "log-probs": 1, "kept": 1, "batches": 1, "compiled": 2, "frames": 3}
    return sorted(found, key=lambda part: max(order[word] for word in order if part[0].endswith(word)))


def main(arguments: Sequence[str] | None = None) -> Report:
    """Measure all parts, each within its share of what is left of :data:`WHOLE` seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    given = parser.parse_args(arguments)
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"torch sees no GPU, so nothing can run on {given.device!r}; try --small --device cpu.")
    given.out.mkdir(parents=True, exist_ok=True)
    plan = Plan.of(given.device, given.small)
    report, end = Report(given.out, plan), time.monotonic() + WHOLE
    for name, limit, part in parts_of(plan):
        _measure(name, min(limit, end - time.monotonic()), part, plan, report)
    return report


def _measure(name: str, limit: float, part: Part, plan: Plan, report: Report) -> None:
    """Run one part; whatever goes wrong in it becomes a line."""
    if limit <= 0:
        report.add(Line(name, None, "", note="no time was left"))
        return
    try:
        with at_most(limit):
            part(plan, report)
    except OverBudget:
        report.add(Line(name, None, "", note=f"not finished after {limit:.0f} s"))
    except Exception as error:  # the other parts still tell something
        said = " ".join(str(error).split()).replace("|", "/")[:300]
        report.add(Line(name, None, "", note=f"failed: {type(error).__name__}: {said}"))
    torch.compiler.reset()
    gc.collect()
    if plan.device != "cpu":
        torch.cuda.empty_cache()


# -- parts ------------------------------------------------------------------------------------------------------------


def _chunk(family: Family, name: str, way: Inference) -> Part:
    """Milliseconds from one observation on the host to its chunk of actions on the host, ten denoising steps."""

    def part(plan: Plan, report: Report) -> None:
        policy = _policy(family, plan, VLAOptions(kept="prefix", dtype="bfloat16", inference=way))
        seconds = _seconds(partial(_decide, policy, plan.scene.observe(1)), plan)
        note = f"bfloat16, {parameters_of(policy) / 1e6:.0f}M parameters, {plan.scene.cameras} cameras"
        report.add(Line(f"{family.name}, a chunk at batch 1, {name}", 1e3 * seconds, "ms", f"≤ {family.aim:g}", note))

    return part


def _batches(family: Family) -> Part:
    """Observations per second that get a chunk."""

    def part(plan: Plan, report: Report) -> None:
        policy = _policy(family, plan, VLAOptions(kept="prefix", dtype="bfloat16"))
        for batch in plan.batches:
            decide = partial(_decide, policy, plan.scene.observe(batch))
            seconds = _seconds(decide, replace(plan, repeats=min(plan.repeats, 3)))
            report.add(Line(f"{family.name}, batch {batch}, eager", batch / seconds, "observations/s", note="bfloat16"))

    return part


def _iteration(family: Family, kept: str) -> Part:
    """Seconds and peak memory of acting for a rollout and of one PPO update from it."""

    def part(plan: Plan, report: Report) -> None:
        policy = _policy(family, plan, VLAOptions(kept=kept, dtype="bfloat16", sampler=SDE))
        config = PPOConfig(epochs=2, minibatch=16, micro_batch=8, critic_warmup=0, stop_kl=math.inf)
        learner = learner_of(policy, config)
        if plan.device != "cpu":
            torch.cuda.reset_peak_memory_stats()  # building it took more
        start = time.perf_counter()
        rollout = rollout_of(policy, plan.scene, plan.decisions, plan.num_envs)
        _wait(plan)
        acted = time.perf_counter()
        learner.update(rollout)
        _wait(plan)
        learnt = time.perf_counter()
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if plan.device != "cpu" else ""
        note = f"acting {acted - start:.2f} s, update {learnt - acted:.2f} s{peak}; {plan.decisions}x{plan.num_envs}"
        what = f"{family.name}, one PPO iteration, {kept} kept"
        report.add(Line(what, learnt - start, "s", note=f"{note} decisions, 2 epochs"))

    return part


def _ratios(family: Family) -> Part:
    """How far log-probs of learning are from those of acting, with a frozen part in either precision."""

    def part(plan: Plan, report: Report) -> None:
        for dtype, aim in (("float32", "≤ 1e-05 √terms"), ("bfloat16", "")):
            policy = _policy(family, plan, VLAOptions(kept="pictures", dtype=dtype, sampler=SDE))
            features = policy.encode(plan.scene.observe(8))
            out, _ = policy.act(features, {}, "sample", torch.Generator().manual_seed(0))
            gaps = [_gap(policy, features, out, rows) for rows in (slice(0, 1), slice(1, 8), slice(None))]
            root = math.sqrt(out.aux["noisy_steps"].shape[1] * math.prod(policy.latent_shape))
            what = f"{family.name}, largest log ratio before learning, {dtype}"
            note = f"minibatches of 1, 7 and 8; √terms is {root:.0f}, so {max(gaps) / root:.1e} √terms"
            report.add(Line(what, max(gaps), "nats", aim, note))

    return part


@torch.no_grad()
def _gap(policy: FlowVLA, features: dict[str, Tensor], out: Any, rows: slice) -> float:
    given = {name: item[rows] for name, item in features.items()}
    again = policy.log_prob(given, out.sample[rows], {name: item[rows] for name, item in out.aux.items()})
    return float((again.logprob - out.logprob[rows]).abs().max())


def _imagined(plan: Plan, report: Report) -> None:
    """The rows of ``wan_frames``."""
    for row in wan_frames(quick=plan.device == "cpu"):
        report.add(Line(row.name, row.ours, row.unit, note=f"a side of {row.detail.get('side')} pixels"))


def _policy(family: Family, plan: Plan, options: VLAOptions) -> FlowVLA:
    return policy_of(family.shape, plan.scene, options, plan.device)


def _decide(policy: FlowVLA, obs: Observation) -> Tensor:
    out, _ = policy.act(policy.encode(obs), {}, "eval", torch.Generator().manual_seed(0))
    return out.action.cpu()


def _seconds(call: Callable[[], object], plan: Plan) -> float:
    """Median seconds of a call, after two that do not count."""
    found = []
    for _ in range(plan.repeats + 2):
        _wait(plan)
        start = time.perf_counter()
        call()
        _wait(plan)
        found.append(time.perf_counter() - start)
    return sorted(found[2:])[(len(found) - 2) // 2]


def _wait(plan: Plan) -> None:
    if plan.device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
