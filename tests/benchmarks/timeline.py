"""What the timeline of a run costs: the same iterations with and without recording."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from unittest import mock

import torch

from tests.benchmarks.measure import COMMAND, Contender, Row, interleave, time_row
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.batch import OneProcess
from vla_rl.experience.driver import OWN, Spans
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.improve import build
from vla_rl.recipes.trainers import RLConfig, RunContext
from vla_rl.training.loop import Loop, LoopConfig
from vla_rl.training.timeline import Timeline


def timeline_cost(quick: bool = False) -> list[Row]:
    """Milliseconds of an iteration with a timeline, and of the same one in which nothing is recorded.

    Lift, PPO of a TinyVLA in this process: 64 environments x 5 decisions.  The second row is the share of what is
    recorded, done again and again by itself, in that iteration: the difference of the first row is less than its noise.
    """
    num_envs, decisions, repeats = (4, 2, 1) if quick else (64, 5, 20)
    with ExitStack() as opened:
        loops = {name: _loop(num_envs, decisions, opened) for name in ("recorded", "unrecorded")}

        def unrecorded() -> None:
            with mock.patch.object(Spans, "add"), mock.patch.object(Timeline, "_add"):
                _iterate(loops["unrecorded"])

        took = interleave(
            {"recorded": Contender(lambda: _iterate(loops["recorded"])), "unrecorded": Contender(unrecorded)}, repeats
        )
        spans = len(next(reversed(loops["recorded"].timeline.recent.values()))[OWN])
    pair = took["recorded"], took["unrecorded"]
    detail = {"num_envs": num_envs, "decisions": decisions, "spans": spans}
    share = 100 * _seconds_of_recording(6 * decisions) / took["recorded"]
    return [
        time_row("timeline_cost", "timeline_cost", pair, **detail),
        Row("timeline_cost_alone", share, None, None, "percent", f"{COMMAND} timeline_cost", detail),
    ]


def _seconds_of_recording(clocks: int, repeats: int = 1000) -> float:
    """Seconds that an iteration records, in which a driver's clocks stop ``clocks`` times."""
    spans, timeline, start = Spans(), Timeline(), time.perf_counter()
    for iteration in range(repeats):
        timeline.begin(iteration)
        for clock in range(clocks):
            at = time.perf_counter()
            spans.add(("simulating", "inferring")[clock % 2], at, at)
        timeline.collected(spans.take(), at)
        for kind in ("learning", "syncing", "saving"):
            with timeline.span(kind):
                pass
    return (time.perf_counter() - start) / repeats


def _iterate(loop: Loop) -> None:
    """One more iteration, without validation."""
    loop.timeline.begin(loop.iteration + 1)
    loop._record(loop._iterate())


def _loop(num_envs: int, decisions: int, opened: ExitStack) -> Loop:
    torch.manual_seed(0)
    env = EnvConfig("lift", options={"deadline": 25, "threads": 2})
    spec = env.spec()
    vocabulary, statistics = Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state)
    policy = TinyVLA(spec, vocabulary, statistics, TinyConfig(width=128, blocks=2))
    trainer = RLConfig(
        FlowSampler(FlowSde(0.5), LastStep(), 4), WindowConfig(num_envs, decisions), algorithm=PPOConfig(minibatch=64)
    )
    setup = opened.enter_context(closing(build(trainer, RunContext(env, policy, 1, OneProcess()))))
    return Loop(setup.source, setup.learner, setup.store, None, LoopConfig(10**6))
