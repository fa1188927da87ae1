"""Scripted experts beside their simulator: observations hold what the expert would do next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from vla_rl.contract.env import PRIVILEGED, EnvSpec, Observation, Observe, Snapshot, Snapshots, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError

EXPERT_ACTION = PRIVILEGED + "expert_action"


class Expert(Protocol):
    """A scripted expert; what it does depends on the observation alone."""

    def act(self, obs: Observation) -> np.ndarray:
        """The next actions, float32 [E,H,D], in physical units."""


class WithExpertEnv:
    """``env`` whose observations hold ``privileged/expert_action`` (float32 [E,D]), the expert's next action."""

    def __init__(self, env: VecEnv, expert: Expert) -> None:
        """``expert`` plans one action at a time."""
        self.env, self.expert = env, expert
        self.spec = with_expert_action(env.spec)

    @property
    def num_envs(self) -> int:
        return self.env.num_envs

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        return self._shown(self.env.reset(env_ids, seeds))

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        step = self.env.step(chunk, observe=observe)
        frames = tuple(map(self._shown, step.frames))
        return replace(step, obs=frames[-1] if frames else self._shown(step.obs), frames=frames)

    def close(self) -> None:
        self.env.close()

    def _shown(self, obs: Observation) -> Observation:
        action = on_host(self.expert.act(obs))[:, 0]
        clipped = np.clip(action, self.spec.action.low, self.spec.action.high).astype(self.spec.action.dtype)
        return replace(obs, extras={**obs.extras, EXPERT_ACTION: clipped})


class WithExpertSnapshotEnv(WithExpertEnv):
    """The same for an environment with snapshots (``Snapshots``)."""

    env: Any

    def snapshot(self, env_ids: Any) -> Snapshot:
        saved: Snapshot = self.env.snapshot(env_ids)
        return saved

    def restore(self, env_ids: Any, snapshot: Snapshot) -> Observation:
        return self._shown(self.env.restore(env_ids, snapshot))


def with_expert(env: VecEnv, expert: Expert) -> WithExpertEnv:
    """``env`` with the actions of ``expert`` in its observations; with snapshots if ``env`` has them."""
    return (WithExpertSnapshotEnv if isinstance(env, Snapshots) else WithExpertEnv)(env, expert)


def with_expert_action(spec: EnvSpec) -> EnvSpec:
    """``spec`` with ``privileged/expert_action``."""
    return replace(spec, extras={**spec.extras, EXPERT_ACTION: spec.action})


class ExpertInWorker:
    """The expert that a worker runs beside its simulator, read from ``privileged/expert_action``."""

    def __init__(self, horizon: int) -> None:
        """Raises UserError unless it is asked for one action at a time."""
        if horizon != 1:
            raise UserError(
                f"the expert of an isolated environment knows its next action only, so it cannot plan {horizon}; ask "
                "for one at a time."
            )

    def act(self, obs: Observation) -> np.ndarray:
        """The next action, float32 [E,1,D]; raises UserError for an environment that was made without it."""
        if EXPERT_ACTION not in obs.extras:
            raise UserError(
                f"the observation has no {EXPERT_ACTION!r}, so the expert cannot be followed; make the isolated "
                "environment with expert=True."
            )
        return on_host(obs.extras[EXPERT_ACTION])[:, None]
