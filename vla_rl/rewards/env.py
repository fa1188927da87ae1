"""Any environment, simulated or imagined, under the eyes of a reward model.

After every action the model sees the frame and reads the instruction.  What an action earns is

    r_t = progress (p_t - p_{t-1}) + done [the task is done for the first time] + own r'_t

with ``p`` the model's progress, ``p_0`` that of the frame after the reset, and ``r'`` what the environment pays itself
(``RewardWeights``).  The differences telescope: an episode earns ``p_T - p_0`` for its progress, so going back and
forth is worth nothing and a step back costs what it undoes.

The first ``done`` ends an episode with success, also inside a chunk: what follows of the chunk is not valid, and the
row shows its last frame until it is reset.  Ends and successes of the environment itself stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vla_rl.contract.env import Observation, Observe, Snapshot, Snapshots, Step, VecEnv
from vla_rl.contract.errors import UserError
from vla_rl.contract.rows import restore_rows, select_rows
from vla_rl.rewards.reward import Reward

_MEMORY, _JUDGED, _SHOWN = "reward/", "judged/", "shown/"


@dataclass(frozen=True)
class RewardWeights:
    """What pays, and how much."""

    progress: float = 1.0  # for all of the way; the differences sum to it
    done: float = 0.0  # once, when the task is done
    own: float = 0.0  # times what the environment pays itself; 0 replaces it


class RewardedEnv:
    """``E`` rows of ``env``, paid for what ``reward`` sees (``VecEnv``).

    Rows are judged together after every action, so that what one earns depends neither on how actions are cut into
    chunks nor on how many rows are reset.  Rows that ended by ``done`` are stepped on with actions of zero (as near as
    bounds allow) where nobody looks, since a row of ``env`` cannot be stopped.  Every frame is drawn, not only the last
    of a chunk.
    """

    def __init__(self, env: VecEnv, reward: Reward, weights: RewardWeights | None = None) -> None:
        """Raises UserError for an environment without cameras and for one that does not speak numpy."""
        self.env, self.reward, self.weights = env, reward, weights or RewardWeights()
        if not env.spec.images or env.spec.device != "cpu":
            lack = "no camera" if not env.spec.images else f"its arrays on {env.spec.device!r}"
            raise UserError(
                f"{env.spec.name!r} has {lack}, so a reward model cannot look at it; give an environment with pictures "
                "in numpy."
            )
        self.spec = replace(env.spec, name=f"rewarded {env.spec.name}", success=env.spec.success or "once")
        self._memory = {name: np.asarray(item) for name, item in reward.initial_state(env.num_envs).items()}
        self._judged = {"done": np.zeros(env.num_envs, bool), "progress": np.zeros(env.num_envs, np.float32)}
        self._shown = _nothing(env)  # the observation of every row, by the names of :func:`_flat`

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    @property
    def progress(self) -> np.ndarray:
        """float32 [E]: the model's opinion of what each row shows."""
        return self._judged["progress"].copy()

    def reset(self, rows: Any, seeds: Any) -> Observation:
        """Start new episodes in ``rows`` (int [R]) with ``seeds`` (int [R]); their first frames are seen."""
        obs = self.env.reset(rows, seeds)
        fresh = np.zeros(self.num_envs, bool)
        fresh[np.asarray(rows, np.intp)] = True
        self._judged["done"] = self._judged["done"] & ~fresh
        obs = self._show(obs)
        if fresh.any():
            self._memory = dict(self.reward.reset_state(self._memory, np.flatnonzero(fresh)))
            self._judge(obs, fresh)
        return obs

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,D] and judge every frame; see ``VecEnv.step``."""
        step = self.env.step(self._quiet(chunk), observe="all")
        valid, own = (np.asarray(item).copy() for item in (step.valid, step.reward))
        reward, shown = np.zeros(own.shape, np.float32), []
        for i, frame in enumerate(step.frames):
            valid[:, i] &= ~self._judged["done"]
            shown.append(self._show(frame))
            before = self._judged["progress"]
            done = self._judge(shown[-1], valid[:, i])
            gained = self.weights.progress * (self._judged["progress"] - before) + self.weights.done * done
            reward[:, i] = np.where(valid[:, i], gained + self.weights.own * own[:, i], 0.0)
            self._judged["done"] = self._judged["done"] | done
        return self._told(step, reward, valid, shown, observe)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    # -- parts ------------------------------------------------------------------------------------------------------

    def _quiet(self, chunk: Any) -> Any:
        """``chunk`` with harmless actions in the rows that are done; one of a wrong shape is left for ``env``."""
        action, done = np.asarray(chunk, np.float32), self._judged["done"]
        if not done.any() or action.ndim != 3 or action.shape[::2] != (self.num_envs, self.spec.action_dim):
            return chunk
        rest = np.clip(np.zeros(self.spec.action_dim, np.float32), self.spec.action.low, self.spec.action.high)
        return np.where(done[:, None, None], rest, action)

    def _judge(self, obs: Observation, new: np.ndarray) -> np.ndarray:
        """Let the model see the ``new`` [E] frames in ``obs``; returns bool [E], which of these are done."""
        frames = {name: image[:, None] for name, image in obs.images.items()}
        text = [self.spec.tasks[task] for task in obs.task.tolist()]
        found, memory = self.reward.judge(frames, text, new[:, None], self._memory)
        self._memory = dict(memory)
        self._judged["progress"] = np.where(new, found.progress[:, 0], self._judged["progress"]).astype(np.float32)
        done: np.ndarray = found.done[:, 0] & new
        return done

    def _show(self, obs: Observation) -> Observation:
        """``obs``, but what they showed before in the rows that are done."""
        held, now = self._judged["done"], _flat(obs)
        if held.any():
            now = {name: item.copy() for name, item in now.items()}
            for name, item in now.items():
                item[held] = self._shown[name][held]
        self._shown = now
        return _observation(now)

    def _told(
        self, step: Step, reward: np.ndarray, valid: np.ndarray, shown: list[Observation], observe: Observe
    ) -> Step:
        done = self._judged["done"].copy()
        return Step(
            obs=shown[-1],
            reward=reward,
            valid=valid,
            terminated=step.terminated | done,
            truncated=step.truncated & ~done,
            cause=tuple("success" if judged else cause for judged, cause in zip(done, step.cause, strict=True)),
            success=step.success | done,
            executed=np.where(valid[..., None], step.executed, np.float32(0)),
            intervened=step.intervened & valid,
            frames=tuple(shown) if observe == "all" else (),
        )


class RewardedSnapshots(RewardedEnv):
    """The same around an environment that can be saved (``Snapshots``): what the model remembers is saved with it."""

    env: Any

    def snapshot(self, rows: Any) -> Snapshot:
        """Everything the future of ``rows`` depends on; see ``Snapshots``."""
        inner = self.env.snapshot(rows)
        return inner | select_rows(self._arrays(), np.asarray(rows, np.intp))

    def restore(self, rows: Any, snapshot: Snapshot) -> Observation:
        """Put ``snapshot`` into ``rows``; raises ContractError, with nothing restored, when it does not fit."""
        index = np.asarray(rows, np.intp)
        arrays = {name: item.copy() for name, item in self._arrays().items()}
        inner = {name: item for name, item in snapshot.items() if not name.startswith((_MEMORY, _JUDGED, _SHOWN))}
        restore_rows(arrays, index, {name: item for name, item in snapshot.items() if name not in inner})
        obs = self.env.restore(rows, inner)
        self._memory, self._judged, self._shown = (_part(arrays, kind) for kind in (_MEMORY, _JUDGED, _SHOWN))
        return self._show(obs)

    def _arrays(self) -> dict[str, np.ndarray]:
        kinds: dict[str, Mapping[str, np.ndarray]] = {_MEMORY: self._memory, _JUDGED: self._judged, _SHOWN: self._shown}
        return {kind + name: item for kind, items in kinds.items() for name, item in items.items()}


def rewarded(env: VecEnv, reward: Reward, weights: RewardWeights | None = None) -> RewardedEnv:
    """``env`` paid for what ``reward`` sees, with snapshots if it has them."""
    kind = RewardedSnapshots if isinstance(env, Snapshots) else RewardedEnv
    return kind(env, reward, weights)


def _part(arrays: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(kind): item for name, item in arrays.items() if name.startswith(kind)}


def _flat(obs: Observation) -> dict[str, np.ndarray]:
    """The arrays of ``obs`` by name."""
    pictures = {f"images/{name}": image for name, image in obs.images.items()}
    extras = {f"extras/{name}": extra for name, extra in obs.extras.items()}
    return {**pictures, **extras, "state": obs.state, "task": obs.task, "time": obs.time}


def _nothing(env: VecEnv) -> dict[str, np.ndarray]:
    """What an observation of ``env`` consists of, all zero."""
    spec, rows = env.spec, env.num_envs
    arrays = {f"images/{name}": item for name, item in spec.images.items()}
    arrays |= {f"extras/{name}": item for name, item in spec.extras.items()} | {"state": spec.state}
    zeros = {name: np.zeros((rows, *item.shape), item.dtype) for name, item in arrays.items()}
    return zeros | {name: np.zeros(rows, np.int64) for name in ("task", "time")}


def _observation(flat: Mapping[str, np.ndarray]) -> Observation:
    return Observation(_part(flat, "images/"), flat["state"], flat["task"], flat["time"], _part(flat, "extras/"))
