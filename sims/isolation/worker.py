"""The process of an isolated environment: ``python -m sims.isolation.worker``, started by ``sims/isolated.py``.

It makes an environment of the catalogue (or "package.module:make") from JSON and does what its owner asks for.  It
imports the contract and the simulator only, so it runs in an installation without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any
import numpy as np
from sims import catalog
from sims.isolation.channel import Arrays, Channel, InMessages, SharedMemory
from sims.isolation.channel import observation_arrays, step_arrays
from vla_rl.contract.check import check_ends
from vla_rl.contract.child import error_answer, serve_owner
from vla_rl.contract.env import Observation, Snapshots, VecEnv, on_host
from vla_rl.contract.errors import ContractError, did_you_mean
from vla_rl.contract.foreign import require_finite_observation, require_finite_step
from dataclasses import replace
from typing import Any, Protocol
from vla_rl.contract.env import PRIVILEGED, Observation, Observe, Snapshot, Snapshots, Step, VecEnv, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import EnvSpec


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


class EnvServer:
    """One environment and the requests about it; each has a name, JSON fields and arrays, and so has its answer."""

    def __init__(self) -> None:
        self.env: VecEnv
        self.channel: Channel = InMessages()
        self.seeds = np.zeros(0, np.int64)

    def answer(self, request: dict[str, Any], writer: IO[bytes] | None = None) -> dict[str, Any]:
        """What ``request`` asks for, or the error that came up."""
        known: dict[str, Callable[..., tuple[dict[str, Any], Arrays]]] = {
            item.__name__: item for item in (self.make, self.reset, self.step, self.snapshot, self.restore, self.close)
        }
        try:
            what, arrays = str(request.pop("do")), request.pop("arrays", None)
            if what not in known:
                raise ContractError(f"a worker cannot do {what!r}, so nothing was done; {did_you_mean(what, known)}")
            given = {} if arrays is None else self.channel.get(arrays)
            fields, found = known[what](**request, **given)
            return {**fields, "arrays": self.channel.put(found)}
        except Exception as error:
            return error_answer(error, "the environment")

    def make(
        self,
        env: str,
        num_envs: int,
        options: Mapping[str, Any],
        expert: bool,
        memory: Mapping[str, list[int]] | None = None,
    ) -> tuple[dict[str, Any], Arrays]:
        """Make the environment, with its expert's actions in the observations if ``expert`` says so.

        ``memory`` are the descriptors of shared files; None sends arrays in messages.
        """
        if memory is not None:
            self.channel = SharedMemory(memory["outbox"], memory["inbox"])
        made = catalog.make(env, num_envs=num_envs, **options)
        self.env = with_expert(made, catalog.expert(env, 1, **options)) if expert else made
        self.seeds = np.zeros(num_envs, np.int64)
        return {"spec": self.env.spec.to_json()}, {}

    def reset(self, env_ids: np.ndarray, seeds: np.ndarray) -> tuple[dict[str, Any], Arrays]:
        self.seeds[env_ids] = seeds
        return {}, self._sound(self.env.reset(env_ids.copy(), seeds.copy()))

    def step(self, chunk: np.ndarray, observe: Any) -> tuple[dict[str, Any], Arrays]:
        step = self.env.step(chunk.copy(), observe=observe)
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

    def _sound(self, obs: Observation) -> Arrays:
        require_finite_observation(self.env, obs, self.seeds)
        return observation_arrays(obs)


if __name__ == "__main__":
    serve_owner("worker", EnvServer().answer)
