"""What it brings to let half of the environments simulate while the policy computes for the other half."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sims.catalog import make
from tests.auditing import AuditingPolicy
from tests.benchmarks.measure import Contender, Row, interleave, rate_row
from vla_rl.experience.rollout import SeedStream, WindowConfig

ROOT = Path(__file__).resolve().parents[2]
HORIZON = 4


class SlowPolicy(AuditingPolicy):
    """A policy that takes ``seconds`` for each row; it also audits that nothing is lost."""

    def __init__(self, seconds: float) -> None:
        super().__init__(HORIZON)
        self._seconds = seconds

    def act(self, features: Any, state: Any, mode: Any, generator: Any) -> Any:
        time.sleep(self._seconds * len(features["counters"]))
        return super().act(features, state, mode, generator)


def overlap_vs_plain(quick: bool = False) -> list[Row]:
    """Decisions per second of a window of 16 decisions of 16 environments, overlapped against in turn.

    Simulator and policy are artificially slow: both sleep 8 ms for each environment.  The simulator has one core, which
    its two processes share; so a half is simulated in half of the time.  At the end of a window half a step is
    simulated with nothing beside it: the bound is a ratio of 2 * 16 / 16.5.
    """
    num_envs, decisions, repeats, seconds = (4, 3, 1, 0.001) if quick else (16, 16, 3, 0.008)
    with TemporaryDirectory() as folder:
        options = {"seconds": seconds, "core": f"{folder}/core"}
        variables = {"PYTHONPATH": str(ROOT)}

        def isolated() -> Any:
            return make(
                "isolated",
                num_envs=num_envs,
                env="tests.benchmarks.slow:make",
                options=options,
                workers=2,
                variables=variables,
            )

        with closing(isolated()) as one, closing(isolated()) as other:
            contenders = {}
            for env, overlap in ((one, True), (other, False)):
                config = WindowConfig(num_envs, decisions, overlap=overlap)
                source = config.build(env, SlowPolicy(seconds), SeedStream(0, 1 << 19), torch.Generator())
                contenders["overlapped" if overlap else "plain"] = Contender(source.next)
            took = interleave(contenders, repeats)
    name, pair = "overlap_vs_plain", (took["overlapped"], took["plain"])
    detail = {"num_envs": num_envs, "decisions": decisions, "seconds_each": seconds}
    return [rate_row(name, name, num_envs * decisions, pair, "decisions/s", **detail)]
