"""The process of an isolated environment: ``python -m sims.isolation.worker``, started by ``sims/isolated.py``.

It makes an environment of the catalogue (or "package.module:make") from JSON and does what its owner asks for.  It
imports the contract and the simulator only, so it runs in an installation without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sims import catalog
from sims.isolation.messages import EXPERT_ACTION, observation_arrays, step_arrays
from vla_rl.contract.check import check_ends, require_finite_observation, require_finite_step
from vla_rl.contract.child import Answering, serve_owner
from vla_rl.contract.env import Observation, Snapshots, VecEnv, on_host
from vla_rl.contract.wire import Arrays


class EnvServer(Answering):
    """One environment and the requests about it.

    With an expert beside it, observations hold ``privileged/expert_action`` (float32 [E,D]): what it would do next.
    """

    does = ("make", "reset", "step", "snapshot", "restore", "close")
    who = "the environment"

    def __init__(self) -> None:
        super().__init__()
        self.env: VecEnv
        self.expert: Any = None  # plans one action at a time, from an observation alone
        self.seeds = np.zeros(0, np.int64)

    def make(self, env: str, num_envs: int, options: Mapping[str, Any], expert: bool) -> tuple[dict[str, Any], Arrays]:
        """Make the environment, with its expert's actions in the observations if ``expert`` says so."""
        self.env = catalog.make(env, num_envs=num_envs, **options)
        self.seeds, spec = np.zeros(num_envs, np.int64), self.env.spec
        if expert:
            self.expert = catalog.expert(env, 1, **options)
            spec = replace(spec, extras={**spec.extras, EXPERT_ACTION: spec.action})
        return {"spec": spec.to_json()}, {}

    def reset(self, env_ids: np.ndarray, seeds: np.ndarray) -> tuple[dict[str, Any], Arrays]:
        self.seeds[env_ids] = seeds
        return {}, self._sound(self.env.reset(env_ids.copy(), seeds.copy()))

    def step(self, chunk: np.ndarray, observe: Any) -> tuple[dict[str, Any], Arrays]:
        step = self.env.step(chunk.copy(), observe=observe)
        frames = tuple(map(self._with_expert, step.frames))
        step = replace(step, obs=frames[-1] if frames else self._with_expert(step.obs), frames=frames)
        require_finite_step(self.env, step, self.seeds)
        check_ends(step, self.env.spec, self.env.num_envs)
        for obs in step.frames:
            require_finite_observation(self.env, obs, self.seeds)
        return {"cause": list(map(str, step.cause))}, step_arrays(step)

    def snapshot(self, env_ids: np.ndarray) -> tuple[dict[str, Any], Arrays]:
        assert isinstance(self.env, Snapshots)
        saved = self.env.snapshot(env_ids.copy())
        return {}, {name: on_host(array) for name, array in saved.items()}

    def restore(self, env_ids: np.ndarray, **saved: np.ndarray) -> tuple[dict[str, Any], Arrays]:
        assert isinstance(self.env, Snapshots)
        copies = {name.removeprefix("saved/"): array.copy() for name, array in saved.items()}
        return {}, self._sound(self.env.restore(env_ids.copy(), copies))

    def close(self) -> tuple[dict[str, Any], Arrays]:
        self.env.close()
        return {}, {}

    def _with_expert(self, obs: Observation) -> Observation:
        if self.expert is None:
            return obs
        action = on_host(self.expert.act(obs))[:, 0]
        spec = self.env.spec.action
        clipped = np.clip(action, spec.low, spec.high).astype(spec.dtype)
        return replace(obs, extras={**obs.extras, EXPERT_ACTION: clipped})

    def _sound(self, obs: Observation) -> Arrays:
        shown = self._with_expert(obs)
        require_finite_observation(self.env, shown, self.seeds)
        return observation_arrays(shown)


if __name__ == "__main__":
    serve_owner("worker", EnvServer().answer)
