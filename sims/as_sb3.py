"""Vector environments of Gymnasium for Stable-Baselines3, which has a vector interface of its own.

    from stable_baselines3 import PPO
    from sims.as_sb3 import make_vec

    PPO("MlpPolicy", make_vec("vla_rl/point_mass-v0", num_envs=16)).learn(100_000)

One environment needs nothing of this: ``PPO("MlpPolicy", gymnasium.make("vla_rl/point_mass-v0"))``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

import sims.as_gymnasium  # noqa: F401  # registers ours
from vla_rl.contract.errors import UserError


def make_vec(id: str, num_envs: int = 1, seed: int | None = None, **options: Any) -> VecMonitor:
    """``num_envs`` environments of ``id``, stepped together, for Stable-Baselines3, with statistics of episodes.

    ``options`` are those of ``gymnasium.make_vec``; the first episodes have the seeds ``seed``, ``seed + 1``, ...
    """
    envs = SB3VecEnv(gymnasium.make_vec(id, num_envs, **{"autoreset_mode": AutoresetMode.SAME_STEP, **options}))
    envs.seed(seed)
    return VecMonitor(envs)


class SB3VecEnv(VecEnv):
    """A Gymnasium vector environment with the autoreset mode SameStep, behind Stable-Baselines3's ``VecEnv``."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Owns ``env``; raises UserError for another autoreset mode."""
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise UserError(
                f"{env} does not restart episodes in the step that ends them, as Stable-Baselines3 expects, so its "
                "returns would be wrong; make it with autoreset_mode='SameStep'."
            )
        self.env = env
        self._actions: Any = None
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> Any:
        # Gymnasium's own vector environments take a list, though their base class is not typed so.
        seeds: Any = self._seeds if any(seed is not None for seed in self._seeds) else None
        obs, _ = self.env.reset(seed=seeds)
        self._reset_seeds()
        self._reset_options()
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, reward, terminated, truncated, infos = self.env.step(self._actions)
        done = terminated | truncated
        rows: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(done):
            final = infos["final_info"]
            rows[i] = {name: final[name][i] for name in final if final.get(f"_{name}", np.zeros(i + 1))[i]}
            rows[i] |= {"terminal_observation": infos["final_obs"][i], "TimeLimit.truncated": bool(truncated[i])}
        return obs, reward.astype(np.float32), done, rows

    def close(self) -> None:
        self.env.close()

    def get_images(self) -> Sequence[Any]:
        return self.env.render() or [None] * self.num_envs

    def get_attr(self, attr_name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """The attribute of the vector environment, once for each of ``indices``."""
        return [getattr(self.env, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: int | Iterable[int] | None = None) -> None:
        raise _together("set_attr", attr_name)

    def env_method(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        raise _together("env_method", method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: int | Iterable[int] | None = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


def _together(method: str, name: str) -> UserError:
    return UserError(
        f"{method}({name!r}) asks for single environments, but these are simulated together, so nothing was done; use "
        "the vector environment itself (.env), or stable_baselines3.common.env_util.make_vec_env."
    )
