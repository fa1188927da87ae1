"""How well the model of throughput predicts four ways to collect, from the seconds of a fifth."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from tests.benchmarks.measure import COMMAND, Row
from tests.benchmarks.tiny_lift import tiny_on_lift
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.batch import OneProcess
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, LastStep
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.recipes.context import RunContext
from vla_rl.recipes.throughput import Measured, Plan, Prediction, Traffic, predict
from vla_rl.recipes.trainers import RLConfig
from vla_rl.recipes.training_setup import build
from vla_rl.recipes.workers import worker_processes
from vla_rl.training.loop import Loop, LoopConfig


@dataclass(frozen=True)
class Case:
    """A plan, the loop that follows it, and its rollout in units of the measured one."""

    plan: Plan = Plan()
    loop: LoopConfig = LoopConfig()
    size: int = 1


_AHEAD = Plan(collectors=2, rollouts_ahead=1)
MEASURED = Case()
CASES = {
    "collectors_2": Case(Plan(collectors=2), LoopConfig(collectors=2)),
    "collectors_2_ahead": Case(_AHEAD, LoopConfig(collectors=2, rollouts_ahead=1)),
    "sources_2_staleness_1": Case(_AHEAD, LoopConfig(collectors=2, staleness=1)),
    "collectors_2_twice": Case(Plan(collectors=2), LoopConfig(collectors=2), 2),
}
_SPIN = """
import time
start = time.perf_counter()
while time.perf_counter() < start + {seconds}:
    pass
print(time.process_time() / {seconds})
"""


def throughput_model(quick: bool = False) -> list[Row]:
    """Milliseconds of an iteration, predicted (ours) and measured (other), of four plans that were not measured before.

    The seconds come from runs of one process: simulation dominates.  With two collectors the learner waits for them;
    with ``rollouts_ahead`` or a staleness it also learns meanwhile; the last has twice the environments.  Environments
    step on one thread, as the model assumes: on two, those of one process already use what two collectors share here.
    The runs take turns, and the fastest iteration of each counts, as others may use the machine as well; ``cores`` of
    the model is what three processes that only count get of it then.
    """
    rounds, iterations = (1, 2) if quick else (2, 6)
    cases = {"alone": MEASURED, **CASES}
    lines: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    trained = 0.0
    free = 0.0
    for _ in range(rounds):
        for name, case in cases.items():
            free = max(free, _free_cores(3, 0.1 if quick else 1.5))
            with _loop(case, quick) as loop:
                _iterate(loop)  # starts the processes
                lines[name] += [_iterate(loop) for _ in range(iterations)]
                trained = float(sum(p.numel() * p.element_size() for p in loop.learner.parameters.values()))
    fastest = {name: min(found, key=lambda line: line["time/iteration_s"]) for name, found in lines.items()}
    measured = Measured.of([fastest["alone"]] * 3, collectors=1)
    rows = []
    for name, case in CASES.items():
        expected = predict(measured * case.size, replace(case.plan, cores=free), Traffic(trained))
        rows.append(_row(name, expected, fastest[name]["time/iteration_s"], measured, free))
    return rows


def _row(name: str, expected: Prediction, took: float, measured: Measured, free: float) -> Row:
    detail: dict[str, float | str] = {
        "longest": expected.dominant,
        **{k: round(1e3 * v) for k, v in vars(measured).items() if k != "steps"},
    }
    detail["cores"] = round(free, 2)
    ours, other = 1e3 * expected.iteration, 1e3 * took
    return Row(f"throughput_model_{name}", ours, other, other / ours, "ms", f"{COMMAND} throughput_model", detail)


def _free_cores(processes: int, seconds: float) -> float:
    """How many cores ``processes`` that compute side by side get in sum."""
    command = [sys.executable, "-c", _SPIN.format(seconds=seconds)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return sum(float(process.communicate()[0]) for process in started)


def _iterate(loop: Loop) -> dict[str, float]:
    """The metrics of one more iteration, without validation."""
    start = time.perf_counter()
    loop.timeline.begin(loop.iteration + 1)
    metrics = loop._iterate()
    return {**metrics, "time/iteration_s": time.perf_counter() - start}


@contextmanager
def _loop(case: Case, quick: bool) -> Iterator[Loop]:
    """PPO of a TinyVLA on lift, collected as ``case`` says."""
    env, policy = tiny_on_lift(threads=1)
    window = WindowConfig(8, 2) if quick else WindowConfig(64, 8)
    trainer = RLConfig(
        FlowSampler(FlowSde(0.5), LastStep(), 4),
        replace(window, num_envs=case.size * window.num_envs),
        loop=replace(case.loop, iterations=10**6),
        algorithm=PPOConfig(epochs=4, minibatch=64, critic_warmup=0, target_kl=1e9),
    )
    with worker_processes(""), closing(build(trainer, RunContext(env, policy, 1, OneProcess()))) as setup:
        yield Loop(setup.source, setup.learner, setup.store, None, replace(trainer.loop))
