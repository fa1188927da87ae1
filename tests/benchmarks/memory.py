"""How well the memory of a run is estimated: against live tensors, and against what the process grows by."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.measure import COMMAND, Row
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.env import EnvSpec, VecEnv
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import build
from vla_rl.recipes.memory import estimate
from vla_rl.recipes.policies import TD3Residual
from vla_rl.recipes.trainers import OffPolicyRL, ReplayConfig, RLConfig, RunContext, TrainerConfig
from vla_rl.training.loop import Loop, LoopConfig
from vla_rl.training.shapes_only import LiveBytes

ENV = EnvConfig("lift", options={"deadline": 10})
LOOP = LoopConfig(iterations=2, validate_every=0)


@dataclass(frozen=True)
class Case:
    """A run: its config, and the policy that it starts from."""

    trainer: TrainerConfig
    start: Callable[[EnvSpec], Any]
    evaluation: EvaluationConfig


def cases(quick: bool) -> dict[str, Case]:
    """A small VLA under PPO, off-policy with a replay buffer, and a SmolVLA with stored prefixes under PPO."""
    envs, decisions, capacity, width = (4, 2, 2000, 64) if quick else (128, 5, 250_000, 1792)
    evaluation = EvaluationConfig(num_envs=min(envs, 16))
    window, sampler = WindowConfig(num_envs=envs, decisions=decisions), FlowSampler(FlowSde(0.5), LastStep(), 4)
    ppo = PPOConfig(epochs=2, minibatch=envs * decisions // 2, critic_warmup=0)
    on_policy = RLConfig(sampler, window, loop=LOOP, algorithm=ppo)
    off_policy = OffPolicyRL(
        TD3Residual(),
        replay=ReplayConfig(capacity, share=0.0),
        experience=window,
        loop=LOOP,
        algorithm=ResidualTD3Config(learning_starts=4, critic_warmup=0, utd_ratio=0.5 if quick else 0.02),
    )
    return {
        "tiny_ppo": Case(on_policy, lambda spec: _tiny(spec, TinyConfig(width=width)), evaluation),
        "residual_td3": Case(off_policy, lambda spec: _tiny(spec, TinyConfig(width=width // 4)), evaluation),
        "smolvla_prefix": Case(on_policy, _smolvla, evaluation),
    }


def _tiny(spec: EnvSpec, config: TinyConfig) -> TinyVLA:
    return TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), config)


def _smolvla(spec: EnvSpec) -> SmolVLA:
    shape = SmolVLAShape.small(state=spec.state.shape[0], action=spec.action_dim)
    return SmolVLA.new(spec, Affine.from_bounds(spec.state), shape, VLAOptions(horizon=5, kept="prefix"))


def memory_estimate(quick: bool = False) -> list[Row]:
    """The estimated peak against the growth of a process that trains, in MB; the live tensors of such a run beside.

    ``quick``: of the first case alone.
    """
    rows, known = [], cases(quick)
    for name, case in list(known.items())[: 1 if quick else None]:
        with made_envs(case) as envs:
            live = live_peak(case, envs)
        found = estimate(case.trainer, ENV, case.evaluation, case.start).peak
        grown = _grown_in_a_process(name, quick)
        detail = {"live_tensors": round(live / 1e6, 1), "estimate_over_live": round(found / live, 3)}
        command = f"{COMMAND} memory_estimate"
        rows.append(Row(f"memory_estimate_{name}", found / 1e6, grown / 1e6, found / grown, "MB", command, detail))
    return rows


class Envs:
    """An ``EnvFactory`` of environments that are there already, so that they do not count."""

    def __init__(self, config: EnvConfig, training: VecEnv, held: VecEnv) -> None:
        self.config, self.training, self.held = config, training, held

    def spec(self) -> EnvSpec:
        return self.config.spec()

    def make(self, num_envs: int) -> VecEnv:
        return self.held

    def make_training(self, num_envs: int) -> VecEnv:
        return self.training


@contextmanager
def made_envs(case: Case) -> Iterator[Envs]:
    """The environments of ``case``, which have been stepped."""
    count = case.trainer.experience.num_envs  # type: ignore[attr-defined]  # all of these have one
    with closing(ENV.make_training(count)) as training, closing(ENV.make(case.evaluation.num_envs)) as held:
        for env in (training, held):
            env.reset(np.arange(env.num_envs), np.arange(env.num_envs))
            env.step(np.zeros((env.num_envs, 1, *env.spec.action.shape), env.spec.action.dtype))
        yield Envs(ENV, training, held)


def train(case: Case, envs: Envs) -> None:
    """Two iterations and their validations, on the host."""
    torch.manual_seed(0)
    context = RunContext(envs, case.start(envs.spec()), 1, OneProcess())
    setup = build(case.trainer, context)
    seeds = range(case.evaluation.num_envs)
    Loop(
        setup.source,
        setup.learner,
        setup.store,
        lambda: evaluate(envs.held, setup.policy, seeds).rate,
        LOOP,
    ).run()


def live_peak(case: Case, envs: Envs) -> int:
    """The most bytes of tensors that are alive at once while ``case`` is trained."""
    with LiveBytes() as live:
        train(case, envs)
    return live.peak


def _grown_in_a_process(name: str, quick: bool) -> int:
    command = [sys.executable, "-m", "tests.benchmarks.memory", name, str(int(quick))]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    return int(json.loads(found.stdout.splitlines()[-1])["grown"])


def _in_a_process(name: str, quick: bool) -> None:
    """Train and print by how much the process was larger at most than before."""
    torch.set_num_threads(1)
    _warm_up()
    case = cases(quick)[name]
    with made_envs(case) as envs:
        before = _status("VmRSS")
        train(case, envs)
    print(json.dumps({"grown": _status("VmHWM") - before}))


def _warm_up() -> None:
    """Let torch and transformers load what they need to learn: code is not what a run takes."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.zeros(8, 8)).sum().backward()
    optimizer.step()
    SmolVLAShape.small(state=1, action=1, chunk=1, picture=8).with_words(3).build()


def _status(field: str) -> int:
    """Bytes in ``field`` of this process's status (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    _in_a_process(sys.argv[1], bool(int(sys.argv[2])))
