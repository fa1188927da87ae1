"""Our lift as a benchmark of the vla-eval harness, which imports this file by name; it keeps what was executed."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.specs import IMAGE_RGB, LANGUAGE, RAW, DimSpec

from sims.catalog import make
from vla_rl.contract.env import Observation
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.vla_eval import observation_payload


class LiftBenchmark(StepBenchmark):
    """One task; episode ``i`` is the scene of seed ``first_seed + i``."""

    executed: ClassVar[dict[int, list[np.ndarray]]] = {}

    def __init__(self, first_seed: int, options: dict[str, Any] | None = None, send_state: bool = False) -> None:
        super().__init__()
        self.env = make("lift", num_envs=1, **(options or {}))
        self.first_seed, self.send_state, self.seed = first_seed, send_state, -1
        self.success = False

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": "lift", "suite": "tabletop"}]

    def reset(self, task: dict[str, Any]) -> Observation:
        self.seed = self.first_seed + task["episode_idx"]
        self.executed[self.seed], self.success = [], False
        return self.env.reset(np.zeros(1, int), np.array([self.seed]))

    def step(self, action: dict[str, Any]) -> StepResult:
        self.executed[self.seed].append(action["actions"])
        step = self.env.step(np.asarray(action["actions"])[None, None])
        self.success = bool(step.success[0])
        return StepResult(step.obs, float(step.reward[0, 0]), bool(step.done[0]), {})

    def make_obs(self, raw_obs: Observation, task: dict[str, Any]) -> dict[str, Any]:
        payload = observation_payload(SingleObservation.of(raw_obs, 0, self.env.spec))
        return {name: item for name, item in payload.items() if self.send_state or not name.startswith("state")}

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": self.success}

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": self.env.spec.time_limit}

    def get_action_spec(self) -> dict[str, DimSpec]:
        return {"actions": RAW}

    def get_observation_spec(self) -> dict[str, DimSpec]:
        return {**{name: IMAGE_RGB for name in self.env.spec.images}, "state": RAW, "language": LANGUAGE}

    def cleanup(self) -> None:
        self.env.close()
