"""Any environment, simulated or imagined, with the reward of a reward model.

After every action the model reads the frame and the instruction.  The reward of an action is

    r_t = progress (p_t - p_{t-1}) + done [the task is done for the first time] + env r'_t

with the model's progress ``p`` (``p_0`` is that of the frame after the reset), the environment's own reward ``r'`` and
the weights of ``RewardWeights``.  The differences telescope: an episode earns ``p_T - p_0`` for its progress, so moving
back and forth earns nothing.

The first ``done`` ends an episode with success, also inside a chunk: the remaining actions of the chunk are not valid,
and later frames are hidden until the reset.  The environment's own ends and successes stay as they are: where it
reports a failure with the same action, the model's ``done`` does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_rl.contract.env import Observation, Observe, Snapshot, Snapshots, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.tracker import restore_rows, select_rows
from vla_rl.rewards.reward_model import Reward

_REWARD_STATE, _ESTIMATES, _DISPLAYED = "reward/", "estimates/", "displayed/"


@dataclass(frozen=True)
class RewardWeights:
    """Weights of the parts of the reward."""

    progress: float = 1.0  # of the difference of progress; all of the way sums to it
    done: float = 0.0  # once, when the task is done
    env: float = 0.0  # of the environment's own reward; 0 replaces it


class RewardedEnv:
    """``env`` with the reward of ``reward`` (``VecEnv``).

    All environments are evaluated together after every action, so that a reward depends neither on how actions are cut
    into chunks nor on how many environments are reset.  A single environment cannot be stopped, so those that ended by
    ``done`` receive actions of zero (as near as the bounds allow), and their later frames are hidden.  Every frame is
    rendered, not only the last one of a chunk.

    An environment whose arrays are tensors on a device is converted to numpy here, frames included: the spec's device
    becomes "cpu".
    """

    def __init__(self, env: VecEnv, reward: Reward, weights: RewardWeights | None = None) -> None:
        """Raises UserError for an environment without cameras."""
        self.env, self.reward, self.weights = env, reward, weights or RewardWeights()
        if not env.spec.images:
            raise UserError(
                f"{env.spec.name!r} has no camera, so a reward model cannot evaluate it; give an environment with "
                "images."
            )
        self.num_envs, self.close = env.num_envs, env.close
        name, success = f"rewarded {env.spec.name}", env.spec.success or "once"
        self.spec = replace(env.spec, name=name, success=success, device="cpu")
        self._reward_state = {name: np.asarray(item) for name, item in reward.initial_state(env.num_envs).items()}
        self._estimates = {"done": np.zeros(env.num_envs, bool), "progress": np.zeros(env.num_envs, np.float32)}
        self._displayed = env.spec.zeros(env.num_envs).arrays()  # all observations

    @property
    def progress(self) -> np.ndarray:
        """float32 [E]: the model's progress in the latest frames."""
        return self._estimates["progress"].copy()

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """Start new episodes in ``env_ids`` (int [R]) with ``seeds`` (int [R]) and evaluate their first frames."""
        obs = _to_host(self.env.reset(env_ids, seeds))
        is_reset = np.zeros(self.num_envs, bool)
        is_reset[np.asarray(env_ids, np.intp)] = True
        self._estimates["done"] = self._estimates["done"] & ~is_reset
        obs = self._display(obs)
        if is_reset.any():
            self._reward_state = dict(self.reward.reset_state(self._reward_state, np.flatnonzero(is_reset)))
            self._evaluate(obs, is_reset)
        return obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] and evaluate every frame; see ``VecEnv.step``."""
        step = self.env.step(self._mask_done_rows(chunk), observe="all").mapped(on_host)
        valid, env_reward = step.valid.copy(), step.reward.copy()
        # Index of the action with which the environment itself reported a failure; -1 without one.
        failed = step.terminated & ~step.success & (self.env.spec.success is not None)
        failure = np.where(failed, step.valid.sum(1) - 1, -1)
        reward, displayed = np.zeros(env_reward.shape, np.float32), []
        for i, frame in enumerate(step.frames):
            valid[:, i] &= ~self._estimates["done"]
            displayed.append(self._display(_to_host(frame)))
            before = self._estimates["progress"]
            done = self._evaluate(displayed[-1], valid[:, i]) & (failure != i)
            gained = self.weights.progress * (self._estimates["progress"] - before) + self.weights.done * done
            reward[:, i] = np.where(valid[:, i], gained + self.weights.env * env_reward[:, i], 0.0)
            self._estimates["done"] = self._estimates["done"] | done
        return self._make_step(step, reward, valid, displayed, observe)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _mask_done_rows(self, chunk: Any) -> Any:
        """``chunk`` for ``env``, with zeros for environments that are done; ``env`` itself refuses a wrong shape."""
        action, done = np.asarray(chunk, np.float32), self._estimates["done"]
        if done.any() and action.ndim == 3 and action.shape[::2] == (self.num_envs, self.spec.action_dim):
            zero = np.clip(np.zeros(self.spec.action_dim, np.float32), self.spec.action.low, self.spec.action.high)
            action = np.where(done[:, None, None], zero, action)
        return action if self.env.spec.device == "cpu" else torch.from_numpy(action).to(self.env.spec.device)

    def _evaluate(self, obs: Observation, new: np.ndarray) -> np.ndarray:
        """Evaluate the ``new`` [E] frames in ``obs``; returns bool [E], which of these are done."""
        frames = {name: image[:, None] for name, image in obs.images.items()}
        text = [self.spec.tasks[task] for task in obs.task.tolist()]
        found, state = self.reward.evaluate(frames, text, new[:, None], self._reward_state)
        self._reward_state = dict(state)
        progress = np.where(new, found.progress[:, 0], self._estimates["progress"])
        self._estimates["progress"] = progress.astype(np.float32)
        return found.done[:, 0] & new

    def _display(self, obs: Observation) -> Observation:
        """``obs``, but with the earlier observation of environments that are done."""
        frozen, arrays = self._estimates["done"], obs.arrays()
        if frozen.any():
            arrays = {name: item.copy() for name, item in arrays.items()}
            for name, item in arrays.items():
                item[frozen] = self._displayed[name][frozen]
        self._displayed = arrays
        return Observation.of_arrays(arrays)

    def _make_step(
        self, step: Step, reward: np.ndarray, valid: np.ndarray, displayed: list[Observation], observe: Observe
    ) -> Step:
        done = self._estimates["done"].copy()
        return Step(
            obs=displayed[-1],
            reward=reward,
            valid=valid,
            terminated=step.terminated | done,
            truncated=step.truncated & ~done,
            cause=tuple("success" if ended else cause for ended, cause in zip(done, step.cause, strict=True)),
            success=step.success | done,
            executed=np.where(valid[..., None], step.executed, np.float32(0)),
            intervened=step.intervened & valid,
            frames=tuple(displayed) if observe == "all" else (),
        )


class RewardedSnapshots(RewardedEnv):
    """The same for an environment with snapshots (``Snapshots``); the reward model's state is part of them."""

    env: Any

    def snapshot(self, env_ids: Any) -> Snapshot:
        inner = self.env.snapshot(env_ids)
        return inner | select_rows(self._arrays(), np.asarray(env_ids, np.intp))

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        index, own = np.asarray(env_ids, np.intp), (_REWARD_STATE, _ESTIMATES, _DISPLAYED)
        arrays = {name: item.copy() for name, item in self._arrays().items()}
        inner = {name: item for name, item in snapshot.items() if not name.startswith(own)}
        restore_rows(arrays, index, {name: item for name, item in snapshot.items() if name not in inner})
        obs = _to_host(self.env.restore(env_ids, inner))
        self._reward_state, self._estimates, self._displayed = (_with_prefix(arrays, kind) for kind in own)
        return self._display(obs)

    def _arrays(self) -> dict[str, np.ndarray]:
        kinds: dict[str, Mapping[str, np.ndarray]] = {
            _REWARD_STATE: self._reward_state,
            _ESTIMATES: self._estimates,
            _DISPLAYED: self._displayed,
        }
        return {kind + name: item for kind, items in kinds.items() for name, item in items.items()}


def rewarded(env: VecEnv, reward: Reward, weights: RewardWeights | None = None) -> RewardedEnv:
    """``env`` with the reward of ``reward``; with snapshots if ``env`` has them."""
    kind = RewardedSnapshots if isinstance(env, Snapshots) else RewardedEnv
    return kind(env, reward, weights)


def _to_host(obs: Observation) -> Observation:
    """``obs`` as numpy arrays; the same arrays if they are numpy already."""
    return Observation.of_arrays({name: on_host(item) for name, item in obs.arrays().items()})


def _with_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Those of ``arrays`` whose name begins with ``prefix``, without it."""
    return {name.removeprefix(prefix): item for name, item in arrays.items() if name.startswith(prefix)}
