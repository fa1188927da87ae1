"""HG-DAgger on a very small policy, which keeps in its state what was added to it: what an audit compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.faults.known import SPEC, identity, step
from vla_rl.algorithms.chunks import HGDagger, HGDaggerConfig
from vla_rl.contract.batch import Rollout
from vla_rl.contract.policy import Policy
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.fleet.releases import CanaryRule
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.fleet.learners import Learn, LearnByCorrections
from vla_rl.recipes.trainers import Trainable

_SIZES = TinyConfig(
    horizon=2, queries=1, condition=8, width=8, blocks=1, sampler=FlowSampler(FlowSde(0.5), LastStep(), 2)
)
reach: Callable[[str], None] = lambda point: None  # noqa: E731  # replaced by a process that can be killed


@dataclass(frozen=True)
class AuditedCorrections(LearnByCorrections):
    """``LearnByCorrections`` whose learner keeps what was added (a ``FleetMethod``)."""

    algorithm: HGDaggerConfig = field(default_factory=lambda: HGDaggerConfig(batch=4, draws=1, capacity=64))

    def build(self, base: Trainable, episodes: Demonstrations, seed: int) -> AuditedLearner:  # type: ignore[override]
        return AuditedLearner(super().build(base, episodes, seed))


class AuditedLearner:
    """Around a learner: ``added`` are the identities of all episodes that it was given, in their order."""

    def __init__(self, learner: HGDagger) -> None:
        self._learner = learner
        self.added: list[str] = []

    @property
    def policy(self) -> Policy:
        return self._learner.policy

    def add(self, rollout: Rollout) -> int:
        self.added.append(identity(rollout.robot, rollout.executed[rollout.valid].tolist()))
        return self._learner.add(rollout)

    def learn(self, steps: int) -> dict[str, float]:
        reach("before updates")
        metrics = self._learner.learn(steps)
        reach("after updates")
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"learner": self._learner.state_dict(), "added": self.added}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learner.load_state_dict(state["learner"])
        self.added = list(state["added"])


def config(folder: Path) -> Learn:
    """A learner that publishes often; its policy and demonstrations are written to ``folder``."""
    torch.manual_seed(0)
    policy = TinyVLA(SPEC, Vocabulary.from_texts(SPEC.tasks), Affine.from_bounds(SPEC.state), _SIZES)
    policy.save_pretrained(folder / "base")
    shown = [step("0" * 32, seq, seq) for seq in range(4)]
    whole, last = np.zeros(4, np.int64), np.arange(4) == 3
    episode = Demonstrations(
        images={"front": np.stack([one.images["front"] for one in shown])},
        state=np.stack([one.state for one in shown]),
        task=whole,
        time=np.arange(4),
        action=np.stack([one.action for one in shown]),
        episode=whole,
        seed=whole - 1,
        tasks=SPEC.tasks[:1],
        fps=1.0 / SPEC.control_dt,
        state_names=SPEC.state.names,
        action_names=SPEC.action.names,
        extras={"next.reward": last.astype(np.float32), "next.done": last, "next.success": last},
    )
    save_demonstrations(episode, folder / "shown", video="never")
    made = Learn(AuditedCorrections(), str(folder / "base"), str(folder / "shown"), canary=CanaryRule(min_episodes=1))
    return replace(made, updates_per_second=16.0, turn=1, publish_every=2, patience=0.2)
