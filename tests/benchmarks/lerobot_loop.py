"""LeRobot's own loop on our scenes: its ``rollout``, with a policy of its own, in its installation; no policy of ours.

    PYTHON=~/.cache/vla-rl/policies/lerobot/venv/bin/python
    PYTHONPATH=$PWD $PYTHON tests/benchmarks/lerobot_loop.py FOLDER --env lift --python .venv/bin/python

The environments are simulated by another Python, that of ``make install``, so LeRobot's needs no simulator.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.scripts.lerobot_eval import rollout

from sims import isolated
from vla_rl.contract.env import PRIVILEGED, Observation
from vla_rl.contract.intervals import wilson
from vla_rl.evaluation import seed_ranges


class Scenes(VectorEnv[Any, Any, Any]):
    """Our environments as LeRobot's loop reads them: state, extras and cameras by its names, success in its info."""

    def __init__(self, env: Any) -> None:
        self.env, self.num_envs = env, env.num_envs
        self.metadata = {"render_fps": 1 / env.spec.control_dt}
        shape = (self.num_envs, env.spec.action_dim)
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, shape)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._done = np.zeros(self.num_envs, bool)
        self._obs = self.env.reset(np.arange(self.num_envs), np.array(seed, np.int64))
        return self._shown(self._obs), {}

    def step(self, actions: Any) -> tuple[dict[str, Any], Any, Any, Any, dict[str, Any]]:
        step = self.env.step(np.asarray(actions, np.float32)[:, None])
        ended = (step.terminated | step.truncated) & ~self._done
        self._done |= ended
        self._obs = step.obs
        info = {"final_info": {"is_success": step.success & ended}} if ended.any() else {}
        return self._shown(step.obs), step.reward[:, 0], step.terminated & ended, step.truncated & ended, info

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """What LeRobot asks each environment for."""
        spec = self.env.spec
        known: dict[str, list[Any]] = {"_max_episode_steps": [spec.time_limit] * self.num_envs}
        known["task_description"] = known["task"] = [spec.tasks[task] for task in self._obs.task]
        if name not in known:
            raise AttributeError(name)
        return tuple(known[name])

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def _shown(self, obs: Observation) -> dict[str, Any]:
        extras = {name: item.copy() for name, item in obs.extras.items() if not name.startswith(PRIVILEGED)}
        pixels = {"pixels": {name: item.copy() for name, item in obs.images.items()}} if obs.images else {}
        return {"agent_pos": obs.state.copy(), **extras, **pixels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--env", required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--python", required=True)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    config = PreTrainedConfig.from_pretrained(given.folder)
    policy = get_policy_class(config.type).from_pretrained(given.folder, config=config)
    processors = make_pre_post_processors(config, pretrained_path=given.folder)
    found: list[bool] = []
    simulated = isolated.make(given.num_envs, given.env, given.options, python=given.python)
    with closing(simulated) as env:
        seeds = seed_ranges.held_out(seed_ranges.VALIDATION, given.episodes)
        for begin in range(0, given.episodes, given.num_envs):  # LeRobot runs in Python 3.12, too
            same = (lambda given: given,) * 2
            played = rollout(Scenes(env), policy, *same, *processors, seeds=list(seeds[begin : begin + given.num_envs]))
            found += played["success"].any(dim=1).tolist()
    low, high = wilson(sum(found), len(found))
    print(json.dumps({"success": np.mean(found), "low": low, "high": high, "episodes": len(found), "each": found}))


if __name__ == "__main__":
    main()
