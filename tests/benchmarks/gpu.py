"""``python -m tests.benchmarks.gpu [WORD ...]``: vision-language-action models of public sizes on a GPU, in 9 minutes.

pi0 and SmolVLA with random weights, built on the device; nothing is downloaded.  Every row is written to ``gpu.json``
and ``gpu.md`` in ``--out`` when it is there; a part that fails, or takes longer than its share, is reported and the
others go on.  Words choose the parts whose names hold one.  ``--small --device cpu`` tries all of it with tiny sizes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.imagination import wan_frames
from tests.benchmarks.learning import learner_of
from tests.benchmarks.measure import Line, Report
from tests.benchmarks.vla_sizes import TINY, Scene, parameters_of, policy_of, rollout_of
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.env import Observation
from vla_rl.policies.flow import AllSteps, FlowSampler, FlowSde
from vla_rl.policies.pi0.network import Gemma, Pi0Shape, Siglip
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.inference import Compiled, CudaGraph, Eager, Inference
from vla_rl.policies.vla.options import VLAOptions

WHOLE = 540.0  # seconds for everything
RATE = 800e12  # operations per second in bfloat16 that an H100 reached in a product of 8192 x 8192 x 8192
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


Part = Callable[[Plan, Report], None]


def parts_of(plan: Plan) -> list[tuple[str, float, Part]]:
    """Name, most seconds and function of every part, the most wanted first."""
    found: list[tuple[str, float, Part]] = []
    for name in sorted(plan.ways, key=list(plan.ways).index, reverse=True):
        for family in plan.families:
            found.append((f"{family.name}, {name}", 80.0 if "compiled" in name else 45.0, _acting(family, name)))
    learning: list[tuple[str, float, Part]] = []
    for family in plan.families:
        learning.append((f"{family.name}, log-probs", 30.0, _ratios(family)))
        for kept, name in (("prefix", "CUDA graph of compiled"), ("prefix", "CUDA graph"), ("pictures", "CUDA graph")):
            what = f"{family.name}, one PPO iteration, {kept} kept, {name}"
            learning.append((what, 60.0, _iteration(what, family, kept, plan.ways.get(name, Eager()))))
    return [*found[: len(plan.families)], *learning, *found[len(plan.families) :], ("imagined frames", 60.0, _imagined)]


def main(arguments: Sequence[str] | None = None) -> Report:
    """Measure all parts, each within its share of what is left of :data:`WHOLE` seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("words", nargs="*", help="of the names of parts; none: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    given = parser.parse_args(arguments)
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"torch sees no GPU, so nothing can run on {given.device!r}; try --small --device cpu.")
    plan = Plan.of(given.device, given.small)
    sizes = {family.name: asdict(family.shape) for family in plan.families}
    report, end = Report(given.out, "gpu", plan.device, sizes=sizes), time.monotonic() + WHOLE
    for name, limit, part in parts_of(plan):
        if not given.words or any(word in name for word in given.words):
            report.run(name, partial(part, plan, report), max(0.1, min(limit, end - time.monotonic())))
    return report


# -- parts ------------------------------------------------------------------------------------------------------------


def _acting(family: Family, name: str) -> Part:
    """Milliseconds from an observation on the host to its chunk of actions on the host, ten denoising steps; of more
    observations, how many get one in a second, and the share of :data:`RATE` that its products take.
    """

    def part(plan: Plan, report: Report) -> None:
        options = VLAOptions(kept="prefix", dtype="bfloat16", inference=plan.ways[name])
        policy = _policy(family, plan, options)
        one = partial(_decide, policy, plan.scene.observe(1))
        start = time.perf_counter()
        one()
        first = time.perf_counter() - start
        seconds, work = _seconds(one, plan), _operations(policy, plan)
        note = f"bfloat16, {parameters_of(policy) / 1e6:.0f}M parameters, {plan.scene.cameras} cameras"
        note += f", {work / 1e12:.2f} TFLOP; the first took {first:.1f} s"
        this = f"{family.name}, {name}"
        report.add(Line(this, "a chunk at batch 1", 1e3 * seconds, "ms", f"≤ {family.aim:g}", note))
        _profile(this, "a chunk at batch 1", one, plan, report)
        for batch in plan.batches:
            seconds = _seconds(partial(_decide, policy, plan.scene.observe(batch)), replace(plan, repeats=3))
            share = f"{batch * work / seconds / RATE:.0%} of {RATE / 1e12:.0f} TFLOP/s"
            report.add(Line(this, f"batch {batch}", batch / seconds, "observations/s", note=share))

    return part


def _operations(policy: FlowVLA, plan: Plan) -> float:
    """Floating point operations of the products of one decision."""
    acting, policy._acting = policy._acting, Eager().prepare(policy.network)
    with FlopCounterMode(display=False, custom_mapping=dict.fromkeys(_ATTENTION, _attention_operations)) as counter:
        _decide(policy, plan.scene.observe(1))
    policy._acting = acting
    return float(counter.get_total_flops())


_ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention") for name in ("flash", "efficient", "cudnn")
]


def _attention_operations(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **named: Any) -> int:
    """Of shapes [B,h,L,d] and [B,g,M,d]: torch's own function refuses heads that share keys."""
    batch, heads, length, size = query
    return int(2 * batch * heads * length * key[2] * (size + value[3]))


def _profile(name: str, what: str, call: Callable[[], object], plan: Plan, report: Report) -> None:
    """Kernels, and the seconds in which the GPU works, of one call; its table goes to ``profile/`` in ``--out``."""
    cuda = plan.device != "cpu"
    _wait(plan)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        call()
        _wait(plan)
    sort = "self_device_time_total" if cuda else "self_cpu_time_total"
    folder = report.files.with_name("profile")
    folder.mkdir(exist_ok=True)
    file = "".join(letter if letter.isalnum() else "-" for letter in f"{name}, {what}")
    rows = found.key_averages()
    (folder / f"{file}.txt").write_text(rows.table(sort_by=sort, row_limit=40, max_name_column_width=90), "utf-8")
    kernels = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    if cuda:
        busy = sum(event.device_time for event in kernels) / 1e3
        report.add(Line(name, f"{what}: GPU at work", busy, "ms", note=f"{len(kernels)} kernels and copies"))


def _iteration(what: str, family: Family, kept: str, way: Inference) -> Part:
    """Seconds and peak memory of acting for a rollout and of one PPO update from it; the second time of two."""

    def part(plan: Plan, report: Report) -> None:
        policy = _policy(family, plan, VLAOptions(kept=kept, dtype="bfloat16", sampler=SDE, inference=way))
        config = PPOConfig(epochs=2, minibatch=16, micro_batch=16, critic_warmup=0, stop_kl=math.inf)
        learner = learner_of(policy, config)
        if plan.device != "cpu":
            torch.cuda.reset_peak_memory_stats()  # building it took more
        for which in ("first", "second"):
            start = time.perf_counter()
            rollout = rollout_of(policy, plan.scene, plan.decisions, plan.num_envs)
            _wait(plan)
            acted = time.perf_counter()
            learner.update(rollout)
            _wait(plan)
            learnt = time.perf_counter()
            peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if plan.device != "cpu" else ""
            note = (
                f"acting {acted - start:.2f} s, update {learnt - acted:.2f} s{peak}; {plan.decisions}x{plan.num_envs}"
            )
            report.add(Line(what, which, learnt - start, "s", note=f"{note} decisions, 2 epochs"))
        rollout = rollout_of(policy, plan.scene, plan.decisions, plan.num_envs)
        _profile(what, "its update", partial(learner.update, rollout), plan, report)

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
            what = f"largest log ratio before learning, {dtype}"
            note = f"minibatches of 1, 7 and 8; √terms is {root:.0f}, so {max(gaps) / root:.1e} √terms"
            report.add(Line(f"{family.name}, log-probs", what, max(gaps), "nats", aim, note))

    return part


@torch.no_grad()
def _gap(policy: FlowVLA, features: dict[str, Tensor], out: Any, rows: slice) -> float:
    given = {name: item[rows] for name, item in features.items()}
    again = policy.log_prob(given, out.sample[rows], {name: item[rows] for name, item in out.aux.items()})
    return float((again.logprob - out.logprob[rows]).abs().max())


def _imagined(plan: Plan, report: Report) -> None:
    """The rows of ``wan_frames``."""
    for row in wan_frames(quick=plan.device == "cpu"):
        report.add(
            Line("imagined frames", row.name, row.ours, row.unit, note=f"a side of {row.detail.get('side')} pixels")
        )


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
